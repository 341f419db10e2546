// The numbered calls that all ranks of a group make together: every rank mails its bytes in steps, and reads the
// others' mail of a step once all have mailed it. A page keeps kMails steps: who has step n + 1 has read the mails of
// step n, so that a rank may write the next mail while others still read the last one, and one more beside a call that
// it has left.
//
// A rank that cannot make a call that the others make refuses it: its mail has the reason in place of the bytes. The
// call then ends on every rank in its first step, and its number is used up on all of them, so that the next call
// matches. Whoever refuses does not wait for the others: it may have an error to raise. It waits before its next mail.
//
// A rank whose wait within a call ends by an exception (a signal's handler raises) cannot take its mail back: the
// others may have it all, and go on. It refuses the next number at once, by the mail behind. Those that have got what
// they wanted are told in their next call; those that wait for more mails of the call find the refusal in their place,
// and count both numbers.
//
// A rank that waits for something else than a mail, such as a word, looks for a refusal of the next call from time to
// time (hear()), and takes part in that call by passing it on.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
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
  bool equal_sizes = false;           // of all ranks
  uint64_t most_bytes = 0;            // that a peer may send
  std::optional<Duration> timeout{};  // of each wait for the others; none: the group's
};

// What a rank has sent, from `offset` on; in the order of offsets, and of ranks for one offset. This rank's, too.
using TakeMail = std::function<void(int rank, uint64_t offset, std::span<const std::byte> bytes)>;

// What the calls need of the group.
struct CallRoom {
  std::vector<Page> pages{};  // by rank
  int rank = 0;
  std::function<void()> ring{};  // after a step
  // Waits until all ranks have mailed `step`; for the group's time-out if it is given none.
  std::function<void(uint64_t step, const std::string& what, std::optional<Duration> timeout)> await{};
  std::function<void(const Status&)> fail{};  // the group, by a peer's mail
  std::function<std::string(int rank)> describe{};
};

// Thread-safe: one call at a time, others wait for their turn.
class Calls {
 public:
  explicit Calls(CallRoom room) : room_(std::move(room)) {}

  // Returns the call's number. Throws Error(kMismatch), which names both calls, if a rank makes another call: on all
  // ranks, whose next calls match again; if its number is another one, the group has failed. Throws "rank R: TEXT" with
  // the refusal's code, of the lowest rank that refuses the call; kDeadlineExceeded if the turn does not come.
  uint64_t run(const Call& call, const TakeMail& take, const Deadline& turn);
  // Takes part in the next call with a refusal. Waits for its turn and, if this rank has refused kMails - 2 calls
  // before that others have not come to, for these; not for this one. `forwarded`: the text names who has refused.
  // Throws kDeadlineExceeded if the turn does not come. REQUIRES: !reason.ok()
  void refuse(std::string_view what, const Status& reason, bool forwarded, const Deadline& turn);
  // Returns another rank's refusal of the call that this rank would make next, and takes part in it by passing it on.
  // Never blocks; returns nothing while a call is under way, which ends by itself.
  std::optional<Status> hear();
  // Returns the same, and does not take part. Never blocks; empty while another thread makes a call, which is told it.
  std::optional<Status> refused_next();
  // Whether a rank has come to the call that this rank would make next, and has not refused it. Never blocks.
  bool has_called_next(int rank) const;
  // Refuses the next call, as `rank` has come to it, and this rank waits for something else. Returns the reason, which
  // all ranks are told in these words; nothing while a call is under way.
  Status refuse_difference(int rank, const std::string& waits);
  struct Refusal {
    Status reason;     // as others are told it, but for the name of this rank
    bool own = false;  // this rank's
  };
  // Returns how many refusals this rank has told or been told: the same on all ranks between the same calls.
  uint64_t refusals() const;
  // Returns the last one of them.
  std::optional<Refusal> latest() const;
  // Returns this rank's refusal if that was its last call, as the other ranks are told it.
  std::optional<Status> last_refusal() const;

 private:
  class Turn;
  bool try_turn();
  void end_turn();
  void await_own(const std::string& what, std::optional<Duration> timeout = {});
  bool has_room() const;  // for one more mail
  void withdraw(const std::string& what);
  void mail_refusal(std::string_view what, const Status& reason, bool forwarded);
  void note(Refusal refusal);
  void settle_refusal();
  std::optional<Status> find_refusal(uint64_t step, uint64_t number) const;
  void require_no_refusal(uint64_t number);
  void mail(const MailHeader& header, std::span<const std::byte> bytes);
  MailHeader header_of(int rank, const MailHeader& own, const Call& call);
  Status difference(int rank, const MailHeader& theirs, const MailHeader& own) const;
  void take_step(uint64_t offset, const std::vector<uint64_t>& sizes, const TakeMail& take);
  std::string text(const MailHeader& header) const;

  const CallRoom room_;
  mutable Mutex mutex_;
  CondVar free_;
  bool busy_ GUARDED_BY(mutex_) = false;
  std::optional<Status> last_refusal_ GUARDED_BY(mutex_);
  std::optional<Refusal> latest_ GUARDED_BY(mutex_);
  uint64_t refusals_ GUARDED_BY(mutex_) = 0;
  std::atomic<uint64_t> number_ = 0;  // of whose turn it is; read by others
  std::atomic<uint64_t> step_ = 0;
  std::string unsettled_{};  // text of a refusal whose step some ranks may not have reached; empty: none
};

}  // namespace tessera::collective
