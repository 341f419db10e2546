// Receivers that take slices of quantised sources: each slice is quantised as if it were a separate tensor.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "tests/support/brute_values.h"
#include "tests/support/wire_jobs.h"

namespace tessera::test {
namespace {

using testing::HasSubstr;

// A stack of matrices, such as fused projections of experts.
const Shape kSource{3, 44, 72};

float source_value(int64_t version, Index element) {
  const uint64_t hash = mix(static_cast<uint64_t>(version * 1'000'003 + element));
  // Distant elements have different magnitudes: amaxes of parts differ from that of the whole.
  const int exponent = static_cast<int>(element % 72 / 9) - static_cast<int>(element / 288 % 11);
  return std::ldexp(static_cast<float>(hash % 2047) - 1023, exponent);
}

struct SliceJobs {
  const char* layout;  // of the source
  int sources;
  int destinations = 2;
  Mode mode = Mode::kInPlace;
  std::optional<Format> asked = std::nullopt;  // by the sender
  Mutation mistake = Mutation::kNone;          // likewise
  int64_t versions = 2;
};

struct SliceTake {
  std::vector<Slice> slices;
  Shape shape;
  Layout layout;  // of the receiving job
  std::optional<Format> wire;
};

// Everything that the sender's layout can be cut to: parts of dims, with steps, and dropped dims.
std::vector<SliceTake> random_takes(std::mt19937_64& random, const Layout& source, int destinations) {
  const auto below = [&](Index n) { return static_cast<Index>(random() % static_cast<uint64_t>(n)); };
  std::vector<SliceTake> takes;
  while (takes.size() < 40) {
    SliceTake take;
    for (size_t dim = 0; dim < kSource.size(); ++dim) {
      Slice slice{.begin = 0, .end = kSource[dim]};
      const Index kind = below(dim == 0 ? 3 : 8);
      if (kind == 0) {
        const Index at = below(kSource[dim]);
        slice = {.begin = at, .end = at + 1, .step = 1, .dropped = true};
      } else if (kind % 2 == 0) {
        slice.begin = below(kSource[dim]);
        slice.end = slice.begin + 1 + below(kSource[dim] - slice.begin);
        if (kind == 4) slice.step = 2;
      }
      take.slices.push_back(slice);
    }
    take.shape = sliced_shape(kSource, take.slices);
    try {
      (void)sliced_layout(source.bind(kSource), kSource, take.slices);
    } catch (const Error&) {
      continue;  // no layout says how that lies
    }
    const std::vector<Format> formats(all_formats().begin(), all_formats().end());
    take.wire = formats[takes.size() % formats.size()];
    if (take.shape.size() < 2)
      take.layout = Layout::parse(fmt::format("{}:R", destinations));
    else
      take.layout = Layout::parse(fmt::format("{}:{}", destinations, below(2) == 0 ? "S0" : "S1"));
    const bool packs = take.wire == Format::kNvfp4 && take.shape.size() >= 2 && take.shape.back() % 2 != 0;
    if (packs) take.wire = Format::kMxfp8;
    takes.push_back(std::move(take));
  }
  return takes;
}

// The indices of each element of a region, row-major.
std::vector<std::vector<Index>> elements_of(const Region& region) {
  std::vector<std::vector<Index>> all{{}};
  for (const IntervalSet& dim : region.dims()) {
    std::vector<std::vector<Index>> longer;
    for (const std::vector<Index>& at : all)
      for (const Interval& interval : dim.intervals())
        for (Index i = interval.begin; i < interval.end; ++i) {
          longer.push_back(at);
          longer.back().push_back(i);
        }
    all = std::move(longer);
  }
  return all;
}

Index row_major(const Shape& shape, const std::vector<Index>& at) {
  Index index = 0;
  for (size_t dim = 0; dim < shape.size(); ++dim) index = index * shape[dim] + at[dim];
  return index;
}

// All of a slice, as in the source.
std::vector<float> slice_values(const SliceTake& take, int64_t version) {
  std::vector<float> values;
  for (const std::vector<Index>& at : elements_of(Region::full(take.shape))) {
    std::vector<Index> source;
    size_t next = 0;
    for (const Slice& slice : take.slices)
      source.push_back(slice.begin + (slice.dropped ? 0 : slice.step * at[next++]));
    values.push_back(source_value(version, row_major(kSource, source)));
  }
  return values;
}

// The same, as it arrives.
std::vector<float> expected_values(const SliceTake& take, int64_t version, std::optional<Format> asked = {}) {
  const std::optional<Format> wire = take.wire ? take.wire : asked;
  std::vector<float> values = slice_values(take, version);
  if (take.shape.size() < 2 || !wire) return values;
  const Index columns = take.shape.back();
  const Index rows = take.shape[take.shape.size() - 2];
  std::vector<float> quantised;
  for (size_t first = 0; first < values.size(); first += static_cast<size_t>(rows * columns)) {
    const auto begin = values.begin() + static_cast<ptrdiff_t>(first);
    const std::vector<float> matrix = quantised_values(*wire, {begin, begin + rows * columns}, rows, columns);
    quantised.insert(quantised.end(), matrix.begin(), matrix.end());
  }
  return quantised;
}

int send_source(const SliceJobs& jobs, const std::string& store, Rank rank, Barrier& over) {
  mutation() = jobs.mistake;
  Bus bus({.job = "trainer", .rank = rank, .world = jobs.sources, .store = store, .agent = "embedded", .threads = 1});
  Pair pair = bus.pair({.name = "weights", .peer = "inference"});
  const Layout layout = Layout::parse(jobs.layout);
  const auto elements = elements_of(layout.bind(kSource).owned(kSource, rank));
  std::vector<float> local(elements.size() + 1);
  const TensorSpec spec{.name = "qkv", .data = local.data(), .shape = kSource, .layout = layout, .wire = jobs.asked};
  Batch batch = pair.offer("policy", {&spec, 1}, kRendezvousTimeout, {.mode = jobs.mode});
  for (int64_t version = 1; version <= jobs.versions; ++version) {
    for (size_t i = 0; i < elements.size(); ++i) local[i] = source_value(version, row_major(kSource, elements[i]));
    batch.send(version).wait();
  }
  over.pass();
  return 0;
}

int receive_slices(const SliceJobs& jobs, const std::vector<SliceTake>& takes, const std::string& store, Rank rank) {
  Bus bus({.job = "inference",
           .rank = rank,
           .world = jobs.destinations,
           .store = store,
           .agent = "embedded",
           .threads = 1});
  Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
  std::vector<std::vector<std::vector<Index>>> held;
  std::vector<std::vector<float>> local;
  std::vector<TensorSpec> specs;
  for (size_t i = 0; i < takes.size(); ++i) {
    const SliceTake& take = takes[i];
    held.push_back(elements_of(take.layout.bind(take.shape).owned(take.shape, rank)));
    local.emplace_back(held.back().size() + 1);
    specs.push_back({.name = "t" + std::to_string(i),
                     .data = local.back().data(),
                     .shape = take.shape,
                     .layout = take.layout,
                     .strides = {},
                     .source = {.name = "qkv", .slices = take.slices},
                     .wire = take.wire});
  }
  Batch batch = pair.accept("policy", specs, kRendezvousTimeout, {.mode = jobs.mode});
  for (int64_t version = 1; version <= jobs.versions; ++version) {
    version = batch.recv(version).wait();
    for (size_t t = 0; t < takes.size(); ++t) {
      const std::vector<float> expected = expected_values(takes[t], version, jobs.asked);
      for (size_t i = 0; i < held[t].size(); ++i) {
        const float wanted = expected[static_cast<size_t>(row_major(takes[t].shape, held[t][i]))];
        if (local[t][i] == wanted) continue;
        std::fprintf(stderr, "t%zu, [%s], element [%s]: %g, not %g\n", t, to_string(takes[t].slices).c_str(),
                     fmt::format("{}", fmt::join(held[t][i], ", ")).c_str(), static_cast<double>(local[t][i]),
                     static_cast<double>(wanted));
        return kWrong;
      }
    }
  }
  return 0;
}

std::vector<Outcome> transfer_slices(const SliceJobs& jobs, const std::vector<SliceTake>& takes) {
  ProcessGroup group;
  const std::string store = group.start_store();
  Barrier over;
  for (Rank rank = 0; rank < jobs.sources; ++rank)
    group.start("trainer/" + std::to_string(rank), [&, rank] { return send_source(jobs, store, rank, over); });
  for (Rank rank = 0; rank < jobs.destinations; ++rank)
    group.start("inference/" + std::to_string(rank), [&, rank] { return receive_slices(jobs, takes, store, rank); });
  over.open();
  return group.wait(6 * hang_limit());
}

struct SlicedSource {
  const char* name;
  SliceJobs jobs;

