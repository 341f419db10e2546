#include "device/capture.h"

#include <utility>

#include "base/fail.h"
#include "base/mutex.h"
#include "device/stream.h"

namespace tessera::device {

// The events of a capture by index, and what they stand for since the last replay.
class Capture::Events final : public EventSource {
 public:
  bool done(uint64_t ticket) const override { return current(ticket).done(); }
  bool wait(uint64_t ticket, const Deadline& deadline) const override { return current(ticket).wait(deadline); }
  Status status(uint64_t ticket) const override { return current(ticket).status(); }
  std::optional<Event> replayed(uint64_t ticket) const override { return current(ticket); }
  std::string to_string() const override { return "a capture"; }

  uint64_t add() {
    const MutexLock lock(mutex_);
    events_.emplace_back();
    return events_.size() - 1;
  }
  void set(uint64_t ticket, Event event) {
    const MutexLock lock(mutex_);
    events_[ticket] = std::move(event);
  }

 private:
  Event current(uint64_t ticket) const {
    const MutexLock lock(mutex_);
    if (!events_[ticket].has_value())
      fail(ErrorCode::kInvalidArgument,
           "this event belongs to a capture that was not replayed since: replay it, then wait"_message);
    return *events_[ticket];
  }

  mutable Mutex mutex_;
  std::vector<std::optional<Event>> events_ GUARDED_BY(mutex_);
};

struct Capture::Step {
  Stream* stream;
  std::function<void()> call{};                  // of the host; else
  std::shared_ptr<const Operation> operation{};  // else an event
  bool records = false;                          // or else waits for it
  uint64_t event = 0;
};

struct Capture::State {
  const std::shared_ptr<Events> events = std::make_shared<Events>();
  mutable Mutex mutex;
  std::vector<Step> steps GUARDED_BY(mutex);
  std::vector<std::shared_ptr<Stream>> streams GUARDED_BY(mutex);
};

Capture::Capture() : state_(std::make_unique<State>()) {}
Capture::~Capture() = default;

void Capture::add(Stream& stream, std::shared_ptr<const Operation> operation) {
  const MutexLock lock(state_->mutex);
  state_->steps.push_back({.stream = &stream, .operation = std::move(operation)});
}

Event Capture::add_record(Stream& stream) {
  const MutexLock lock(state_->mutex);
  const uint64_t event = state_->events->add();
  state_->steps.push_back({.stream = &stream, .records = true, .event = event});
  return {state_->events, event, 0};
}

void Capture::add_wait(Stream& stream, const Event& event) {
  if (event.source() == nullptr) return;
  if (event.source() != state_->events.get())
    fail(ErrorCode::kInvalidArgument,
         "stream {} is being captured and cannot wait for an event of {} from outside of the capture: wait for it "
         "before the replay"_message,
         stream.name(), event.source()->to_string());
  const MutexLock lock(state_->mutex);
  state_->steps.push_back({.stream = &stream, .event = event.ticket()});
}

void Capture::call(std::function<void()> function) {
  const MutexLock lock(state_->mutex);
  state_->steps.push_back({.stream = nullptr, .call = std::move(function)});
}

size_t Capture::operations() const {
  const MutexLock lock(state_->mutex);
  size_t count = 0;
  for (const Step& step : state_->steps) count += step.operation != nullptr ? 1 : 0;
  return count;
}

void Capture::replay() {
  const MutexLock lock(state_->mutex);
  for (const auto& stream : state_->streams)
    if (stream->capture_.load(std::memory_order_relaxed) != nullptr)
      fail(ErrorCode::kInvalidArgument, "stream {} is being captured: nothing can be replayed on it now"_message,
           stream->name());
  for (const Step& step : state_->steps) {
    if (step.call)
      step.call();
    else if (step.operation != nullptr)
      step.stream->enqueue(step.operation);
    else if (step.records)
      state_->events->set(step.event, step.stream->record_now());
    else
      step.stream->wait_now(*state_->events->replayed(step.event));
  }
}

CaptureScope::CaptureScope(Capture& capture, std::vector<std::shared_ptr<Stream>> streams) {
  for (auto& stream : streams) {
    Capture* none = nullptr;
    if (!stream->capture_.compare_exchange_strong(none, &capture)) {
      for (const auto& begun : streams_) begun->capture_.store(nullptr, std::memory_order_relaxed);
      fail(ErrorCode::kInvalidArgument, "stream {} is being captured already"_message, stream->name());
    }
    streams_.push_back(std::move(stream));
  }
  const MutexLock lock(capture.state_->mutex);
  capture.state_->streams.insert(capture.state_->streams.end(), streams_.begin(), streams_.end());
}

CaptureScope::~CaptureScope() {
  for (const auto& stream : streams_) stream->capture_.store(nullptr, std::memory_order_relaxed);
}

}  // namespace tessera::device
