// Gathers and folds, in shares of what copy_stream() does in turns with them, on all ranks at the same time.
#include <fmt/format.h>

#include <array>
#include <cstring>
#include <memory>

#include "base/fail.h"
#include "bench/etp/rows.h"
#include "bench/etp/weights.h"
#include "collective/movement/fold.h"
#include "device/device.h"

namespace tessera::bench {
namespace {

using etp::Phase;
using etp::Runtime;
using etp::WeightSpec;

constexpr int kRepeats = 15;
constexpr auto kCopied = static_cast<double>(CopyCeiling::kBytes);

void fill(std::byte* data, DType dtype, int64_t elements) {
  uint32_t state = 1;
  for (int64_t i = 0; i < elements; ++i) {
    state = state * 1664525 + 1013904223;
    const float value = (static_cast<float>(state >> 8) * 0x1p-24F - 0.5F) * 0.05F;
    if (dtype == DType::kF32)
      std::memcpy(data + i * 4, &value, 4);
    else  // the upper half of an f32 is a bf16
      std::memcpy(data + i * 2, reinterpret_cast<const std::byte*>(&value) + 2, 2);
  }
}

// Shares: bytes that `name` moves a second, of what the copy does.
Row share_row(std::span<const Figures> ranks, const std::string& name, double bytes, double copied,
              std::optional<double> target) {
  const std::vector<Cost> copies = costs_of(ranks, "copy");
  const std::vector<Cost> costs = costs_of(ranks, name);
  const Cost ratio = median_ratio(copies, costs);
  return {.what = name,
          .time = median(costs),
          .figure = "of the copy",
          .wall = ratio.wall * bytes / copied,
          .cpu = ratio.cpu * bytes / copied,
          .target = target};
}

struct Decoding {
  std::string name;
  std::string format;
  DType dtype;    // of the shard
  DType compute;  // of what is gathered
  double target;
};

// One weight whose gathered rows take 64 MiB, through a runtime that gathers when it is asked to.
void gather_weight(const Rank& rank, const Decoding& decoding, Figures& figures) {
  Runtime runtime(rank.shards(), {.prefetch = etp::PrefetchMode::kOff});
  constexpr int64_t kColumns = 4096;
  const int64_t rows = static_cast<int64_t>(CopyCeiling::kBytes) / bytes_of(decoding.compute, kColumns);
  const etp::WeightId weight = runtime.add({.name = "weight",
                                            .rows = rows,
                                            .columns = kColumns,
                                            .dtype = decoding.dtype,
                                            .format = decoding.format,
                                            .compute = decoding.compute,
                                            .frozen = true});
  fill(runtime.shard(weight), decoding.dtype, runtime.rows(weight).size() * kColumns);
  runtime.start();
  CopyCeiling copy;
  const std::array<Work, 2> works{
      Work{"copy", [&] { copy(); }},
      Work{decoding.name, [&] { runtime.acquire(weight, Phase::kForward, {.expects_backward = false}); }}};
  take_turns(rank, figures, kRepeats, works);
  rank.together();
}

// 1,000 weights in shards of 4 KiB: the operation itself, and used as a list of experts.
void gather_list(const Rank& rank, Figures& figures) {
  constexpr size_t kWeights = 1000;
  constexpr size_t kShard = 4096;
  const auto stream = rank.group().device().caller();
  CopyCeiling copy;
  const PlainWeights weights(rank, kWeights, kShard);
  const std::array<Work, 2> works{Work{"copy", [&] { copy(); }},
                                  Work{"1,000 weights in 4 KiB shards, one operation",
                                       [&] { collective::gather(rank.group(), *stream, weights.parts()); }}};
  take_turns(rank, figures, 3 * kRepeats, works);
  stream->synchronize(rank.group().deadline());
  weights.check();
}

void use_list(const Rank& rank, Figures& figures) {
  constexpr int kWeights = 1000;
  Runtime runtime(rank.shards(), {.prefetch = etp::PrefetchMode::kOff});
  std::vector<etp::WeightId> experts;
  for (int i = 0; i < kWeights; ++i)
    experts.push_back(runtime.add(
        {.name = fmt::format("experts.{}", i), .rows = 32, .columns = 128, .dtype = DType::kBF16, .frozen = true}));
  runtime.add_experts(experts);
  runtime.start();
  CopyCeiling copy;
  const std::array<Work, 2> works{Work{"copy", [&] { copy(); }},
                                  Work{"the same as a list of experts of a runtime", [&] {
                                         runtime.acquire(experts, Phase::kForward, {.expects_backward = false});
                                       }}};
  take_turns(rank, figures, 3 * kRepeats, works);
  rank.together();
}

// This rank's rows of a gradient that all ranks have produced.
void fold_gradients(const Rank& rank, DType dtype, const std::string& name, Figures& figures) {
  constexpr int64_t kColumns = 1024;
  constexpr int64_t kRows = 4096;  // of a rank: 16 MiB of f32
  collective::Group& group = rank.group();
  const int64_t total = kRows * rank.size();
  const auto bytes = static_cast<size_t>(bytes_of(dtype, total * kColumns));
  const SharedBuffer gradient = SharedHeap::process().allocate(bytes);
  fill(gradient.data(), dtype, total * kColumns);
  group.set_gradient(0, 1, 0, {.memory = group.refer(gradient.data(), bytes), .dtype = dtype});
  group.set(collective::Word::kProduced, 0, collective::round_word(1, 1));
  std::vector<float> accumulated(static_cast<size_t>(kRows * kColumns));
  int contributors = 0;
  const collective::FoldPart part{.slot = 0,
                                  .interval = 1,
                                  .round = 0,
                                  .begin_row = rank.number() * kRows,
                                  .rows = kRows,
                                  .total_rows = total,
                                  .columns = kColumns,
                                  .gradient_dtype = dtype,
                                  .accumulated = accumulated.data(),
                                  .scale = 0.5F,
                                  .contributors = &contributors,
                                  .weight = "w"};
  const auto stream = group.device().caller();
  CopyCeiling copy;
  const std::array<Work, 2> works{Work{"copy", [&] { copy(); }},
                                  Work{name, [&] { collective::fold(group, *stream, {&part, 1}); }}};
  take_turns(rank, figures, kRepeats, works);
  stream->synchronize(group.deadline());
  TESSERA_CHECK_EQ(contributors, rank.size());
}

}  // namespace

void gather_rows(Table& table) {
  Table::section("gathers by 2 ranks, 64 MiB of gathered rows each; the copy moves as much (bytes written)");
  const Decoding decodings[] = {
      {"bf16, plain", "", DType::kBF16, DType::kBF16, 0.8},
      {"bf16 to fp32", "bf16", DType::kF32, DType::kF32, 0.6},
      {"mxfp8 to fp32", "mxfp8", DType::kF32, DType::kF32, 0.5},
      {"mxfp8 to bf16", "mxfp8", DType::kBF16, DType::kBF16, 0.5},
      {"nvfp4 to fp32", "nvfp4", DType::kF32, DType::kF32, 0.4},
      {"nvfp4 to bf16", "nvfp4", DType::kBF16, DType::kBF16, 0.4},
  };
  for (const Decoding& decoding : decodings) {
    const auto ranks =
        run_ranks(2, [&](const Rank& rank, Figures& figures) { gather_weight(rank, decoding, figures); });
    if (&decoding == &decodings[0])
      table.add({.what = "(the copy)",
                 .time = median(costs_of(ranks, "copy")),
                 .figure = "GB/s a rank",
                 .wall = kCopied * 1e-9 / median(costs_of(ranks, "copy")).wall,
                 .cpu = kCopied * 1e-9 / median(costs_of(ranks, "copy")).cpu});
    table.add(share_row(ranks, decoding.name, kCopied, kCopied, decoding.target));
  }
  constexpr double kListed = 1000 * 2 * 4096;
  table.add(
      share_row(run_ranks(2, gather_list), "1,000 weights in 4 KiB shards, one operation", kListed, kCopied, 0.5));
  table.add(share_row(run_ranks(2, use_list), "the same as a list of experts of a runtime", kListed, kCopied, {}));
}

void fold_rows(Table& table) {
  Table::section(
      "folds into 16 MiB of fp32 rows a rank; bytes read and written, of those that the copy reads and writes");
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const int size : {2, 4}) {
      const std::string name = fmt::format("{}, {} ranks", dtype == DType::kF32 ? "fp32" : "bf16 gradients", size);
      const auto ranks =
          run_ranks(size, [&](const Rank& rank, Figures& figures) { fold_gradients(rank, dtype, name, figures); });
      constexpr double kElements = 4 << 20;
      const double bytes = kElements * (2 * 4.0 + size * (dtype == DType::kF32 ? 4.0 : 2.0));
      table.add(share_row(ranks, name, bytes, 2 * kCopied, dtype == DType::kF32 ? 0.7 : 0.6));
    }
}

}  // namespace tessera::bench
