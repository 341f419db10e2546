// What an operation or the host waits for that no stream orders: words that other ranks write.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "device/access.h"

namespace tessera::device {

// What the recorder is told of a wait. Used again and again, so that a record allocates nothing.
struct WaitNotes {
  std::vector<WordEdge> edges;   // the words that made the condition true
  std::vector<Access> accesses;  // of the operation that waited, which it could not declare: they depend on those words
  std::string_view text;         // what was waited for; of the condition, or `made_text`
  std::string made_text;

  void say(std::string what) {
    made_text = std::move(what);
    text = made_text;
  }
  void clear() {
    edges.clear();
    accesses.clear();
    text = {};
  }
};

// Implementations are thread-safe. await() below and the devices do the waiting.
class Condition {
 public:
  virtual ~Condition() = default;

  // Never blocks. Once true it stays true. Throws Error if it can never become true: a peer is lost, the group failed.
  virtual bool met() const = 0;
  // Blocks until met() may be true; at the latest at the deadline. May return early, and does so at a signal.
  virtual void sleep(const Deadline& deadline) const = 0;
  // For messages: "rank 2 to publish version 7 of wte.weight".
  virtual std::string to_string() const = 0;
  // What is known about why met() is false, for the message of a wait that ended at its deadline: "rank 2 (pid 71) is
  // stopped". May be empty.
  virtual std::string explain() const { return {}; }
  // Called when a wait of a thread with a WaitHook wakes and met() is false. Throws to end the wait.
  virtual void check() const {}
  // Adds to the notes, which are clear and do not outlive this. Called after met(), while the recorder is on.
  virtual void note(WaitNotes& notes) const { notes.say(to_string()); }
};

// Blocks until met(). Throws what met() throws, Error(kDeadlineExceeded) that says what was waited for,
// or what the thread's WaitHook throws.
void await(const Condition& condition, const Deadline& deadline);

// A host program's chance to end waits of its thread, such as Python's Ctrl-C: while it lives, every wait of this
// thread for a condition, an event or a stream calls `at_wake` whenever it wakes: at signals, and every kWakeEvery
// because a signal may come just before the thread sleeps. What it throws ends the wait; an inline stream's operation
// that waited fails with it. Hooks nest; the innermost counts.
class WaitHook {
 public:
  static constexpr Duration kWakeEvery = std::chrono::milliseconds(200);

  explicit WaitHook(void (*at_wake)(void*), void* argument = nullptr);
  ~WaitHook();
  WaitHook(const WaitHook&) = delete;
  WaitHook& operator=(const WaitHook&) = delete;

  // Calls this thread's hook, if it has one.
  static void woken();
  // Calls the one around this, likewise.
  void outer_woken() const;
  // When a wait of this thread that ends at `deadline` has to wake up next.
  static Deadline next_wake(const Deadline& deadline);

 private:
  void (*const at_wake_)(void*);
  void* const argument_;
  WaitHook* const outer_;
};

}  // namespace tessera::device
