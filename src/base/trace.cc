#include "base/trace.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <map>
#include <thread>
#include <vector>

#include "base/escape.h"
#include "base/fail.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/thread.h"

namespace tessera {
namespace {

constexpr std::string_view kHead = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
constexpr std::string_view kTail = "\n]}\n";

struct TraceEvent {
  const char* name;
  uint64_t start;  // nanoseconds
  uint64_t extra;  // X: duration; b, e: track
  int64_t version;
  int64_t bytes;
  char phase;
  char subject[Trace::kSubjectBytes + 1];
};

// The events of one thread that have not been written yet.
struct Buffer {
  Mutex mutex;  // used by the thread only, except when the trace begins or ends
  std::vector<TraceEvent> events GUARDED_BY(mutex);
  uint64_t generation GUARDED_BY(mutex) = 0;  // the trace they belong to
  pid_t tid = 0;
  std::string thread;
};

struct Full {
  pid_t tid;
  std::string thread;
  std::vector<TraceEvent> events;
};

void append_args(const TraceEvent& event, std::string& out) {
  out += ",\"args\":{";
  const char* separator = "";
  if (event.subject[0] != '\0') {
    out += "\"subject\":";
    append_json_string(event.subject, out);
    separator = ",";
  }
  for (const auto& [key, value] : {std::pair("version", event.version), std::pair("bytes", event.bytes)}) {
    if (value == 0) continue;
    fmt::format_to(std::back_inserter(out), "{}\"{}\":{}", separator, key, value);
    separator = ",";
  }
  out += "}}";
}

void append_event(const TraceEvent& event, pid_t pid, pid_t tid, std::string& out) {
  fmt::format_to(std::back_inserter(out),
                 ",\n{{\"ph\":\"{}\",\"name\":\"{}\",\"cat\":\"tessera\",\"pid\":{},\"tid\":{},"
                 "\"ts\":{}.{:03}",
                 event.phase, event.name, pid, tid, event.start / 1000, event.start % 1000);
  if (event.phase == 'X')
    fmt::format_to(std::back_inserter(out), ",\"dur\":{}.{:03}", event.extra / 1000, event.extra % 1000);
  if (event.phase == 'b' || event.phase == 'e')
    fmt::format_to(std::back_inserter(out), ",\"id\":\"{:#x}\"", event.extra);
  append_args(event, out);
}

void append_metadata(std::string_view what, std::string_view name, pid_t pid, pid_t tid, std::string& out) {
  fmt::format_to(std::back_inserter(out),
                 "{{\"ph\":\"M\",\"name\":\"{}\",\"pid\":{},\"tid\":{},\"args\":{{\"name\":", what, pid, tid);
  append_json_string(name, out);
  out += "}}";
}

// The file, truncated, and locked while it is open: two writers would leave an unreadable file.
UniqueFd open_alone(const std::string& path) {
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
  struct stat about{};
  if (!file || ::fstat(file.get(), &about) != 0) fail_errno(fmt::format("trace {}", path));
  if (!S_ISREG(about.st_mode)) return file;  // /dev/null
  // A file system without locks is no reason to refuse a trace.
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    fail(ErrorCode::kAlreadyExists, "trace {}: another process writes it; %p in the path stands for the pid"_message,
         path);
  if (::ftruncate(file.get(), 0) != 0) fail_errno(fmt::format("trace {}", path));
  return file;
}

std::string process_name() {
  char name[64] = {};
  const UniqueFd fd(::open("/proc/self/comm", O_RDONLY | O_CLOEXEC));
  const ssize_t got = fd ? ::read(fd.get(), name, sizeof(name) - 1) : 0;
  std::string_view text(name, static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return std::string(text.substr(0, text.find('\n')));
}

}  // namespace

// Shared by all traces that this process writes, one after another. Leaked on purpose: threads end after statics do.
struct Trace::State {
  static State& get() {
    static auto* const state = new State;
    return *state;
  }
  Buffer& own_buffer();
  void hand_over(Buffer& buffer) REQUIRES(buffer.mutex) EXCLUDES(mutex);
  void run();
  void append(std::string text);

  Mutex mutex;  // taken after a buffer's
  CondVar wake;
  std::list<std::shared_ptr<Buffer>> buffers GUARDED_BY(mutex);
  std::vector<Full> full GUARDED_BY(mutex);
  uint64_t dropped GUARDED_BY(mutex) = 0;
  bool active GUARDED_BY(mutex) = false;  // whether a Trace lives
  bool stopping GUARDED_BY(mutex) = false;
  std::atomic<uint64_t> generation{0};
  std::atomic<pid_t> pid{0};

