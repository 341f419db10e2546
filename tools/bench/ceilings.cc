#include "tools/bench/ceilings.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/fail.h"
#include "base/thread.h"
#include "codec/simd/stream.h"
#include "tessera/memory.h"
#include "tools/bench/case.h"
#include "tools/bench/processes.h"

namespace tessera::bench {
namespace {

constexpr Duration kPatience = std::chrono::seconds(60);
constexpr size_t kPieceBytes = size_t{1} << 20;

// Copies one thread's part; returns 0 or an errno.
using CopyPart = std::function<int(int thread)>;

struct Span {
  TimePoint begin;
  TimePoint end;
  int error = 0;
};

// One Span for each thread and round.
std::vector<std::vector<Span>> run_rounds(int rounds, const CopyPart& copy) {
  std::vector<std::vector<Span>> spans(kCpus, std::vector<Span>(static_cast<size_t>(rounds)));
  std::barrier start(kCpus);
  std::vector<std::thread> threads;
  for (int t = 0; t < kCpus; ++t)
    threads.push_back(start_thread(fmt::format("copy-{}", t), [&, t] {
      for (Span& span : spans[static_cast<size_t>(t)]) {
        start.arrive_and_wait();
        span.begin = Clock::steady().now();
        span.error = copy(t);
        span.end = Clock::steady().now();
      }
    }));
  for (std::thread& thread : threads) thread.join();
  return spans;
}

std::vector<double> time_rounds(int repeat, const CopyPart& copy) {
  const auto spans = run_rounds(repeat + 1, copy);
  std::vector<double> seconds;
  for (size_t round = 1; round <= static_cast<size_t>(repeat); ++round) {  // round 0 is the warm-up
    TimePoint begin = TimePoint::max(), end = TimePoint::min();
    for (const auto& thread : spans) {
      if (thread[round].error != 0) fail_errno("process_vm_readv", thread[round].error);
      begin = std::min(begin, thread[round].begin);
      end = std::max(end, thread[round].end);
    }
    seconds.push_back(to_seconds(end - begin));
  }
  return seconds;
}

std::unique_ptr<std::byte[]> touched_memory(size_t bytes) {
  std::unique_ptr<std::byte[]> memory(new std::byte[bytes]);
  std::memset(memory.get(), 1, bytes);
  return memory;
}

int read_all(std::byte* dst, pid_t pid, const std::byte* src, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    const iovec local{dst + at, std::min(bytes - at, kPieceBytes)};
    const iovec remote{const_cast<std::byte*>(src) + at, local.iov_len};
    const ssize_t n = ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (n <= 0) return n < 0 ? errno : EIO;
    at += static_cast<size_t>(n);
  }
  return 0;
}

// Starts a process that holds `bytes` of private memory until it is killed. It sends their address.
Process start_owner(int number, size_t bytes) {
  return Process::start(fmt::format("memory owner {}", number), [bytes](const Process::Say& say) {
    ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // fails without Yama, where it is not needed
    const auto memory = touched_memory(bytes);
    say(nlohmann::json(reinterpret_cast<uintptr_t>(memory.get())).dump());
    ::pause();
  });
}

// Runs `measure` in a separate process, so that its memory is freed when that ends.
std::vector<double> measured_apart(const std::string& name, const std::function<std::vector<double>()>& measure) {
  Process process = Process::start(name, [&](const Process::Say& say) { say(nlohmann::json(measure()).dump()); });
  return nlohmann::json::parse(process.hear(Deadline::after(kPatience))).get<std::vector<double>>();
}

}  // namespace

std::vector<double> time_streaming_copy(int64_t bytes, int repeat) {
  const size_t part = static_cast<size_t>(bytes) / kCpus;
  return measured_apart("streaming copy", [&] {
    const SharedBuffer src = SharedHeap::process().allocate(part * kCpus, 4096);
    std::memset(src.data(), 1, src.size());
    const auto dst = touched_memory(src.size());
    return time_rounds(repeat, [&](int thread) {
      const size_t at = part * static_cast<size_t>(thread);
      copy_stream(dst.get() + at, src.data() + at, part);
      stream_fence();
      return 0;
    });
  });
}

std::vector<double> time_process_vm_readv(int64_t bytes, int repeat) {
  const size_t part = static_cast<size_t>(bytes) / kCpus;
  std::vector<Process> owners;
  for (int i = 0; i < kCpus; ++i) owners.push_back(start_owner(i, part));
  std::vector<const std::byte*> addresses;
  for (const std::string& said : hear_all(owners, Deadline::after(kPatience)))
    addresses.push_back(reinterpret_cast<const std::byte*>(nlohmann::json::parse(said).get<uintptr_t>()));
  return measured_apart("process_vm_readv", [&] {
    const auto dst = touched_memory(part * kCpus);
    return time_rounds(repeat, [&](int thread) {
      const auto t = static_cast<size_t>(thread);
      return read_all(dst.get() + part * t, owners[t].pid(), addresses[t], part);
    });
  });
}

}  // namespace tessera::bench
