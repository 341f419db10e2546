#include "tests/model/ring_model.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "base/futex.h"

namespace tessera::model {
namespace {

Machine* the_machine = nullptr;

constexpr size_t kMostSteps = 20'000;

bool acquires(std::memory_order order) {
  return order == std::memory_order_acquire || order == std::memory_order_seq_cst;
}
bool releases(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_seq_cst;
}

// A turn is one permit, given by one thread and taken by another.
void give(std::atomic<uint32_t>& turn) {
  turn.store(1, std::memory_order_release);
  futex_wake(turn);
}
void take(std::atomic<uint32_t>& turn) {
  while (turn.exchange(0, std::memory_order_acquire) == 0) futex_wait(turn, 0, Deadline::at(TimePoint::max()));
}

}  // namespace

size_t DepthFirst::pick(size_t alternatives) {
  if (alternatives <= 1) return 0;
  if (at_ == path_.size()) path_.push_back({0, alternatives});
  TESSERA_CHECK_EQ(path_[at_].alternatives, alternatives);  // a replay makes the same choices
  return path_[at_++].taken;
}

bool DepthFirst::next() {
  at_ = 0;
  while (!path_.empty() && path_.back().taken + 1 == path_.back().alternatives) path_.pop_back();
  if (path_.empty()) return false;
  ++path_.back().taken;
  return true;
}

size_t RandomWalk::pick(size_t alternatives) {
  if (alternatives <= 1 || random_() % 4 != 0) return 0;
  return random_() % alternatives;
}

Crew::Crew(size_t hands) {
  ::sched_getaffinity(0, sizeof cpus_before_, &cpus_before_);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(::sched_getcpu(), &one);
  ::sched_setaffinity(0, sizeof one, &one);
  for (size_t i = 0; i < hands; ++i) {
    Hand& hand = *hands_.emplace_back(std::make_unique<Hand>());
    hand.thread = std::thread([&hand] {
      for (take(hand.turn); hand.job; take(hand.turn)) hand.job();
    });
  }
}

Crew::~Crew() {
  for (const auto& hand : hands_) {
    hand->job = nullptr;
    give(hand->turn);
    hand->thread.join();
  }
  ::sched_setaffinity(0, sizeof cpus_before_, &cpus_before_);
}

Machine::Machine(Crew& crew, Choices& choices, Budget budget, Faults faults)
    : crew_(crew), choices_(choices), budget_(budget), faults_(faults) {
  TESSERA_CHECK(the_machine == nullptr);
  the_machine = this;
}

Machine::~Machine() {
  the_machine = nullptr;
}

Machine& Machine::current() {
  return *the_machine;
}

void Machine::add_thread(std::function<void()> body, bool mortal) {
  threads_.push_back(std::make_unique<Thread>());
  threads_.back()->body = std::move(body);
  threads_.back()->mortal = mortal;
}

std::string Machine::run() {
  TESSERA_CHECK_LE(threads_.size(), crew_.hands_.size());
  for (size_t i = 0; i < threads_.size(); ++i) crew_.hands_[i]->job = [this, i] { run_thread(i); };
  give_turn(choices_.pick(threads_.size()));
  take(crew_.finished_);
  running_ = SIZE_MAX;
  return failure_;
}

void Machine::run_thread(size_t index) {
  try {
    if (aborted_) throw ThreadEnds{};
    threads_[index]->body();
    leave(State::kEnded);
  } catch (const ThreadEnds&) {
    leave(State::kDead);
  }
}

void Machine::fail(const std::string& what) {
  abort(what);
  throw ThreadEnds{};
}

void Machine::abort(const std::string& what) {
  aborted_ = true;
  if (failure_.empty()) failure_ = what;
}

bool Machine::await_end_of(size_t index) {
  Thread& self = running();
  self.awaited = index;
  self.state = State::kAwaiting;
  yield();
  self.state = State::kReady;
  return threads_[index]->state == State::kDead;
}

// Called before every memory access: here the thread may be preempted, or die.
void Machine::step() {
  if (running_ == SIZE_MAX) return;
  if (++steps_ > kMostSteps) fail("no end after " + std::to_string(kMostSteps) + " steps");
  Thread& self = running();
  if (self.mortal && budget_.deaths > 0 && choices_.pick(2) == 1) {
    --budget_.deaths;
    throw ThreadEnds{};
  }
  yield();
}

bool Machine::can_run(const Thread& thread) const {
  switch (thread.state) {
    case State::kReady:
      return true;
    case State::kAsleep:
      return budget_.early_ends > 0;
    case State::kAwaiting:
      return ended(*threads_[thread.awaited]);
    default:
      return false;
  }
}

// The threads that may run next, the current one first. Switching costs a preemption unless that one cannot go on.
std::vector<size_t> Machine::candidates() const {
  std::vector<size_t> found;
  const bool goes_on = threads_[running_]->state == State::kReady;
  if (goes_on) found.push_back(running_);
  if (goes_on && budget_.preemptions == 0) return found;
  for (size_t i = 0; i < threads_.size(); ++i)
    if (i != running_ && can_run(*threads_[i])) found.push_back(i);
  if (!goes_on && can_run(*threads_[running_])) found.push_back(running_);
  // Sleepers come last, since ending a sleep early is not the plain case.
  std::ranges::stable_partition(found, [&](size_t i) { return threads_[i]->state != State::kAsleep; });
  return found;
}

size_t Machine::choose(const std::vector<size_t>& able) {
  const size_t next = able[choices_.pick(able.size())];
  Thread& chosen = *threads_[next];
  if (chosen.state == State::kAsleep) {
    --budget_.early_ends;
    if (chosen.deadline != TimePoint::max()) now_ = std::max(now_, chosen.deadline);
    chosen.state = State::kReady;
  }
  return next;
}

void Machine::yield() {
  const size_t self = running_;
  const std::vector<size_t> able = candidates();
  if (able.empty()) fail("all threads sleep");
  const bool goes_on = threads_[self]->state == State::kReady;
  const size_t next = choose(able);
  if (next == self) return;
  if (goes_on) --budget_.preemptions;
  give_turn(next);
  take_turn(self);
}

void Machine::give_turn(size_t index) {
  running_ = index;
  give(crew_.hands_[index]->turn);
}

void Machine::take_turn(size_t index) {
  take(crew_.hands_[index]->turn);
  if (aborted_) throw ThreadEnds{};
}

// Passes the turn on or, once all threads have ended, back to run().
void Machine::leave(State state) {
  running().state = state;
  if (!aborted_) {
    const std::vector<size_t> able = candidates();
    if (!able.empty()) return give_turn(choose(able));
    if (!std::ranges::all_of(threads_, [&](const auto& thread) { return ended(*thread); })) abort("all threads sleep");
  }
  const auto left = std::ranges::find_if(threads_, [&](const auto& thread) { return !ended(*thread); });
  if (left == threads_.end()) return give(crew_.finished_);
  give_turn(static_cast<size_t>(left - threads_.begin()));
}

uint32_t& Machine::seen(View& view, Location& location) {
  if (location.index == UINT32_MAX) location.index = locations_++;
  if (view.size() <= location.index) view.resize(location.index + 1);
  return view[location.index];
}

void Machine::append(Location& location, uint64_t value, std::memory_order order) {
  TESSERA_CHECK(running_ != SIZE_MAX);
  const auto at = static_cast<uint32_t>(location.history.size());
  View& view = running().view;
  seen(view, location) = at;
  if (order == std::memory_order_seq_cst) location.last_seq_cst = at;
  location.history.push_back({.value = value, .view = releases(order) ? view : View{}});
}

void Machine::join(View& into, const View& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

uint64_t Machine::load(Location& location, std::memory_order order) {
  step();
  const auto newest = static_cast<uint32_t>(location.history.size() - 1);
  if (running_ == SIZE_MAX) return location.history[newest].value;
  View& view = running().view;
  uint32_t oldest = seen(view, location);
  if (order == std::memory_order_seq_cst) oldest = std::max(oldest, location.last_seq_cst);
  const size_t age = budget_.stale_loads > 0 ? choices_.pick(newest - oldest + 1) : 0;
  if (age > 0) --budget_.stale_loads;
  const Message& message = location.history[newest - age];
  seen(view, location) = static_cast<uint32_t>(newest - age);
  if (acquires(order)) join(view, message.view);
  return message.value;
}

void Machine::store(Location& location, uint64_t value, std::memory_order order) {
  step();
  append(location, value, order);
}

uint64_t Machine::exchange(Location& location, uint64_t value) {
  step();
  const uint64_t before = location.history.back().value;
  join(running().view, location.history.back().view);
  append(location, value, std::memory_order_seq_cst);
  return before;
}

void Machine::sleep(Location& word, uint32_t expected, const Deadline& deadline) {
  Thread& self = running();
  if (Location* flag = std::exchange(self.held_back, nullptr)) store(*flag, 1, std::memory_order_seq_cst);
  step();
  if (!faults_.sleep_unchecked && word.history.back().value != expected) return;
  self.word = &word;
  self.deadline = deadline.when();
  self.state = State::kAsleep;
  yield();
}

void Machine::wake(const Location& word) {
  step();
  if (faults_.wake_forgotten) return;
  for (const auto& thread : threads_)
    if (thread->state == State::kAsleep && thread->word == &word) thread->state = State::kReady;
}

}  // namespace tessera::model
