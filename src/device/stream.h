// Streams: operations that run in order, beside those of other streams.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "device/event.h"
#include "device/operation.h"
#include "tessera/error.h"

namespace tessera::device {

class Capture;
class Device;
class Link;

struct StreamOptions {
  std::string name;              // of the recorder's actor; its thread is called "tessera-s-NAME", cut to 15 letters
  std::shared_ptr<Link> link{};  // paces the stream: see link.h
  Duration timeout = std::chrono::seconds(60);  // of an operation that has none, for what it waits for
  bool runs_inline = false;                     // no thread: on the thread that enqueues
  // Hosts that wait for an event of it run what its thread has not begun, as far as nothing has to be waited for: to
  // wake a thread and to be woken takes longer than small operations. Not of paced streams.
  bool helped = false;
};

// Thread-safe; who wants an order between calls of several threads must order the calls.
//
// An operation that fails poisons its stream: later operations are skipped, events recorded later carry the error, and
// so does a stream that waits for one of those. enqueue(), record() and wait() never throw such an error:
// synchronize(), Device::wait_host() and status() tell it.
//
// A stream that is destroyed first runs what it was given. That takes bounded time: waits of operations end at their
// timeout. close() bounds it further. One of its own operations must not destroy it.
class Stream {
 public:
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const std::string& name() const { return name_; }
  // Its number in the recorder; 0, the host, if it is inline.
  uint32_t actor() const { return actor_; }
  bool runs_inline() const { return actor_ == 0; }
  Device& device() const { return device_; }

  // Throws Error(kInvalidArgument) in a forked child.
  void enqueue(Operation operation);
  // The same for one that is enqueued many times: nothing is copied.
  void enqueue(std::shared_ptr<const Operation> operation);
  Event record();
  // What is enqueued later runs after the event. Throws Error(kInvalidArgument) for an event of a capture that has not
  // been replayed, or, while this stream is captured, for one from outside of the capture.
  void wait(const Event& event);

  // Blocks the host until all that was given has ended. Throws the stream's poison, or Error(kDeadlineExceeded).
  void synchronize(const Deadline& deadline);
  // The poison. Of what has ended by now.
  virtual Status status() const = 0;
  // The poison, which the stream forgets: what is enqueued from now on runs. Events recorded in between keep it.
  virtual Status take_error() = 0;
  // Waits until what was given has ended. At the deadline, what has not begun is dropped: it fails with kCancelled. The
  // operation that runs is waited for.
  virtual void close(const Deadline& deadline) = 0;

 protected:
  // Actor 0 if it is inline: then give() records the operation.
  Stream(std::string name, Device& device, uint32_t actor);

  // An operation, which is the `number`-th of the stream.
  virtual void give(Operation&& operation, uint64_t number) = 0;
  virtual void give(std::shared_ptr<const Operation> operation, uint64_t number) = 0;
  // An event of what was given so far, with its number in the recorder's log.
  virtual Event mark(uint64_t event) = 0;
  virtual void give_wait(const Event& event) = 0;
  // For the recorder: a condition of an operation has come true.
  void note_wait(const Operation& operation, uint64_t number, const Condition& condition) const;

 private:
  friend class Capture;
  friend class CaptureScope;
  uint64_t note(const Operation& operation);
  Event record_now();
  void wait_now(const Event& event);

  const std::string name_;
  Device& device_;  // outlives its streams
  const uint32_t actor_;
  std::atomic<uint64_t> operations_{0};
  std::atomic<Capture*> capture_{nullptr};
};

}  // namespace tessera::device
