// A machine on which tests run the command ring's own code: threads that take turns by a schedule, atomics whose loads
// may return old values where the C++ memory model allows it, a futex, sleeps that end early, and sudden death.
//
// The memory is that of the release-acquire fragment with views (Kang et al., "A promising semantics for relaxed-memory
// concurrency", POPL 2017, without promises): a location keeps all values that were stored to it; a thread's view tells
// how old a value it may still read from each. A release store carries its thread's view, and an acquire load takes it
// over. A seq_cst load reads nothing older than the last seq_cst store to its location.
//
// It detects deadlocks, which a lost wake-up causes, and schedules without end.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"

namespace tessera::model {

// Makes the choices that a machine leaves open. Alternative 0 is the plain one: no change of thread, the newest value.
class Choices {
 public:
  virtual ~Choices() = default;
  virtual size_t pick(size_t alternatives) = 0;
};

// All sequences of choices, one for each execution.
class DepthFirst final : public Choices {
 public:
  size_t pick(size_t alternatives) override;
  bool next();  // false once all were visited

 private:
  struct Choice {
    size_t taken, alternatives;
  };
  std::vector<Choice> path_;
  size_t at_ = 0;
};

class RandomWalk final : public Choices {
 public:
  explicit RandomWalk(uint64_t seed) : random_(seed) {}
  size_t pick(size_t alternatives) override;

 private:
  std::mt19937_64 random_;
};

// How often an execution may leave the plain path.
struct Budget {
  int preemptions = 0;
  int stale_loads = 0;
  int early_ends = 0;  // of sleeps: at their deadline or, without one, for no reason
  int deaths = 0;      // of the mortal thread
};

// Mistakes that the ring could have made. Each must be found.
struct Faults {
  bool flag_after_check = false;     // the word is set only when the sleep begins, after the last check
  bool flag_released = false;        // the word is set with release instead of seq_cst
  bool count_released = false;       // likewise for the count
  bool count_relaxed = false;        // the count carries nothing with it
  bool count_read_acquired = false;  // the count is read with acquire instead of seq_cst
  bool count_read_relaxed = false;
  bool head_relaxed = false;     // the head of a record is stored without release
  bool sleep_unchecked = false;  // the futex does not compare
  bool wake_forgotten = false;   // no wake-up call
};

using View = std::vector<uint32_t>;  // by location: the oldest value that may be read

struct Message {
  uint64_t value = 0;
  View view;
};

struct Location {
  std::vector<Message> history{1};
  uint32_t index = UINT32_MAX;
  uint32_t last_seq_cst = 0;
};

// Thrown through a thread's body to end it.
struct ThreadEnds {};

// The threads on which machines run, one machine after another. Pinned to one CPU while it lives: taking turns is
// fastest there.
class Crew {
 public:
  explicit Crew(size_t hands);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

 private:
  friend class Machine;
  struct Hand {
    std::atomic<uint32_t> turn{0};
    std::function<void()> job;  // none: end
    std::thread thread;
  };
  std::vector<std::unique_ptr<Hand>> hands_;
  std::atomic<uint32_t> finished_{0};
  cpu_set_t cpus_before_{};
};

// One execution. Create locations and threads, then run() runs the threads to their end. One machine at a time.
class Machine {
 public:
  Machine(Crew& crew, Choices& choices, Budget budget, Faults faults = {});
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  static Machine& current();

  // `mortal`: it may die before any of its steps.
  void add_thread(std::function<void()> body, bool mortal = false);
  // Returns what went wrong, or an empty text.
  std::string run();
  // For a thread's body: ends the execution.
  [[noreturn]] void fail(const std::string& what);
  // For a thread's body: returns true once thread `index` has died, false once it has ended.
  bool await_end_of(size_t index);

