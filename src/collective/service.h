// The thread of a rank's group, "tessera-group": it connects to all peers, gives and takes descriptors of pages and
// arenas, and watches the peers' processes.
//
// Each pair of ranks has one connection, made by the lower rank, for as long as the group lives. The socket that ranks
// listen at is gone once all have connected.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/event_loop.h"
#include "base/framing.h"
#include "base/listener.h"
#include "base/mutex.h"
#include "base/runtime_dir.h"
#include "collective/messages.h"
#include "collective/shared/arenas.h"
#include "collective/shared/bells.h"
#include "collective/shared/page.h"
#include "collective/shared/shared_pages.h"

namespace tessera::collective {

// What the ranks show, once they are connected. This rank's are set from the start.
struct RankPages {
  std::vector<std::shared_ptr<SharedPages>> pages;
  std::shared_ptr<SharedPages> bells;
};

// Thread-safe, except that start() is called once and stop() ends it.
class Service {
 public:
  // Listens. Throws Error.
  Service(int rank, int size, Arenas& arenas);
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  const std::string& socket() const { return socket_; }

  // Connects to all. `failed` is called on the loop's thread, at a peer's death or misdeed; it must not block.
  void start(std::vector<Bootstrap> ranks, RankPages own, std::function<void(const Status&)> failed);
  void stop();

  // Asks a peer for an arena; what arrives is in `arenas`.
  void ask(int rank, uint32_t arena);

  bool connected() const;       // to all
  RankPages pages() const;      // once connected
  std::string explain() const;  // why it is not: "rank 2 (pid 71) has not connected"
  // Sleeps until something has arrived or failed, and `ready`, or until the deadline.
  void sleep_until(const std::function<bool()>& ready, const Deadline& deadline) const;
  void wake();  // whoever sleeps there

 private:
  // One connection. The peer's rank is known once it has said hello.
  struct Link {
    explicit Link(UniqueFd socket);
    UniqueFd fd;
    int rank = -1;
    int called = -1;  // whose hello is expected, if this rank has connected
    FrameReader reader;
    FrameWriter writer;
  };
  struct Peer {
    std::shared_ptr<Link> link;
    UniqueFd pidfd;
    bool ended = false;  // the connection, without a good-bye
  };

  void begin();
  void watch(int rank);
  void connect(int rank);
  void add_link(const std::shared_ptr<Link>& link);
  void on_events(const std::shared_ptr<Link>& link, uint32_t events);
  void receive(const std::shared_ptr<Link>& link);
  void drop(const std::shared_ptr<Link>& link);
  void take(Link& link, Frame frame);
  void take_hello(Link& link, Frame frame);
  void take_question(Link& link, const Frame& frame);
  void take_arena(Link& link, Frame frame);
  void hello(Link& link, int rank);
  template <typename Message>
  void send(Link& link, const Message& message, std::vector<UniqueFd> fds = {});
  void died(int rank);
  void ended(int rank);
  bool excused(int rank) const;
  std::vector<std::string> lost_with(int rank) const;
  bool is_dead(int rank) const;
  void fail(const Status& status);
  void check_connected();
  std::string name(int rank) const;

  const int rank_;
  const int size_;
  Arenas& arenas_;
  std::optional<RuntimeDir> dir_;  // until all are connected
  std::string socket_;
  std::vector<Bootstrap> ranks_;
  std::function<void(const Status&)> failed_;

  // Of the loop's thread.
  std::optional<Listener> listener_;
  std::vector<Peer> peers_;
  std::vector<std::shared_ptr<Link>> strangers_;  // no hello yet

  mutable Mutex mutex_;
  mutable CondVar changed_;
  uint64_t changes_ GUARDED_BY(mutex_) = 0;
  RankPages pages_ GUARDED_BY(mutex_);
  bool connected_ GUARDED_BY(mutex_) = false;

  EventLoop loop_;  // last: it ends before what it uses
};

}  // namespace tessera::collective
