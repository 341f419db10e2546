// A chain of operations that is recorded once and replayed many times, as a CUDA graph is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/event.h"
#include "device/operation.h"

namespace tessera::device {

class Stream;

// What streams were given within a CaptureScope: operations with their addresses, events, waits, in the order of the
// calls. Conditions are looked at in each replay: one that must not stay met reads what it wants from memory that its
// owner updates. Thread-safe, except that no replay may run during a capture.
class Capture {
 public:
  Capture();
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  // Gives the streams all of it once more. The events of the capture stand for this replay from now on. Throws
  // Error(kInvalidArgument) if one of the streams is being captured.
  // What a call of the host throws ends it: the streams have what came before.
  void replay();
  size_t operations() const;
  // At this place the host calls it in each replay, between what streams are given before and after: for what has other
  // arguments each time. A device with graphs launches one for each stretch between such calls. It does not use the
  // capture.
  void call(std::function<void()> function);

 private:
  friend class CaptureScope;
  friend class Stream;
  class Events;
  struct Step;
  struct State;

  void add(Stream& stream, std::shared_ptr<const Operation> operation);
  Event add_record(Stream& stream);
  void add_wait(Stream& stream, const Event& event);

  const std::unique_ptr<State> state_;
};

// While it lives, its streams run nothing: what they are given goes into the capture. Throws Error(kInvalidArgument) if
// one of them is being captured.
class CaptureScope {
 public:
  CaptureScope(Capture& capture, std::vector<std::shared_ptr<Stream>> streams);
  ~CaptureScope();
  CaptureScope(const CaptureScope&) = delete;
  CaptureScope& operator=(const CaptureScope&) = delete;

 private:
  std::vector<std::shared_ptr<Stream>> streams_;
};

}  // namespace tessera::device
