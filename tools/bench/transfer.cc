#include "tools/bench/transfer.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/fail.h"
#include "tessera/bus.h"
#include "tools/bench/processes.h"
#include "tools/bench/tensors.h"

namespace tessera::bench {
namespace {

using Say = Process::Say;

constexpr Timeout kMeetTimeout = std::chrono::seconds(60);
constexpr Duration kCaseTimeout = std::chrono::seconds(120);
constexpr char kSourceJob[] = "source", kDestinationJob[] = "destination", kPair[] = "bench", kBatch[] = "tensors";

// CLOCK_MONOTONIC is the same clock in all processes of a machine.
int64_t now_ns() {
  return Clock::steady().now().time_since_epoch().count();
}

// To be made after the tensors, so that no registration waits for another rank's memory: pair() waits for all ranks.
struct Member {
  Bus bus;
  Pair pair;

  Member(const Meeting& meeting, std::string job, const std::string& peer, Rank rank, int world, DigestMode digest)
      : bus({.job = std::move(job),
             .rank = rank,
             .world = world,
             .store = meeting.store,
             .name_space = meeting.name_space,
             .threads = 1,
             .digest = digest}),
        pair(bus.pair({.name = kPair, .peer = peer, .timeout = kMeetTimeout})) {}
};

// Turns are between jobs of their own.
std::string job_of(const char* side, DigestMode digest) {
  return digest == DigestMode::kOff ? fmt::format("{}-plain", side) : side;
}

Member join_sources(const Meeting& meeting, Rank rank, DigestMode digest) {
  return {meeting, job_of(kSourceJob, digest), job_of(kDestinationJob, digest), rank, kSources, digest};
}

Member join_destinations(const Meeting& meeting, Rank rank, DigestMode digest) {
  return {meeting, job_of(kDestinationJob, digest), job_of(kSourceJob, digest), rank, kDestinations, digest};
}

// The digests of the transfers that take turns.
std::vector<DigestMode> turns_of(const Case& c) {
  if (c.beside_plain) return {c.digest, DigestMode::kOff};
  return {c.digest};
}

using Moments = std::vector<int64_t>;  // of transfers, in nanoseconds

BatchOptions options_of(const Case& c) {
  return {.mode = c.staged ? Mode::kStaged : Mode::kInPlace};
}

void be_source(const Case& c, Rank rank, int transfers, const Meeting& meeting, Barrier& barrier, const Say& say) {
  const RankTensors tensors = RankTensors::of_source(c, rank);
  std::deque<Member> members;
  std::vector<Batch> batches;
  for (const DigestMode digest : turns_of(c)) {
    Member& member = members.emplace_back(join_sources(meeting, rank, digest));
    batches.push_back(member.pair.offer(kBatch, tensors.specs(), kMeetTimeout, options_of(c)));
  }
  std::vector<Moments> begins(batches.size());
  for (int version = 1; version <= transfers; ++version) {
    for (size_t turn = 0; turn < batches.size(); ++turn) {
      barrier.arrive_and_wait(Deadline::after(kCaseTimeout));
      begins[turn].push_back(now_ns());
      batches[turn].send(version).wait();
    }
  }
  barrier.arrive_and_wait(Deadline::after(kCaseTimeout));  // the batches must outlive the copies
  say(nlohmann::json{{"register_seconds", batches.front().stats().register_seconds}, {"begins", begins}}.dump());
}

void be_destination(const Case& c, Rank rank, int transfers, const Meeting& meeting, Barrier& barrier, const Say& say) {
  const RankTensors tensors = RankTensors::of_destination(c, rank);
  std::deque<Member> members;
  std::vector<Batch> batches;
  for (const DigestMode digest : turns_of(c)) {
    Member& member = members.emplace_back(join_destinations(meeting, rank, digest));
    batches.push_back(member.pair.accept(kBatch, tensors.specs(), kMeetTimeout, options_of(c)));
  }
  std::vector<Moments> ends(batches.size());
  for (int version = 1; version <= transfers; ++version) {
    for (size_t turn = 0; turn < batches.size(); ++turn) {
      barrier.arrive_and_wait(Deadline::after(kCaseTimeout));
      batches[turn].recv(version).wait();
      ends[turn].push_back(now_ns());
    }
  }
  barrier.arrive_and_wait(Deadline::after(kCaseTimeout));
  tensors.check();
  const BatchStats stats = batches.front().stats();
  say(nlohmann::json{{"register_seconds", stats.register_seconds},
                     {"bytes_moved", stats.bytes_moved},
                     {"bytes_lower_bound", stats.bytes_lower_bound},
                     {"ends", ends}}
          .dump());
}

// The sources by rank, then the destinations.
template <typename Source, typename Destination>
std::vector<Process> start_ranks(const Source& source, const Destination& destination) {
  std::vector<Process> ranks;
  ranks.reserve(kSources + kDestinations);
  for (Rank r = 0; r < kSources; ++r)
    ranks.push_back(Process::start(fmt::format("{}/{}", kSourceJob, r), [&](const Say& say) { source(r, say); }));
  for (Rank r = 0; r < kDestinations; ++r)
    ranks.push_back(
        Process::start(fmt::format("{}/{}", kDestinationJob, r), [&](const Say& say) { destination(r, say); }));
  return ranks;
}

// Combines what two ranks report for each turn's transfers by `pick`. `a` is empty at first.
template <typename Pick>
std::vector<Moments> pairwise(std::vector<Moments> a, std::vector<Moments> b, const Pick& pick) {
  if (a.empty()) return b;
  for (size_t turn = 0; turn < a.size(); ++turn) std::ranges::transform(a[turn], b[turn], a[turn].begin(), pick);
  return a;
}

std::vector<double> seconds_between(const Moments& begins, const Moments& ends) {
  std::vector<double> seconds;
  std::ranges::transform(ends, begins, std::back_inserter(seconds),
                         [](int64_t end, int64_t begin) { return to_seconds(Duration(end - begin)); });
  return seconds;
}

// Sends "waiting" once `handle` has begun, and later the time at which it ended because of its peer's death.
void await_death(Handle handle, const Say& say) {
  say("waiting");
  try {
    handle.wait();
  } catch (const Error& error) {
    const int64_t noticed = now_ns();
    if (error.code() != ErrorCode::kPeerLost) throw;
    return say(std::to_string(noticed));
  }
  fail_internal("the transfer ended well although a peer was killed");
}

Case tiny_case() {
  return {.name = "death", .groups = {{.src = "4:S0", .dst = "2:S0", .shape = {256, 256}}}};
}

}  // namespace

TransferTimes run_transfer(const Case& c, int repeat, const Meeting& meeting) {
  const int transfers = 2 + repeat;  // the first one, a warm-up, and those that count
  Barrier barrier(kSources + kDestinations);
  std::vector<Process> ranks =
      start_ranks([&](Rank r, const Say& say) { be_source(c, r, transfers, meeting, barrier, say); },
                  [&](Rank r, const Say& say) { be_destination(c, r, transfers, meeting, barrier, say); });
  TransferTimes times;
  std::vector<Moments> begins, ends;  // of each turn's transfers
  for (const std::string& said : hear_all(ranks, Deadline::after(kCaseTimeout))) {
    const nlohmann::json json = nlohmann::json::parse(said);
    times.register_seconds = std::max(times.register_seconds, json.at("register_seconds").get<double>());
    if (json.contains("begins")) {
      begins = pairwise(begins, json.at("begins"), [](int64_t a, int64_t b) { return std::min(a, b); });
      continue;
    }
    ends = pairwise(ends, json.at("ends"), [](int64_t a, int64_t b) { return std::max(a, b); });
    times.bytes_moved = json.at("bytes_moved");
    times.bytes_lower_bound = json.at("bytes_lower_bound");
  }
  times.seconds = seconds_between(begins.front(), ends.front());
  times.first_seconds = times.seconds.front();
  times.seconds.erase(times.seconds.begin(), times.seconds.begin() + 2);
  if (!c.beside_plain) return times;
  times.plain_seconds = seconds_between(begins.back(), ends.back());
  times.plain_seconds.erase(times.plain_seconds.begin(), times.plain_seconds.begin() + 2);
  return times;
}

double time_death(Victim victim, const Meeting& meeting) {
  const Case c = tiny_case();
  const bool source_dies = victim == Victim::kSource;
  // The victim's side registers and stays idle; the other side waits for it. Every rank first sends "waiting".
  const auto source = [&](Rank rank, const Say& say) {
    const RankTensors tensors = RankTensors::of_source(c, rank);
    Member member = join_sources(meeting, rank, c.digest);
    Batch batch = member.pair.offer(kBatch, tensors.specs(), kMeetTimeout);
    if (!source_dies) return await_death(batch.send(1), say);
    say("waiting");
    std::this_thread::sleep_for(kCaseTimeout);  // until it is killed
  };
  const auto destination = [&](Rank rank, const Say& say) {
    const RankTensors tensors = RankTensors::of_destination(c, rank);
    Member member = join_destinations(meeting, rank, c.digest);
    Batch batch = member.pair.accept(kBatch, tensors.specs(), kMeetTimeout);
    if (source_dies) return await_death(batch.recv(), say);
    say("waiting");
    std::this_thread::sleep_for(kCaseTimeout);
  };
  std::vector<Process> ranks = start_ranks(source, destination);
  hear_all(ranks, Deadline::after(kCaseTimeout));
  const std::span<Process> sources = std::span(ranks).first(kSources),
                           destinations = std::span(ranks).last(kDestinations);
  const int64_t killed = now_ns();
  (source_dies ? sources : destinations).back().kill();
  int64_t noticed = 0;
  for (const std::string& said : hear_all(source_dies ? destinations : sources, Deadline::after(kCaseTimeout)))
    noticed = std::max<int64_t>(noticed, std::stoll(said));
  return to_seconds(Duration(noticed - killed));
}

}  // namespace tessera::bench
