#include "device/virtual/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "device/virtual/virtual_stream.h"

namespace tessera::device {
namespace {

bool is_ready(const VirtualScheduler::Wait& wait) {
  try {
    return wait.ready();
  } catch (...) {  // whoever waits asks again, and gets the exception
    return true;
  }
}

}  // namespace

std::string_view to_string(Order order) {
  switch (order) {
    case Order::kRandom:
      return "random";
    case Order::kLatestFirst:
      return "latest first";
    case Order::kEarliestFirst:
      return "earliest first";
  }
  return "unknown";
}

void VirtualScheduler::resume(Host& host) {
  current_ = &host;
  host.wait = nullptr;
  host.fiber->resume();
  current_ = nullptr;
}

bool VirtualScheduler::step() {
  struct Choice {
    uint64_t given;
    Host* host;
    VirtualStream* stream;
  };
  std::vector<Choice> choices;
  for (Host& host : hosts_)
    if (!host.fiber->ended() && (host.wait == nullptr || is_ready(*host.wait)))
      choices.push_back({.given = host.given, .host = &host, .stream = nullptr});
  for (VirtualStream* const stream : streams_)
    if (stream->ready()) choices.push_back({.given = stream->head_given(), .host = nullptr, .stream = stream});
  if (choices.empty()) return false;

  size_t chosen = random_() % choices.size();
  const auto by_age = [](const Choice& a, const Choice& b) { return a.given < b.given; };
  if (order_ == Order::kLatestFirst)
    chosen = static_cast<size_t>(std::ranges::max_element(choices, by_age) - choices.begin());
  if (order_ == Order::kEarliestFirst)
    chosen = static_cast<size_t>(std::ranges::min_element(choices, by_age) - choices.begin());
  ++steps_;
  if (choices[chosen].host != nullptr) {
    resume(*choices[chosen].host);
  } else {
    in_stream_ = true;
    choices[chosen].stream->run_head();
    in_stream_ = false;
  }
  return true;
}

void VirtualScheduler::block(const Wait& wait) {
  if (in_stream_) fail_internal("an operation of a virtual stream waits for {}", wait.what());
  if (current_ == nullptr) {
    while (!wait.ready())
      if (!step()) fail_stuck(fmt::format("\n  the caller of the world waits for {}", wait.what()));
    return;
  }
  if (!cancelling_) {
    Host& host = *current_;
    host.wait = &wait;
    host.given = next();
    host.fiber->yield();
  }
  if (cancelling_) cancelled().throw_if_error();
}

Status VirtualScheduler::cancelled() {
  return failed(ErrorCode::kCancelled, "the run of the virtual ranks has ended in a deadlock"_message);
}

void VirtualScheduler::perhaps_yield() {
  if (current_ == nullptr || in_stream_ || cancelling_ || order_ == Order::kLatestFirst) return;
  if (order_ == Order::kRandom && random_() % 2 == 0) return;
  const Wait nothing{.ready = [] { return true; }, .what = [] { return std::string("its turn"); }};
  Host& host = *current_;
  host.wait = &nothing;
  host.given = next();
  host.fiber->yield();
}

void VirtualScheduler::run(int ranks, const std::function<void(int rank)>& host) {
  if (!hosts_.empty()) fail_internal("a virtual world runs already");
  hosts_.reserve(static_cast<size_t>(ranks));  // their addresses stay
  for (int rank = 0; rank < ranks; ++rank) {
    Host& added = hosts_.emplace_back(Host{.rank = rank, .fiber = nullptr, .given = next()});
    added.fiber = std::make_unique<Fiber>([&host, &added] {
      try {
        host(added.rank);
      } catch (...) {
        added.error = status_of_current_exception();
      }
    });
  }
  while (step()) {
  }
  std::string errors;
  ErrorCode code = ErrorCode::kOk;
  for (const Host& ended : hosts_) {
    if (ended.error.ok()) continue;
    if (code == ErrorCode::kOk) code = ended.error.code();
    errors += fmt::format("\n  rank {}: {}", ended.rank, ended.error.message());
  }
  const std::string stuck = blocked();
  cancel();
  const int count = static_cast<int>(hosts_.size());
  hosts_.clear();
  if (!stuck.empty()) fail_stuck(errors + stuck);
  if (code != ErrorCode::kOk)
    fail(code, "of {} virtual ranks (seed {}, {}), these failed:{}"_message, count, seed_, to_string(order_), errors);
}

// Ends what is blocked: hosts by an exception in their waits, streams by dropping what they have.
void VirtualScheduler::cancel() {
  cancelling_ = true;
  for (Host& host : hosts_)
    while (!host.fiber->ended()) resume(host);
  for (VirtualStream* const stream : streams_) stream->drop();
  cancelling_ = false;
}

std::string VirtualScheduler::blocked() const {
  std::string text;
  for (const Host& host : hosts_)
    if (!host.fiber->ended()) text += fmt::format("\n  rank {}, host: waits for {}", host.rank, host.wait->what());
  for (const VirtualStream* const stream : streams_) text += stream->blocked();
  return text;
}

void VirtualScheduler::fail_stuck(const std::string& what) const {
  fail(ErrorCode::kDeadlineExceeded, "deadlock after {} steps of virtual ranks (seed {}, {}):{}"_message, steps_, seed_,
       to_string(order_), what);
}

}  // namespace tessera::device