  // Owned by the writer once it runs.
  UniqueFd file;
  off_t end = 0;  // where the events end and the tail begins
  bool failed = false;
  std::map<pid_t, std::string> named;
  std::thread writer;
};

Buffer& Trace::State::own_buffer() {
  struct Registered {
    explicit Registered(State& in) : state(in), buffer(std::make_shared<Buffer>()) {
      char name[16] = {};
      pthread_getname_np(pthread_self(), name, sizeof(name));
      buffer->tid = ::gettid();
      buffer->thread = name;
      const MutexLock lock(state.mutex);
      state.buffers.push_back(buffer);
    }
    ~Registered() {
      if (state.pid != ::getpid()) return;  // a forked child: threads that it does not have may hold locks
      {
        const MutexLock events(buffer->mutex);
        state.hand_over(*buffer);
      }
      const MutexLock lock(state.mutex);
      state.buffers.remove(buffer);
    }
    State& state;
    const std::shared_ptr<Buffer> buffer;
  };
  static thread_local Registered registered(*this);
  return *registered.buffer;
}

void Trace::State::hand_over(Buffer& buffer) {
  const MutexLock lock(mutex);
  if (active && !buffer.events.empty() && buffer.generation == generation.load(std::memory_order_relaxed)) {
    if (full.size() < kMostBuffers) {
      full.push_back({.tid = buffer.tid, .thread = buffer.thread, .events = std::move(buffer.events)});
      wake.notify_one();
    } else {
      dropped += buffer.events.size();
    }
  }
  buffer.events.clear();
}

// Puts text after the events and closes the JSON again, in one write: a reader always finds a complete file.
void Trace::State::append(std::string text) {
  if (failed) return;
  const size_t events = text.size();
  text += kTail;
  const ssize_t written = ::pwrite(file.get(), text.data(), text.size(), end);
  if (written == static_cast<ssize_t>(text.size())) {
    end += static_cast<off_t>(events);
    return;
  }
  failed = true;
  on_.store(false, std::memory_order_relaxed);
  log_event(LogLevel::warn, "trace.cut", {}, "the trace ends here, its file cannot be written: {}"_message,
            written < 0 ? std::strerror(errno) : "disk full");
  const ssize_t closed = ::pwrite(file.get(), kTail.data(), kTail.size(), end);
  if (closed < 0 || ::ftruncate(file.get(), end + static_cast<off_t>(kTail.size())) != 0) return;
}

void Trace::State::run() {
  const pid_t own = pid.load();
  while (true) {
    std::vector<Full> batch;
    uint64_t lost = 0;
    bool last = false;
    {
      const MutexLock lock(mutex);
      wake.wait(mutex, [this]() REQUIRES(mutex) { return stopping || !full.empty(); });
      batch.swap(full);
      last = stopping;
      lost = last ? std::exchange(dropped, 0) : 0;
    }
    for (const Full& one : batch) {
      std::string text;
      if (named[one.tid] != one.thread) {
        text += ",\n";
        append_metadata("thread_name", named[one.tid] = one.thread, own, one.tid, text);
      }
      for (const TraceEvent& event : one.events) append_event(event, own, one.tid, text);
      append(std::move(text));
    }
    if (!last) continue;
    if (lost > 0)
      append(fmt::format(",\n{{\"ph\":\"M\",\"name\":\"dropped_events\",\"pid\":{},\"args\":{{\"count\":{}}}}}", own,
                         lost));
    return;
  }
}

uint64_t Trace::now() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

uint64_t Trace::new_track() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

void Trace::record(char phase, const char* name, uint64_t start, uint64_t extra, const TraceArgs& args) {
  State& state = State::get();
  Buffer& buffer = state.own_buffer();
  const MutexLock lock(buffer.mutex);
  const uint64_t generation = state.generation.load(std::memory_order_acquire);
  if (buffer.generation != generation) {
    buffer.events.clear();  // from an earlier trace
    buffer.generation = generation;
  }
  if (buffer.events.capacity() < kBufferEvents) buffer.events.reserve(kBufferEvents);
  TraceEvent& event = buffer.events.emplace_back();
  event.phase = phase;
  event.name = name;
  event.start = start;
  event.extra = extra;
  event.version = args.version;
  event.bytes = args.bytes;
  const size_t bytes = std::min(args.subject.size(), kSubjectBytes);
  std::copy_n(args.subject.begin(), bytes, event.subject);
  event.subject[bytes] = '\0';
  if (buffer.events.size() == kBufferEvents) state.hand_over(buffer);
}

std::unique_ptr<Trace> Trace::start(const std::string& path) {
  State& state = State::get();
  const MutexLock lock(state.mutex);
  if (state.active)
    fail(ErrorCode::kAlreadyExists, "trace {}: this process writes another trace already"_message, path);
  UniqueFd file = open_alone(path);
  static const bool fork_handler = [] {
    return ::pthread_atfork(nullptr, nullptr, [] { on_.store(false, std::memory_order_relaxed); }) == 0;
  }();
  static_cast<void>(fork_handler);
  state.pid = ::getpid();
  state.file = std::move(file);
  state.failed = false;
  state.stopping = false;
  state.dropped = 0;
  state.full.clear();
  state.named.clear();
  state.end = 0;
  std::string head = std::string(kHead) + "\n";
  append_metadata("process_name", process_name(), state.pid, state.pid, head);
  state.append(std::move(head));
  if (state.failed) fail(ErrorCode::kResourceExhausted, "trace {}: it cannot be written"_message, path);
  state.active = true;
  state.generation.fetch_add(1, std::memory_order_release);
  state.writer = start_thread("tessera-trace", [&state] { state.run(); });
  on_.store(true, std::memory_order_relaxed);
  return std::unique_ptr<Trace>(new Trace);
}

Trace::~Trace() {
  State& state = State::get();
  if (state.pid != ::getpid()) return;  // a forked child: the writer belongs to its parent
  on_.store(false, std::memory_order_relaxed);
  std::list<std::shared_ptr<Buffer>> buffers;
  {
    const MutexLock lock(state.mutex);
    buffers = state.buffers;
  }
  for (const auto& buffer : buffers) {
    const MutexLock events(buffer->mutex);
    state.hand_over(*buffer);
  }
  {
    const MutexLock lock(state.mutex);
    state.stopping = true;
    state.wake.notify_one();
  }
  state.writer.join();
  const MutexLock lock(state.mutex);
  state.file.reset();
  state.active = false;
}

}  // namespace tessera
