// The ranks of a sending job agree on the amaxes of a version before they quantise it: what each has found of a matrix,
// or of a block that it does not hold whole, meets what the others have found, and all get the largest. A star: every
// rank tells rank 0, which tells every rank.
//
//   rank r > 0                     rank 0
//   Attach; then Joins: its keys   Prepared, in between: it has the session, too
//   Amaxes: version, epoch, ...    once it has its own and everyone's: Agreed
//
// It takes all ranks, or fails on all: a value that no format takes, a send that is cancelled, late or of another
// version. On the loop's thread. docs/formats/bus-protocol.md, "Amaxes".
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bus/prepare/amax_messages.h"
#include "bus/session/session.h"

namespace tessera::bus {

class AmaxExchange {
 public:
  struct Events {
    std::function<void()> ready_changed;
    std::function<void(const Status&)> lost;  // an own rank was lost, or another one that rank 0 had a connection with
    // What start() began is over: the amaxes of all ranks in the order of this one's keys, or why there are none. They
    // are there for the time of the call.
    std::function<void(const Status&, std::span<const float> amaxes)> agreed;
  };
  // `own`: the keys of this rank, in any order, as often as it has use for them. REQUIRES: at most kMaxAmaxes, and that
  // `setup` outlives it.
  AmaxExchange(Agent& agent, const SessionSetup& setup, std::span<const AmaxKey> own, Events events);
  ~AmaxExchange();
  AmaxExchange(const AmaxExchange&) = delete;
  AmaxExchange& operator=(const AmaxExchange&) = delete;

  // Attaching: the others call rank 0.
  void adopt(std::shared_ptr<Link> link);  // ranks other than 0
  void accept(Caller caller);              // rank 0; of its own job. Throws where it is attached already
  std::vector<Rank> peers() const;         // whom this rank has, or is to have, a connection with
  bool ready(Rank peer) const;
  bool ready() const;  // all of them

  // Tells what this rank has found of `version`: one amax a key, or none and what no format takes; agreed() follows, at
  // once where nobody is left to be asked. A version may be begun again once it is over. REQUIRES: ready(), not busy
  void start(int64_t version, std::span<const float> amaxes, const NonfiniteFinding& finding = {});
  void abort(const Status& status);  // what was begun, if anything: agreed() follows at once, and the others fail, too
  // This rank sends no amaxes of a version that others may send: the same, without agreed(). REQUIRES: not busy
  void give_up(int64_t version, const Status& status);
  // Nor of any up to this one, which it had sent before this session was there. REQUIRES: not busy
  void passed(int64_t version);

  bool busy() const { return version_ != 0; }
  std::vector<std::string> waiting_for() const;  // ranks without amaxes yet, as far as this rank can see
  std::vector<Link*> awaited_links() const;      // theirs
  std::vector<Link*> links() const;
  void detach(const Status& why);

 private:
  // Rank 0: one of the others.
  struct Follower {
    std::string name;
    std::shared_ptr<Link> link;
    bool joined = false;
    std::vector<AmaxKey> keys;     // until all are there
    std::vector<uint32_t> places;  // of its amaxes among all
    bool reported = false;         // it has told of a version, and not been answered
    Amaxes report;                 // the last one
    uint32_t answered = 0;         // the last epoch that it was
    int64_t passed = 0;            // it sends no amaxes of versions up to this
    // The version that it has given up last and why, where it has told of a later one since. 0: none
    int64_t given_up = 0;
    Status given_up_for;
    // A version that has failed here before it told of it, and why: 0 if there is none.
    int64_t failed_version = 0;
    Status failure;
  };

  bool leads() const { return agent_.identity().rank == 0; }
  void handle_leader(Frame& frame);
  void handle_agreed(const Agreed& agreed);
  void handle_follower(Rank rank, Frame& frame);
  void handle_joins(Follower& follower, Joins joins);
  void handle_report(Rank rank, Follower& follower, Frame& frame);
  void merge_keys();  // once all have joined
  void consider(Follower& follower);
  void answer(Follower& follower, const Status& status);
  void check_round();
  void fail_round(const Status& own, const Status& others);
  void fail_followers(int64_t version, const Status& status);
  void finish(const Status& status, std::span<const float> amaxes = {});
  void lose(const Status& status, const Follower* whom);
  void require_known(const NonfiniteFinding& finding) const;
  Status status_of(const NonfiniteFinding& finding) const;
  Status not_collective(const Follower& follower) const;
  static Status told_by(const Follower& follower);     // why it has no amaxes
  Status heard_from_here(const Status& status) const;  // as the others get it
  static Status has_passed(const std::string& name, int64_t version);

  Agent& agent_;
  const SessionSetup& setup_;
  const Events events_;
  std::vector<AmaxKey> keys_;     // ascending, each once: of this rank; at rank 0, of all
  std::vector<uint32_t> places_;  // of this rank's amaxes in keys_
  std::vector<float> result_;     // in the order of this rank's keys

  std::shared_ptr<Link> leader_;  // of ranks other than 0
  bool prepared_ = false;
  uint32_t epoch_ = 0;  // of the last version begun, or given up
  Agreed heard_;        // kept for its memory

  std::map<Rank, Follower> followers_;  // of rank 0
  int64_t passed_ = 0;
  Amaxes read_;  // the same
  Agreed told_;  // the same

  int64_t version_ = 0;  // begun
  Amaxes own_;           // what this rank has found, in the order of keys_; then what all have
  Status lost_;
};

}  // namespace tessera::bus
