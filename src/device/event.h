// What a stream had been given when the event was recorded.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "tessera/error.h"

namespace tessera::device {

class Event;

// Where events come from: a stream, or a capture. Thread-safe. A ticket says which of its events.
class EventSource {
 public:
  virtual ~EventSource() = default;
  virtual bool done(uint64_t ticket) const = 0;
  // A host is going to wait: it may run what nobody has begun. Never blocks on a condition.
  virtual void help(uint64_t) const {}
  // Blocks the calling thread. False if the deadline passed. Throws what the thread's WaitHook throws.
  virtual bool wait(uint64_t ticket, const Deadline& deadline) const = 0;
  // Why what came before the event failed; of one that is done.
  virtual Status status(uint64_t ticket) const = 0;
  // The event of a stream that it stands for now, if it is one of a capture; else nothing. Throws
  // Error(kInvalidArgument) if the capture was not replayed.
  virtual std::optional<Event> replayed(uint64_t ticket) const;
  // For messages: "stream gather".
  virtual std::string to_string() const = 0;
};

// A handle; copies are the same event. It keeps nothing from running or ending. An event of a capture (capture.h) is
// that of the last replay; before the first one all but copying it throws Error(kInvalidArgument).
class Event {
 public:
  Event() = default;  // of nothing: done
  Event(std::shared_ptr<const EventSource> source, uint64_t ticket, uint64_t number)
      : source_(std::move(source)), ticket_(ticket), number_(number) {}

  // Whether all that the stream had been given has ended, or was skipped after a failure.
  bool done() const { return source_ == nullptr || source_->done(ticket_); }
  // The failure that poisoned the stream before this event. Only once done().
  Status status() const { return source_ == nullptr ? Status() : source_->status(ticket_); }

  void help() const {
    if (source_ != nullptr) source_->help(ticket_);
  }
  // Blocks the calling thread and does not throw the failure: streams and devices wait by it. Hosts call
  // Device::wait_host(). False if the deadline passed.
  bool wait(const Deadline& deadline) const { return source_ == nullptr || source_->wait(ticket_, deadline); }

  // In the recorder's log; 0 if it was not recorded.
  uint64_t number() const { return number_; }
  const EventSource* source() const { return source_.get(); }
  // Itself, or what an event of a capture stands for since the last replay.
  Event now() const { return source_ == nullptr ? *this : source_->replayed(ticket_).value_or(*this); }
  uint64_t ticket() const { return ticket_; }

 private:
  std::shared_ptr<const EventSource> source_;
  uint64_t ticket_ = 0;
  uint64_t number_ = 0;
};

inline std::optional<Event> EventSource::replayed(uint64_t) const {
  return std::nullopt;
}

}  // namespace tessera::device
