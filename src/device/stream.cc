#include "device/stream.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "base/fail.h"
#include "device/capture.h"
#include "device/device.h"

namespace tessera::device {

Operation copy_operation(const char* name, std::string subject, void* to, const void* from, size_t bytes) {
  return {.name = name,
          .subject = std::move(subject),
          .accesses = {read_of(from, bytes), write_of(to, bytes)},
          .body = [=] { std::memcpy(to, from, bytes); },
          .bytes = static_cast<int64_t>(bytes)};
}

Status failure_of(const Operation& operation) {
  const Status status = status_of_current_exception();
  return {status.code(), fmt::format("{}{}{}: {}", operation.name, operation.subject.empty() ? "" : " ",
                                     operation.subject, status.message())};
}

Stream::Stream(std::string name, Device& device, uint32_t actor)
    : name_(std::move(name)), device_(device), actor_(actor) {}

uint64_t Stream::note(const Operation& operation) {
  const uint64_t number = operations_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (actor_ != 0)
    device_.recorder().operation(actor_, number, operation.name, operation.subject, operation.accesses,
                                 operation.writes, operation.after.size());
  return number;
}

void Stream::note_wait(const Operation& operation, uint64_t number, const Condition& condition) const {
  Recorder& recorder = device_.recorder();
  if (!recorder.on()) return;
  thread_local WaitNotes notes;
  notes.clear();
  condition.note(notes);
  recorder.operation_access(actor_, number, operation.name, operation.subject, notes.accesses);
  recorder.word_wait(actor_, number, notes.edges, notes.text);
}

void Stream::enqueue(Operation operation) {
  if (Capture* const capture = capture_.load(std::memory_order_relaxed))
    return capture->add(*this, std::make_shared<const Operation>(std::move(operation)));
  const uint64_t number = note(operation);
  give(std::move(operation), number);
}

void Stream::enqueue(std::shared_ptr<const Operation> operation) {
  if (Capture* const capture = capture_.load(std::memory_order_relaxed))
    return capture->add(*this, std::move(operation));
  const uint64_t number = note(*operation);
  give(std::move(operation), number);
}

Event Stream::record() {
  if (Capture* const capture = capture_.load(std::memory_order_relaxed)) return capture->add_record(*this);
  return record_now();
}

Event Stream::record_now() {
  Recorder& recorder = device_.recorder();
  const uint64_t event = recorder.on() && actor_ != 0 ? recorder.next_event() : 0;
  if (event != 0) recorder.event_record(actor_, event);
  return mark(event);
}

void Stream::wait(const Event& event) {
  if (Capture* const capture = capture_.load(std::memory_order_relaxed)) return capture->add_wait(*this, event);
  wait_now(event.now());
}

void Stream::wait_now(const Event& event) {
  if (event.source() == nullptr) return;
  if (event.number() != 0 && actor_ != 0) device_.recorder().event_wait(actor_, event.number());
  give_wait(event);
}

void Stream::synchronize(const Deadline& deadline) {
  if (capture_.load(std::memory_order_relaxed) != nullptr)
    fail(ErrorCode::kInvalidArgument, "stream {} is being captured: nothing runs that could be waited for"_message,
         name_);
  device_.wait_host(record_now(), deadline);
}

}  // namespace tessera::device
