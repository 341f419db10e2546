// The numbered calls that all ranks of a group make together: every rank mails its bytes in steps, and reads the
// others' mail of a step once all have mailed it. There are two mails, so that a rank may write the next while others
// still read the last one.
//
// A rank that cannot make a call that the others make refuses it: its mail has the reason in place of the bytes. The
// call then ends on every rank in its first step, and its number is used up on all of them, so that the next call
// matches. Whoever refuses does not wait for the others: it may have an error to raise. It waits before its next mail,
// since until then others may still read the mail before the refusal.
#pragma once

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
  // makes another call; "rank R: TEXT" with the refusal's code, of the lowest rank that refuses the call;
  // kDeadlineExceeded if the turn does not come.
  uint64_t run(const Call& call, const TakeMail& take, const Deadline& turn);
  // Takes part in the next call with a refusal. Waits for its turn and for the call before, not for this one.
  // Throws kDeadlineExceeded if the turn does not come. REQUIRES: !reason.ok()
  void refuse(std::string_view what, const Status& reason, const Deadline& turn);
  // Returns this rank's refusal if that was its last call, as the other ranks are told it.
  std::optional<Status> last_refusal() const;

 private:
  class Turn;
  void settle_refusal();
  void require_no_refusal();
  void mail(const MailHeader& header, std::span<const std::byte> bytes);
  MailHeader header_of(int rank, const MailHeader& own, const Call& call);
  void take_step(uint64_t offset, const std::vector<uint64_t>& sizes, const TakeMail& take);
  std::string text(const MailHeader& header) const;

  const CallRoom room_;
  mutable Mutex mutex_;
  CondVar free_;
  bool busy_ GUARDED_BY(mutex_) = false;
  std::optional<Status> last_refusal_ GUARDED_BY(mutex_);
  uint64_t number_ = 0;  // of whose turn it is
  uint64_t step_ = 0;
  std::string unsettled_{};  // text of a refusal whose step some ranks may not have reached; empty: none
};

}  // namespace tessera::collective
