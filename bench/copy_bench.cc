// Rates of the data plane's paths next to the machine's own ceilings, in one process:
//
//   copy_bench [MIB] [THREADS] [PATTERN]     (cases whose name contains PATTERN)
//
// Four sources hold rows or columns of a matrix; THREADS receivers pull theirs with one worker each. All are threads of
// one process, whose own memory is read as if it were a peer's. Every figure is the best of five rounds after a
// warm-up, in GB of payload per second. Ceilings are measured in the same run.
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "codec/simd/digest.h"
#include "codec/simd/stream.h"
#include "exec/pull/compiler.h"
#include "exec/pull/source.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"
#include "transport/exporter.h"
#include "transport/peer_memory.h"
#include "transport/transport.h"

namespace tessera {
namespace {

constexpr int kRounds = 5;

std::string& pattern() {
  static std::string text;
  return text;
}

// The best round: in wall time, and in CPU time of all threads, which is more reliable on a shared machine.
struct Cost {
  double wall = 1e9;
  double cpu = 1e9;
};

double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

Cost cost_of(const std::function<void()>& body) {
  body();  // warm-up
  Cost best;
  for (int round = 0; round < kRounds; ++round) {
    const double cpu = cpu_seconds();
    const auto begin = std::chrono::steady_clock::now();
    body();
    best.wall = std::min(best.wall, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    best.cpu = std::min(best.cpu, cpu_seconds() - cpu);
  }
  return best;
}

// The cost of a ceiling for its bytes; other cases are compared with it.
struct Rate {
  double wall = 0;
  double cpu = 0;
};

Rate report(const std::string& what, int64_t bytes, const Cost& cost, const Rate& ceiling = {}) {
  const double gigabytes = static_cast<double>(bytes) * 1e-9;
  const Rate rate{gigabytes / cost.wall, gigabytes / cost.cpu};
  std::printf("%-46s %7.2f GB/s %7.2f GB a CPU second", what.c_str(), rate.wall, rate.cpu);
  if (ceiling.wall > 0)
    std::printf("   %.2f and %.2f of the ceiling", rate.wall / ceiling.wall, rate.cpu / ceiling.cpu);
  std::printf("\n");
  std::fflush(stdout);
  return rate;
}

// Runs one body on each thread, concurrently.
void in_parallel(int threads, const std::function<void(int)>& body) {
  std::vector<std::thread> running;
  for (int t = 0; t < threads; ++t) running.emplace_back(body, t);
  for (std::thread& thread : running) thread.join();
}

class Event {
 public:
  void signal() {
    const std::lock_guard lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  void wait(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return count_ >= count; });
    count_ -= count;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

struct Memory {
  SharedBuffer shared;
  std::unique_ptr<std::byte[]> own;
  std::byte* data = nullptr;

  Memory(size_t bytes, bool is_shared) {
    if (is_shared) {
      shared = SharedHeap::process().allocate(bytes, 4096);
      data = shared.data();
    } else {
      own = std::make_unique<std::byte[]>(bytes);
      data = own.get();
    }
    std::memset(data, 1, bytes);
  }
};

struct Case {
  std::string name;
  Index rows, columns;  // of the whole matrix, bf16
  bool src_rows, dst_rows;
  bool shared;
  bool digest = false;
  DType dst_dtype = DType::kBF16;
  std::optional<Access> path;
  Index tensors = 1;
};

Region half(const Case& c, bool rows, Index part, Index parts) {
  const Index n = rows ? c.rows : c.columns;
  const IntervalSet cut({n * part / parts, n * (part + 1) / parts});
  const IntervalSet all({0, rows ? c.columns : c.rows});
  return rows ? Region({cut, all}) : Region({all, cut});
}

LocalArray array_of(const Region& region, DType dtype) {
  return {region, byte_strides(dtype, region.extents())};
}

// Everything that moves in one case. Sources are in this process's memory, but accessed as if it were another's.
class Transfer {
 public:
  Transfer(const Case& c, int receivers) : case_(c), receivers_(receivers) {
    make_sources();
    for (int r = 0; r < receivers_; ++r) make_receiver(r);
    if (!fills_stream_ && c.digest)
      for (size_t s = 0; s < kSources; ++s) make_source_run(s, source_routes_[s], nullptr);
  }

  void run(uint32_t epoch) {
    for (auto& pull : pulls_) pull->start(epoch);
    for (auto& source : source_runs_) source->start(epoch);
    done_.wait(static_cast<int>(pulls_.size() + source_runs_.size()));
    for (const auto& pull : pulls_) pull->status().throw_if_error();
  }

  int64_t bytes() const { return bytes_; }
  double compile_seconds() const { return compile_seconds_; }

 private:
  static constexpr size_t kSources = 4;

  void make_sources() {
    const auto bytes = static_cast<size_t>(case_.tensors * case_.rows * case_.columns * 2) / kSources;
    for (size_t s = 0; s < kSources; ++s) {
      source_pools_.push_back(std::make_unique<WorkerPool>(1, "source"));
      src_.push_back(std::make_unique<Memory>(bytes, case_.shared));
    }
    source_routes_.resize(kSources);
  }

  RemoteRange export_range(const std::byte* data, size_t bytes) {
    const RemoteRange range = exporter_.add({.data = data, .bytes = bytes}).range;
    for (RemoteKey& key : exporter_.take_keys()) peer_->add_key(keys_++, std::move(key));
    return range;
  }

  void make_receiver(int r) {
    const Index elements = case_.tensors * case_.rows * case_.columns / receivers_;
    pull_pools_.push_back(std::make_unique<WorkerPool>(1, "pull"));
    dst_.push_back(std::make_unique<Memory>(static_cast<size_t>(bytes_of(case_.dst_dtype, elements)), false));
    for (size_t s = 0; s < kSources; ++s) make_pull(r, s);
  }

  void make_pull(int r, size_t s) {
    const Region src = half(case_, case_.src_rows, static_cast<Index>(s), kSources);
    const Region dst = half(case_, case_.dst_rows, r, receivers_);
    const Region region = src.intersect(dst);
    if (region.empty()) return;
    std::vector<PullRoute> routes;
    std::vector<SourceRoute> source_routes;
    for (Index t = 0; t < case_.tensors; ++t) {
      std::byte* from = src_[s]->data + t * src.size() * 2;
      routes.push_back({.what = {.shape = {case_.rows, case_.columns}, .dtype = DType::kBF16, .region = region},
                        .src = array_of(src, DType::kBF16),
                        .memory = export_range(from, static_cast<size_t>(src.size() * 2)),
                        .dst = array_of(dst, case_.dst_dtype),
                        .dst_dtype = case_.dst_dtype,
                        .data = dst_.back()->data + bytes_of(case_.dst_dtype, t * dst.size())});
      source_routes.push_back({.what = routes.back().what, .src = routes.back().src, .data = from});
    }
    const auto begin = std::chrono::steady_clock::now();
    auto program =
        std::make_shared<PullProgram>(peer_, routes, PullOptions{.digest = case_.digest, .private_access = case_.path});
    compile_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    bytes_ += program->bytes();
    std::unique_ptr<ByteStream> stream;
    if (program->wants_stream()) {
      fills_stream_ = true;
      Streams::Ends ends = transports_.make_stream(self_, self_);
      stream = transports_.open_stream(std::move(ends.consumer), self_, self_, "trainer/0");
      make_source_run(s, source_routes, transports_.open_stream(std::move(ends.producer), self_, self_, "inference/0"));
    }
    source_routes_[s].insert(source_routes_[s].end(), source_routes.begin(), source_routes.end());
    pulls_.push_back(
        std::make_unique<PullRun>(program, *pull_pools_.back(), [this] { done_.signal(); }, std::move(stream)));
  }

  // Each stream has a thread; the digests of one source share one.
  void make_source_run(size_t s, std::span<const SourceRoute> routes, std::unique_ptr<ByteStream> stream) {
    std::vector<SourceRoute> sources(routes.begin(), routes.end());
    for (SourceRoute& route : sources) route.streamed = stream != nullptr;
    auto program = std::make_shared<SourceProgram>(sources, SourceOptions{.digest = case_.digest});
    if (stream) fill_pools_.push_back(std::make_unique<WorkerPool>(1, "fill"));
    WorkerPool& pool = stream ? *fill_pools_.back() : *source_pools_[s];
    source_runs_.push_back(
        std::make_unique<SourceRun>(program, pool, [this] { done_.signal(); }, "inference/0", std::move(stream)));
  }

  const Case& case_;
  const int receivers_;
  const Endpoint self_{.process = Incarnation::self(), .name = "trainer/0"};
  const TransportRegistry transports_{{TransportRegistry::builtin().find("shm")}};
  Exporter exporter_{transports_, self_, self_};
  const std::shared_ptr<PeerMemory> peer_ = std::make_shared<PeerMemory>(transports_, self_, self_);
  uint32_t keys_ = 0;
  std::vector<std::unique_ptr<Memory>> src_, dst_;
  std::vector<std::vector<SourceRoute>> source_routes_;
  bool fills_stream_ = false;
  int64_t bytes_ = 0;
  double compile_seconds_ = 0;
  Event done_;
  std::vector<std::unique_ptr<TransferRun>> pulls_, source_runs_;
  std::vector<std::unique_ptr<WorkerPool>> pull_pools_, source_pools_, fill_pools_;  // end before the runs do
};

void run_case(const Case& c, int threads, const Rate& ceiling) {
  if (c.name.find(pattern()) == std::string::npos) return;
  Transfer transfer(c, threads);
  uint32_t epoch = 0;
  report(c.name, transfer.bytes(), cost_of([&] { transfer.run(++epoch); }), ceiling);
  if (c.tensors > 1) std::printf("%-46s %7.3f s\n", "  programs compiled in", transfer.compile_seconds());
}

Rate copy_ceiling(int threads, size_t bytes, bool shared, const char* name,
                  const std::function<void(std::byte*, const std::byte*, size_t)>& copy) {
  Memory src(bytes, shared), dst(bytes, false);
  const size_t share = bytes / static_cast<size_t>(threads);
  const Cost cost = cost_of([&] {
    in_parallel(threads, [&](int t) {
      const size_t at = share * static_cast<size_t>(t);
      copy(dst.data + at, src.data + at, share);
    });
  });
  return report(name, static_cast<int64_t>(bytes), cost);
}

// The ceilings that cases are compared with.
struct Ceilings {
  Rate stream;
  Rate readv;
};

void read_own_memory(std::byte* dst, const std::byte* src, size_t bytes) {
  for (size_t at = 0; at < bytes; at += size_t{1} << 20) {
    const size_t part = std::min(bytes - at, size_t{1} << 20);
    const iovec local{dst + at, part};
    const iovec remote{const_cast<std::byte*>(src) + at, part};
    if (::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) < 0) std::perror("process_vm_readv");
  }
}

Ceilings run_ceilings(size_t bytes, int threads) {
  Ceilings ceilings;
  copy_ceiling(threads, bytes, true, "memcpy",
               [](std::byte* d, const std::byte* s, size_t n) { std::memcpy(d, s, n); });
  ceilings.stream =
      copy_ceiling(threads, bytes, true, "streaming copy", [](std::byte* d, const std::byte* s, size_t n) {
        copy_stream(d, s, n);
        stream_fence();
      });
  ceilings.readv = copy_ceiling(threads, bytes, false, "process_vm_readv", read_own_memory);
  copy_ceiling(threads, bytes, true, "digest only", [](std::byte*, const std::byte* s, size_t n) {
    Digest digest;
    digest_bytes(digest, 0, s, n);
  });
  copy_ceiling(threads, bytes, true, "digest and streaming copy", [](std::byte* d, const std::byte* s, size_t n) {
    Digest digest;
    digest_copy_rows(digest, 0, 8192, d, 8192, s, 8192, 8192, n / 8192);
    stream_fence();
  });
  return ceilings;
}

struct Change {
  const char* name;
  bool src_rows, dst_rows;
};
constexpr Change kRowsToRows{"rows to rows", true, true};
constexpr Change kRowsToColumns{"rows to columns", true, false};
constexpr Change kColumnsToRows{"columns to rows", false, true};

// `path`: for private memory; empty: shared memory, which is mapped.
Case case_of(const Change& change, Index rows, Index columns, std::optional<Access> path) {
  return {.name = std::string(path ? to_string(*path) : "mapped") + " " + change.name,
          .rows = rows,
          .columns = columns,
          .src_rows = change.src_rows,
          .dst_rows = change.dst_rows,
          .shared = !path,
          .path = path};
}

void run_large_cases(size_t bytes, Index columns, int threads, const Ceilings& ceilings) {
  const Index rows = static_cast<Index>(bytes) / 2 / columns;
  const std::string width = " " + std::to_string(columns) + " wide";
  for (const bool digest : {false, true}) {
    for (const Change& change : {kRowsToRows, kRowsToColumns, kColumnsToRows}) {
      Case c = case_of(change, rows, columns, {});
      c.name += width + (digest ? ", digest" : "");
      c.digest = digest;
      run_case(c, threads, ceilings.stream);
    }
  }
  Case cast = case_of(kRowsToColumns, rows, columns, {});
  cast.name += ", to f32" + width;
  cast.dst_dtype = DType::kF32;
  run_case(cast, threads, ceilings.stream);
  for (const Access path : {Access::kGet, Access::kStream}) {
    for (const Change& change : {kRowsToRows, kRowsToColumns, kColumnsToRows}) {
      Case c = case_of(change, rows, columns, path);
      c.name += width;
      run_case(c, threads, ceilings.readv);
    }
  }
}

void run_small_cases(int threads, const Ceilings& ceilings) {
  for (const std::optional<Access> path : {std::optional<Access>(), {Access::kGet}, {Access::kStream}}) {
    Case c = case_of(kRowsToRows, 32, 64, path);
    c.name += ", 10000 tensors of 4 KiB";
    c.tensors = 10'000;
    run_case(c, threads, path ? ceilings.readv : ceilings.stream);
  }
}

void run_all(size_t mib, int threads) {
  const size_t bytes = mib << 20;
  std::printf("%d threads, %zu MiB, best of %d\n", threads, mib, kRounds);
  const Ceilings ceilings = run_ceilings(bytes, threads);
  for (const Index columns : {8192, 1024}) run_large_cases(bytes, columns, threads, ceilings);
  run_small_cases(threads, ceilings);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  const size_t mib = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 256;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 2;
  tessera::pattern() = argc > 3 ? argv[3] : "";
  tessera::run_all(mib, threads);
}
