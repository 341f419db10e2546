// The numbered calls that all ranks of a group make together: every rank mails its bytes in steps, and reads the
// others' mail of a step once all have mailed it. There are two mails, so that a rank may write the next while others
// still read the last one.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "collective/shared/page.h"

namespace tessera::collective {

struct Call {
  CallKind kind = CallKind::kExchange;
  std::string_view what{};
  std::span<const std::byte> bytes{};
  bool equal_sizes = false;  // of all ranks
  uint64_t most_bytes = 0;   // that a peer may send
};

// What a rank has sent, from `offset` on; in the order of offsets, and of ranks for one offset. This rank's, too.
using TakeMail = std::function<void(int rank, uint64_t offset, std::span<const std::byte> bytes)>;

// What the calls need of the group.
struct CallRoom {
  std::vector<Page> pages{};  // by rank
  int rank = 0;
  std::function<void()> ring{};                                         // after a step
  std::function<void(uint64_t step, const std::string& what)> await{};  // until all ranks have mailed `step`
  std::function<void(const Status&)> fail{};                            // the group, by a peer's mail
  std::function<std::string(int rank)> describe{};
};

// Thread-safe: one call at a time, others wait for their turn.
class Calls {
 public:
  explicit Calls(CallRoom room) : room_(std::move(room)) {}

  // Returns the call's number. Throws Error(kMismatch), which names both calls and has failed the group, if a rank
  // makes another call; kDeadlineExceeded if the turn does not come.
  uint64_t run(const Call& call, const TakeMail& take, const Deadline& turn);

 private:
  class Turn;
  void mail(const MailHeader& header, std::span<const std::byte> bytes);
  MailHeader header_of(int rank, const MailHeader& own, const Call& call);
  void take_step(uint64_t offset, const std::vector<uint64_t>& sizes, const TakeMail& take);
  std::string text(const MailHeader& header) const;

  const CallRoom room_;
  Mutex mutex_;
  CondVar free_;
  bool busy_ GUARDED_BY(mutex_) = false;
  uint64_t number_ = 0;  // of whose turn it is
  uint64_t step_ = 0;
};

}  // namespace tessera::collective
