// A trace of what a process does, for Perfetto (https://ui.perfetto.dev) and chrome://tracing: the JSON of the Trace
// Event Format (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
//
// Without a trace, a span costs one relaxed load. With one, it costs two clock readings and one event in its thread's
// buffer; the tracer's thread writes full buffers to the file. The file is valid JSON after every write, so it can be
// read while the process runs and after it was killed; only the last events of each thread (fewer than kBufferEvents)
// are lost then. At most kMostBuffers wait to be written; further events are dropped, and the file has their count.
//
// Span names are string literals. A subject ("weights/policy", "trainer/3") is copied and truncated to kSubjectBytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/clock.h"

namespace tessera {

// What a span is about; 0 means "does not apply".
struct TraceArgs {
  std::string_view subject{};
  int64_t version = 0;
  int64_t bytes = 0;
};

class Trace {
 public:
  static constexpr size_t kBufferEvents = 1024;
  static constexpr size_t kMostBuffers = 256;
  static constexpr size_t kSubjectBytes = 47;

  // Whether a trace is being written.
  static bool on() { return on_.load(std::memory_order_relaxed); }

  // Writes a trace of this process to `path` from now until it is destroyed; replaces what was there. One at a time:
  // throws Error(kAlreadyExists) while another lives or another process writes that file (an flock tells), and Error if
  // `path` cannot be written. If a later write fails, the trace ends with a warning in the log. A forked child traces
  // nothing.
  static std::unique_ptr<Trace> start(const std::string& path);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // Work that begins on one thread and may end on another, or overlaps with other work of its thread. `track` puts
  // spans that belong together, and nest, on one line; begin and end of a span have the same.
  static void begin(const char* name, uint64_t track, const TraceArgs& args = {}) {
    if (on()) record('b', name, now(), track, args);
  }
  static void end(const char* name, uint64_t track, const TraceArgs& args = {}) {
    if (on()) record('e', name, now(), track, args);
  }
  // A number for `track`, unique in this process.
  static uint64_t new_track();

 private:
  friend class TraceSpan;
  struct State;
  Trace() = default;

  static uint64_t now();  // nanoseconds
  static void record(char phase, const char* name, uint64_t start, uint64_t extra, const TraceArgs& args);

  static inline std::atomic<bool> on_{false};
};

// Work of one thread, from its construction to its destruction.
class TraceSpan {
 public:
  explicit TraceSpan(const char* name, const TraceArgs& args = {})
      : name_(name), args_(args), start_(Trace::on() ? Trace::now() : 0) {}
  ~TraceSpan() {
    if (start_ != 0) Trace::record('X', name_, start_, Trace::now() - start_, args_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

  // What becomes known during the work. args().subject must live as long as the span.
  TraceArgs& args() { return args_; }

 private:
  const char* const name_;
  TraceArgs args_;
  const uint64_t start_;
};

}  // namespace tessera
