// The ranks of a sending job agree on the amaxes of a version before they quantise it: of each matrix, and of each
// block that a rank does not hold whole, all ranks get the largest amax that any has found. A star: every rank tells
// rank 0, which tells every rank.
//
//   rank r > 0                     rank 0
//   Attach; then Joins: its keys   Prepared, in between: it has the session as well
//   Amaxes: version, epoch, ...    once it has its own and everyone's: Agreed
//
// Of a matrix that is quantised already, all ranks must tell the same instead. It needs all ranks, and fails on all: at
// a value that no format can represent, or a send that is cancelled, late or of another version. On the loop's thread.
// docs/formats/bus-protocol.md, "Amaxes".
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
    std::function<void(const Status&)> lost;  // a rank of this job was lost, or rank 0 has lost one
    // What start() began is over: the amaxes of all ranks in the order of this rank's keys, or why there are none. The
    // span is valid during the call.
    std::function<void(const Status&, std::span<const float> amaxes)> agreed;
  };
  // `own`: this rank's keys, in any order, repeated if it uses one more than once. REQUIRES: at most kMaxAmaxes, and
  // `setup` outlives it.
  AmaxExchange(Agent& agent, const SessionSetup& setup, std::span<const AmaxKey> own, Events events);
  ~AmaxExchange();
  AmaxExchange(const AmaxExchange&) = delete;
  AmaxExchange& operator=(const AmaxExchange&) = delete;

  // Attaching: the others call rank 0.
  void adopt(std::shared_ptr<Link> link);  // ranks other than 0
  void accept(Caller caller);              // on rank 0, from its own job. Throws if that rank is already attached
  std::vector<Rank> peers() const;         // ranks that this rank has, or will have, a connection with
  bool ready(Rank peer) const;
  bool ready() const;  // all of them

  // Reports what this rank has found in `version`: one amax for each key, or none and the value that no format can
  // represent. agreed() follows, immediately if there is nobody else to ask. A version may be begun again once it is
  // over. REQUIRES: ready(), not busy
  void start(int64_t version, std::span<const float> amaxes, const NonfiniteFinding& finding = {});
  // Ends what was begun, if anything: agreed() follows immediately, and the others fail, too.
  void abort(const Status& status);
  // This rank reports no amaxes for a version that others may send: the same, without agreed(). REQUIRES: not busy
  void give_up(int64_t version, const Status& status);
  // Nor for any version up to this one: it sent them before this session existed. REQUIRES: not busy
  void passed(int64_t version);

  bool busy() const { return version_ != 0; }
  std::vector<std::string> waiting_for() const;  // ranks whose amaxes are still missing, as far as this rank can see
  std::vector<Link*> awaited_links() const;      // their links
  std::vector<Link*> links() const;
  void detach(const Status& why);

 private:
  // On rank 0: one of the others.
  struct Follower {
    std::string name;
    std::shared_ptr<Link> link;
    bool joined = false;
    std::vector<AmaxKey> keys;     // until all ranks have joined
    std::vector<uint32_t> places;  // of its amaxes among those of all ranks
    bool reported = false;         // it has reported a version and has not been answered
    Amaxes report;                 // the last one
    uint32_t answered = 0;         // the last epoch that was answered
    int64_t passed = 0;            // it reports no amaxes for versions up to this one
    // The last version that it gave up and why, if it has reported a later one since. 0: none
    int64_t given_up = 0;
    Status given_up_for;
    // A version that failed here before this rank reported it, and why. 0: none
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
  Status merge_reports();  // into own_
  Status differs(uint32_t place, Rank first, Rank second, float told) const;
  void fail_round(const Status& own, const Status& others);
  void fail_followers(int64_t version, const Status& status);
  void finish(const Status& status, std::span<const float> amaxes = {});
  void lose(const Status& status, const Follower* whom);
  void require_known(const NonfiniteFinding& finding) const;
  Status status_of(const NonfiniteFinding& finding) const;
  Status not_collective(const Follower& follower) const;
  static Status told_by(const Follower& follower);     // why it has no amaxes
  Status heard_from_here(const Status& status) const;  // as it is sent to the others
  static Status has_passed(const std::string& name, int64_t version);

  Agent& agent_;
  const SessionSetup& setup_;
  const Events events_;
  std::vector<AmaxKey> keys_;     // ascending and unique: of this rank; on rank 0, of all
  std::vector<uint32_t> places_;  // of this rank's amaxes in keys_
  std::vector<float> result_;     // in the order of this rank's keys

  std::shared_ptr<Link> leader_;  // on ranks other than 0
  bool prepared_ = false;
  uint32_t epoch_ = 0;  // of the last version that was begun, or given up
  Agreed heard_;        // kept for its memory

  std::map<Rank, Follower> followers_;  // on rank 0
  int64_t passed_ = 0;
  std::vector<Rank> given_by_;  // who has told a given key in this round, by place; empty if there are none
  Amaxes read_;                 // the same
  Agreed told_;                 // the same

  int64_t version_ = 0;  // the version that was begun
  Amaxes own_;           // what this rank has found, in the order of keys_; later what all ranks have found
  Status lost_;
};

}  // namespace tessera::bus
