// What a stream is given: a function, with what it reads, writes and waits for.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "device/access.h"
#include "device/condition.h"
#include "tessera/error.h"

namespace tessera::device {

// A value. It runs once what the stream was given before has ended and all conditions in `after` are true. `body` may
// throw: then the stream is poisoned (stream.h). It must not touch the stream that it runs on.
struct Operation {
  const char* name = "";  // a literal: the trace's span, the record
  std::string subject{};  // of the span and the record: "wte.weight"
  std::vector<Access> accesses{};
  std::vector<std::shared_ptr<const Condition>> after{};
  std::function<void()> body{};       // may be empty: a wait
  std::vector<WordEdge> writes{};     // words of this rank that the body sets last; for the recorder
  int64_t bytes = 0;                  // what a paced stream paces by
  std::optional<Duration> timeout{};  // of the wait for `after`; without it, the stream's
};

// A copy within a process. The ranges must not overlap, and live until it has ended.
Operation copy_operation(const char* name, std::string subject, void* to, const void* from, size_t bytes);

// Inside a catch block: the exception, with the operation's name and subject before its message.
Status failure_of(const Operation& operation);

}  // namespace tessera::device