  friend void PrintTo(const SlicedSource& source, std::ostream* out) { *out << source.jobs.layout; }
};

class WireSlices : public testing::TestWithParam<SlicedSource> {};

TEST_P(WireSlices, AreQuantisedAsTensorsOfTheirOwn) {
  const SliceJobs& jobs = GetParam().jobs;
  std::mt19937_64 random(61);
  expect_all_well(transfer_slices(jobs, random_takes(random, Layout::parse(jobs.layout), jobs.destinations)));
}

INSTANTIATE_TEST_SUITE_P(, WireSlices,
                         testing::Values(SlicedSource{"Whole", {"1:R", 1}}, SlicedSource{"Experts", {"2:S0", 2}},
                                         SlicedSource{"Rows", {"3:S1", 3}}, SlicedSource{"Columns", {"3:S2", 3}},
                                         SlicedSource{"RowsAndColumns", {"2,2:S1,S2", 4}},
                                         SlicedSource{"Replicas", {"2,2:R,S1", 4}},
                                         SlicedSource{"Staged", {"3:S1", 3, 2, Mode::kStaged}}),
                         [](const auto& source) { return source.param.name; });

constexpr Slice kSecond{.begin = 1, .end = 2, .step = 1, .dropped = true};

// The amaxes of the whole matrix would be wrong, and so would those of each rank's part of the slice.
TEST(WireSlice, HasAmaxesOfItsOwn) {
  const Layout layout = Layout::parse("2:S0");
  const SliceTake take{.slices = {kSecond, {.begin = 8, .end = 36}, {.begin = 0, .end = 40}},
                       .shape = {28, 40},
                       .layout = layout,
                       .wire = Format::kNvfp4};
  const SliceTake whole{.slices = {kSecond, {.begin = 0, .end = 44}, {.begin = 0, .end = 72}},
                        .shape = {44, 72},
                        .layout = layout,
                        .wire = Format::kNvfp4};
  ProcessGroup group;  // the codec reads the environment, and what this process has read its children would keep
  group.start("the values", [&] {
    const std::vector<float> alone = expected_values(take, 1);
    const std::vector<float> among = expected_values(whole, 1);
    Index differ = 0;
    for (Index row = 0; row < 28; ++row)
      for (Index column = 0; column < 40; ++column)
        differ += alone[static_cast<size_t>(row * 40 + column)] != among[static_cast<size_t>((row + 8) * 72 + column)];
    REQUIRE_HERE(differ > 28 * 40 / 2);
    return 0;
  });
  expect_all_well(group.wait(hang_limit()));
  expect_all_well(transfer_slices({"3:S1", 3}, {take, whole}));
  for (const Mutation mistake : {Mutation::kLocalAmax, Mutation::kLocalBlockAmax}) {
    const std::vector<Outcome> outcomes =
        transfer_slices({.layout = "3:S2", .sources = 3, .mistake = mistake, .versions = 1}, {take});
    EXPECT_TRUE(std::ranges::any_of(outcomes, [](const Outcome& outcome) { return outcome.status == kWrong; }));
  }
}

// The sender's format applies to all that is taken of the source; a vector cannot be quantised.
TEST(WireSlice, TakesTheFormatThatTheSenderAsksFor) {
  const Slice all{.begin = 0, .end = 72};
  const Layout layout = Layout::parse("1:R");
  SliceTake matrix{.slices = {kSecond, {.begin = 4, .end = 24}, all}, .shape = {20, 72}, .layout = layout, .wire = {}};
  const SliceTake vector{.slices = {kSecond, kSecond, all}, .shape = {72}, .layout = layout, .wire = {}};
  const SliceJobs jobs{.layout = "2:S2", .sources = 2, .destinations = 1, .asked = Format::kFp8Block128x128};
  expect_all_well(transfer_slices(jobs, {matrix, vector}));
  matrix.wire = Format::kMxfp8;
  for (const Outcome& outcome : transfer_slices(jobs, {matrix, vector})) {
    EXPECT_EQ(outcome.status, kMismatch) << outcome.name << ": " << outcome.output;
    EXPECT_THAT(outcome.output,
                HasSubstr("tensor t0: trainer asks for wire format fp8_block_128x128, inference for mxfp8"));
  }
}

}  // namespace
}  // namespace tessera::test
