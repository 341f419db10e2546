// The numbers of sends that are given none. Each rank of a job counts its own calls, and so the ranks offer the same
// version together. They get out of step in two ways: a rank that comes back does not know what the others have tried
// since they registered, and a send may fail on some ranks before the others have begun it. A rank hears of that
// (Ahead, session/versions.h) and goes on from the higher number.
//
// On the loop's thread, unless a function says otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace tessera::bus {

class Numbering {
 public:
  // The newest version that was offered, sent or not; at least what the other ranks had tried when this one came.
  int64_t newest() const { return newest_; }
  // The same without the send under way. Any thread.
  int64_t tried() const { return tried_.load(); }

  // The number of a send, which may be beyond kMaxVersion.
  int64_t of(std::optional<int64_t> given) const { return given.value_or(newest_ + 1); }
  void begin(int64_t version, bool given);  // a send
  void end() { tried_ = newest_; }          // of that send
  bool given() const { return given_; }     // its number must stay as it is

  // The newest version that a rank of this job had tried as all registered. Returns whether this rank goes on from
  // there: it has just come, or none of its versions was taken yet. Later the others may have sent what is this rank's
  // to be sent next.
  bool meet(int64_t newest);
  // This rank came while the others were sending, and none of its versions was taken yet. Which call of the others
  // belongs to which of its own is open, so it may follow them at any time.
  bool follows() const { return follows_; }
  void begun() { follows_ = false; }  // a receiver takes a version of this rank
  // A rank of this job offers `version`. The next send has at least that number if this rank follows, or if it `must`.
  void hear(int64_t version, bool must);

 private:
  int64_t newest_ = 0;
  std::atomic<int64_t> tried_{0};
  bool given_ = false;
  bool met_ = false;
  bool follows_ = false;
};

}  // namespace tessera::bus
