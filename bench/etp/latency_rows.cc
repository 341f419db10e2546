// Times of what moves next to no data, and lists against one by one.
#include <fmt/format.h>

#include <array>
#include <thread>

#include "base/fail.h"
#include "bench/etp/rows.h"
#include "bench/etp/weights.h"
#include "device/device.h"

namespace tessera::bench {
namespace {

using collective::Word;

uint64_t now_ns() {
  return static_cast<uint64_t>(Clock::steady().now().time_since_epoch().count());
}

constexpr int kBlock = 1000;  // short pieces of work are timed in blocks

Row time_row(std::span<const Figures> ranks, const std::string& name, double pieces, bool cpu, double most) {
  const Cost cost = median(costs_of(ranks, name));
  Row row{.what = name, .figure = "us", .wall = cost.wall / pieces * 1e6, .target = most, .at_most = true};
  if (cpu) row.cpu = cost.cpu / pieces * 1e6;
  return row;
}

void empty_gathers(const Rank& rank, Figures& figures) {
  const PlainWeights weights(rank, 1, 64);
  rank.together();
  const auto stream = rank.group().device().caller();
  const auto ready = collective::gather_operations(rank.group(), weights.parts());
  const std::array<Work, 2> works{Work{"gather of 128 bytes that are published, prepared",
                                       [&] {
                                         for (int i = 0; i < kBlock; ++i)
                                           for (const auto& operation : ready) stream->enqueue(operation);
                                       }},
                                  Work{"the same, described each time", [&] {
                                         for (int i = 0; i < kBlock; ++i)
                                           collective::gather(rank.group(), *stream, weights.parts());
                                       }}};
  take_turns(rank, figures, 25, works);
  stream->synchronize(rank.group().deadline());
  weights.check();
}

// The word's value is when it was set: CLOCK_MONOTONIC is the same for all processes.
void bells(const Rank& rank, Figures& figures) {
  constexpr int kRings = 300;
  collective::Group& group = rank.group();
  uint64_t last = 0;
  for (int i = 0; i < kRings; ++i) {
    rank.together();
    if (rank.number() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // by then the other one sleeps
      group.set(Word::kPublished, 0, now_ns());
      continue;
    }
    group.device().wait_host(*group.at_least(0, Word::kPublished, 0, last + 1, "to ring"), group.deadline());
    const uint64_t heard = now_ns();
    last = group.get(0, Word::kPublished, 0);
    figures["bell"].push_back(static_cast<double>(heard - last) * 1e-3);
  }
}

void max_exchanges(const Rank& rank, Figures& figures) {
  std::vector<float> values(1000, 1.0F);
  const std::array<Work, 1> works{Work{"max exchange of 1,000 floats by 2", [&] {
                                         for (int i = 0; i < 100; ++i) rank.group().max_exchange(values);
                                       }}};
  take_turns(rank, figures, 25, works);
}

// 64 experts of 16 KiB, in shards of 8 KiB.
void gather_experts(const Rank& rank, Figures& figures) {
  const PlainWeights weights(rank, 64, 8192);
  rank.together();
  collective::Group& group = rank.group();
  const auto stream = group.device().make_stream({.name = "gather"});
  const auto arrive = [&] { group.device().wait_host(stream->record(), group.deadline()); };
  const std::array<Work, 3> works{Work{"list",
                                       [&] {
                                         collective::gather(group, *stream, weights.parts());
                                         arrive();
                                       }},
                                  Work{"each before the next",
                                       [&] {
                                         for (const auto& part : weights.parts()) {
                                           collective::gather(group, *stream, {&part, 1});
                                           arrive();
                                         }
                                       }},
                                  Work{"one wait", [&] {
                                         for (const auto& part : weights.parts())
                                           collective::gather(group, *stream, {&part, 1});
                                         arrive();
                                       }}};
  take_turns(rank, figures, 50, works);
  weights.check();
}

// 256 weights of 16 KiB of bf16, as nvfp4.
void publish_weights(const Rank& rank, Figures& figures) {
  etp::Runtime runtime(rank.shards(), {.prefetch = etp::PrefetchMode::kOff, .publish = etp::PublishAt::kFirstUse});
  std::vector<etp::WeightId> weights;
  for (int i = 0; i < 256; ++i)
    weights.push_back(runtime.add(
        {.name = fmt::format("layers.{}", i), .rows = 64, .columns = 128, .dtype = DType::kBF16, .format = "nvfp4"}));
  runtime.start();
  const auto written = [&] { runtime.update(weights, [] {}); };
  const std::array<Work, 4> works{Work{"update", written}, Work{"list", [&] { runtime.publish(weights); }},
                                  Work{"update again", written}, Work{"one by one", [&] {
                                                                        for (const etp::WeightId& weight : weights)
                                                                          runtime.publish({&weight, 1});
                                                                      }}};
  take_turns(rank, figures, 15, works);
  rank.together();
}

Row times_row(std::span<const Figures> ranks, const std::string& what, const std::string& slow,
              std::optional<double> least) {
  const Cost ratio = median_ratio(costs_of(ranks, slow), costs_of(ranks, "list"));
  return {.what = what,
          .time = median(costs_of(ranks, "list")),
          .figure = "times as fast",
          .wall = ratio.wall,
          .target = least};
}

}  // namespace

void latency_rows(Table& table) {
  Table::section("latency, 2 ranks");
  const auto gathers = run_ranks(2, empty_gathers);
  table.add(time_row(gathers, "gather of 128 bytes that are published, prepared", kBlock, true, 2));
  table.add(time_row(gathers, "the same, described each time", kBlock, true, 2));
  const auto rings = run_ranks(2, bells);
  table.add({.what = "bell, from the word to who slept",
             .figure = "us",
             .wall = median(rings[1].at("bell")),
             .target = 60,
             .at_most = true});
  table.add(time_row(run_ranks(2, max_exchanges), "max exchange of 1,000 floats by 2", 100, false, 80));
}

void list_rows(Table& table) {
  Table::section("a list against one by one, 2 ranks");
  const auto experts = run_ranks(2, gather_experts);
  table.add(times_row(experts, "64 experts of 16 KiB on a gather stream", "each before the next", 2));
  table.add(times_row(experts, "the same, against all given at once", "one wait", {}));
  table.add(times_row(run_ranks(2, publish_weights), "256 nvfp4 weights of 16 KiB published", "one by one", 10));
}

}  // namespace tessera::bench
