#include "tools/bench/crowd.h"

#include <sys/resource.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/clock.h"
#include "base/fail.h"
#include "tessera/bus.h"
#include "tools/bench/processes.h"

namespace tessera::bench {
namespace {

constexpr Timeout kTimeout = std::chrono::seconds(60);
constexpr Index kRows = 64, kColumns = 64;  // of each tensor
constexpr char kTrainer[] = "trainer", kServer[] = "server";

double cpu_seconds_of_this_process() {
  rusage usage{};
  if (::getrusage(RUSAGE_SELF, &usage) != 0) fail_errno("getrusage");
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

std::vector<TensorSpec> specs_at(std::byte* data, int world) {
  const Layout layout(Mesh({Axis{"", world}}), {Shard{0}});
  const Index bytes = kRows / world * kColumns * bits_of(DType::kBF16) / 8;
  std::vector<TensorSpec> specs;
  for (int tensor = 0; tensor < kCrowdTensors; ++tensor)
    specs.push_back({.name = fmt::format("model.layers.{}.weight", tensor),
                     .data = data + tensor * bytes,
                     .dtype = DType::kBF16,
                     .shape = {kRows, kColumns},
                     .layout = layout});
  return specs;
}

void be_rank(const char* job, const char* peer, Rank rank, int world, const Meeting& meeting, Barrier& barrier,
             const Process::Say& say) {
  std::vector<std::byte> memory(kCrowdTensors * kRows * kColumns * sizeof(uint16_t) / static_cast<size_t>(world));
  const std::vector<TensorSpec> specs = specs_at(memory.data(), world);
  Bus bus({.job = job,
           .rank = rank,
           .world = world,
           .store = meeting.store,
           .name_space = meeting.name_space,
           .threads = 1,
           .timeout = kTimeout});
  Pair pair = bus.pair({.name = "bench", .peer = peer, .timeout = kTimeout});
  const Batch batch = std::string_view(job) == kTrainer ? pair.offer("tensors", specs, kTimeout)
                                                        : pair.accept("tensors", specs, kTimeout);
  say(nlohmann::json{{"cpu_seconds", cpu_seconds_of_this_process()},
                     {"end", Clock::steady().now().time_since_epoch().count()}}
          .dump());
  barrier.arrive_and_wait(Deadline::after(kTimeout));  // no rank leaves while others are still registering
}

}  // namespace

void time_crowd(const Crowd& crowd, const Meeting& meeting, CrowdTimes& times) {
  Barrier barrier(2 * static_cast<uint32_t>(crowd.world));
  const int64_t begin = Clock::steady().now().time_since_epoch().count();
  std::vector<Process> ranks;
  for (Rank rank = 0; rank < crowd.world; ++rank)
    for (const auto& [job, peer] : {std::pair{kTrainer, kServer}, std::pair{kServer, kTrainer}})
      ranks.push_back(Process::start(fmt::format("{}/{}", job, rank), [&](const Process::Say& say) {
        be_rank(job, peer, rank, crowd.world, meeting, barrier, say);
      }));
  double cpu_seconds = 0;
  int64_t end = begin;
  for (const std::string& said : hear_all(ranks, Deadline::after(2 * kTimeout))) {
    const auto json = nlohmann::json::parse(said);
    cpu_seconds += json.at("cpu_seconds").get<double>();
    end = std::max(end, json.at("end").get<int64_t>());
  }
  times.cpu_seconds.push_back(cpu_seconds / static_cast<double>(ranks.size()));
  times.seconds.push_back(to_seconds(Duration(end - begin)));
}

}  // namespace tessera::bench