  uint64_t load(Location& location, std::memory_order order);
  void store(Location& location, uint64_t value, std::memory_order order);
  uint64_t exchange(Location& location, uint64_t value);
  void sleep(Location& word, uint32_t expected, const Deadline& deadline);
  void wake(const Location& word);
  TimePoint now() const { return now_; }
  void pass_time() { now_ += Duration(1); }
  const Faults& faults() const { return faults_; }
  // For flag_after_check: the store that the running thread makes when its sleep begins.
  void hold_back(Location* flag) { running().held_back = flag; }

 private:
  enum class State { kReady, kAsleep, kAwaiting, kEnded, kDead };
  struct Thread {
    std::function<void()> body;
    bool mortal = false;
    State state = State::kReady;
    const Location* word = nullptr;  // asleep on
    TimePoint deadline;
    size_t awaited = 0;
    Location* held_back = nullptr;
    View view;
  };

  Thread& running() { return *threads_[running_]; }
  void run_thread(size_t index);
  void step();
  void yield();
  size_t choose(const std::vector<size_t>& able);
  bool can_run(const Thread& thread) const;
  bool ended(const Thread& thread) const { return thread.state == State::kEnded || thread.state == State::kDead; }
  std::vector<size_t> candidates() const;
  void give_turn(size_t index);
  void take_turn(size_t index);
  void leave(State state);
  void abort(const std::string& what);

  uint32_t& seen(View& view, Location& location);
  void append(Location& location, uint64_t value, std::memory_order order);
  static void join(View& into, const View& other);

  Crew& crew_;
  Choices& choices_;
  Budget budget_;
  const Faults faults_;
  TimePoint now_{std::chrono::hours(1)};
  uint32_t locations_ = 0;
  std::vector<std::unique_ptr<Thread>> threads_;
  size_t running_ = SIZE_MAX;  // none: the test itself
  size_t steps_ = 0;
  bool aborted_ = false;
  std::string failure_;
};

template <typename T>
class Atomic {
 public:
  Atomic() = default;
  Atomic(T value) { location_.history.front().value = value; }  // NOLINT(google-explicit-constructor)
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;

  T load(std::memory_order order) const {
    const Faults& faults = Machine::current().faults();
    if (order == std::memory_order_seq_cst && sizeof(T) == 8) {
      if (faults.count_read_acquired) order = std::memory_order_acquire;
      if (faults.count_read_relaxed) order = std::memory_order_relaxed;
    }
    return static_cast<T>(Machine::current().load(location_, order));
  }
  void store(T value, std::memory_order order) {
    const Faults& faults = Machine::current().faults();
    if (order == std::memory_order_seq_cst && sizeof(T) == 8) {
      if (faults.count_released) order = std::memory_order_release;
      if (faults.count_relaxed) order = std::memory_order_relaxed;
    }
    if (order == std::memory_order_release && faults.head_relaxed) order = std::memory_order_relaxed;
    Machine::current().store(location_, value, order);
  }
  T exchange(T value, std::memory_order /*all are seq_cst*/) {
    return static_cast<T>(Machine::current().exchange(location_, value));
  }

 protected:
  mutable Location location_;
};

class Word final : public Atomic<uint32_t> {
 public:
  using Atomic::Atomic;
  void store(uint32_t value, std::memory_order order) {
    Machine& machine = Machine::current();
    if (machine.faults().flag_after_check) machine.hold_back(value != 0 ? &location_ : nullptr);
    if (machine.faults().flag_after_check && value != 0) return;
    if (machine.faults().flag_released && value != 0) order = std::memory_order_release;
    machine.store(location_, value, order);
  }
  Location& location() const { return location_; }
};

struct ModelSync {
  template <typename T>
  using Atomic = model::Atomic<T>;
  using Word = model::Word;
  static void wait(const Word& word, uint32_t expected, const Deadline& deadline) {
    Machine::current().sleep(word.location(), expected, deadline);
  }
  static void wake(const Word& word) { Machine::current().wake(word.location()); }
  static TimePoint now() { return Machine::current().now(); }
  static void pause() { Machine::current().pass_time(); }
};

}  // namespace tessera::model
