#include "collective/movement/fold.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <list>
#include <random>
#include <tuple>

#include "codec/float/float_bits.h"
#include "codec/float/float_oracle.h"
#include "collective/group_testing.h"
#include "tessera/memory.h"

namespace tessera::collective {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Long-hand arithmetic, independent of the codec's: values by table, one rounded operation after another.
double value_of(DType dtype, const std::byte* at) {
  if (dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  uint16_t code = 0;
  std::memcpy(&code, at, sizeof(code));
  return (dtype == DType::kF16 ? f16_oracle() : bf16_oracle()).decode(code);
}
void put_value(DType dtype, float value, std::byte* at) {
  if (dtype == DType::kF32) {
    const uint32_t bits = std::isnan(value) ? kNaNF32 : std::bit_cast<uint32_t>(value);
    std::memcpy(at, &bits, sizeof(bits));
    return;
  }
  const auto code = static_cast<uint16_t>((dtype == DType::kF16 ? f16_oracle() : bf16_oracle()).encode(value));
  std::memcpy(at, &code, sizeof(code));
}
float fold_one(float acc, bool empty, float gradient, float scale) {
  const volatile float term = gradient * scale;
  if (empty) return term;
  const volatile float sum = acc + term;
  return sum;
}

// Any bits: zeros, subnormals, infinities and NaNs are frequent.
std::vector<std::byte> draw(DType dtype, int64_t elements, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(static_cast<size_t>(bytes_of(dtype, elements)));
  const auto width = static_cast<size_t>(bytes_of(dtype, 1));
  for (size_t at = 0; at < bytes.size(); at += width) {
    const uint64_t drawn = random();
    const float ordinary = static_cast<float>(static_cast<int>(drawn % 2001) - 1000) / 256;
    const float subnormal = std::bit_cast<float>(static_cast<uint32_t>(drawn >> 8) & 0x807FFFFF);
    const uint32_t any = static_cast<uint32_t>(drawn >> 16);
    switch (drawn % 7) {
      case 0:
        put_value(dtype, subnormal, &bytes[at]);
        break;
      case 1:
        std::memcpy(&bytes[at], &any, width);
        break;
      case 2:
        put_value(dtype, -0.0F, &bytes[at]);
        break;
      default:
        put_value(dtype, ordinary, &bytes[at]);
    }
  }
  return bytes;
}

struct FoldCase {
  DType gradient = DType::kF32;
  DType accumulated = DType::kF32;
  float scale = 1;
  bool first = false;
  int64_t rows = 13;
  int64_t columns = 29;

  std::string text() const {
    return fmt::format("{} into {} times {}{} [{}, {}]", to_string(gradient), to_string(accumulated), scale,
                       first ? ", first" : "", rows, columns);
  }
};

std::vector<FoldCase> fold_cases() {
  std::vector<FoldCase> cases;
  for (const DType gradient : {DType::kF32, DType::kBF16, DType::kF16})
    for (const DType accumulated : {DType::kF32, DType::kBF16, DType::kF16})
      for (const float scale : {1.0F, 0.25F, 1.0F / 3})
        for (const bool first : {false, true})
          cases.push_back({.gradient = gradient, .accumulated = accumulated, .scale = scale, .first = first});
  cases.push_back({.rows = 300, .columns = 67});  // of several blocks
  cases.push_back({.rows = 1, .columns = 5});     // most ranks have no row
  cases.push_back({.rows = 3, .columns = 0});
  return cases;
}

std::pair<int64_t, int64_t> rows_of_rank(int64_t rows, int rank, int ranks) {
  const int64_t share = (rows + ranks - 1) / ranks;
  const int64_t begin = std::min(rank * share, rows);
  return {begin, std::min(begin + share, rows) - begin};
}

// Whether a rank has a gradient of a round: rank 1 leaves the last round of each interval out, rank 2 the whole of odd
// intervals, and in interval 2 nobody has any.
bool has_gradient(int rank, uint64_t interval, uint64_t round) {
  constexpr uint64_t kRounds = 3;
  if (interval == 2) return false;
  if (rank == 1 && round == kRounds - 1) return false;
  return rank != 2 || interval % 2 == 0;
}

constexpr uint64_t kRounds = 3;

std::vector<std::byte> gradient_of(const FoldCase& test, uint32_t slot, int rank, uint64_t interval, uint64_t round) {
  return draw(test.gradient, test.rows * test.columns,
              ((slot * 8 + static_cast<uint64_t>(rank)) * 8 + interval) * 8 + round);
}

// One rank's rows of one weight in one interval: what is folded, and what the folds must give.
class FoldedRows {
 public:
  FoldedRows(const FoldCase& test, uint32_t slot, uint64_t interval, int rank, int ranks)
      : test_(test), slot_(slot), interval_(interval) {
    std::tie(begin_, rows_) = rows_of_rank(test.rows, rank, ranks);
    accumulated_ = draw(test.accumulated, rows_ * test.columns, slot + interval);
    expected_ = accumulated_;
    for (uint64_t round = 0; round < kRounds; ++round) add_round(round, ranks);
  }

  FoldPart part(uint64_t round) {
    return {.slot = slot_,
            .interval = interval_,
            .round = round,
            .begin_row = begin_,
            .rows = rows_,
            .total_rows = test_.rows,
            .columns = test_.columns,
            .gradient_dtype = test_.gradient,
            .accumulated = accumulated_.data(),
            .accumulated_dtype = test_.accumulated,
            .first = test_.first && round == 0,
            .scale = test_.scale,
            .contributors = &contributors_[round],
            .weight = "w"};
  }
  void expect() const {
    ASSERT_EQ(accumulated_, expected_) << test_.text() << " interval " << interval_;
    if (rows_ > 0) {
      EXPECT_EQ(contributors_, expected_contributors_);
    }
  }

 private:
  void add_round(uint64_t round, int ranks) {
    const int64_t elements = rows_ * test_.columns;
    const int64_t width = bytes_of(test_.accumulated, 1);
    std::vector<float> acc;
    for (int64_t i = 0; i < elements; ++i)
      acc.push_back(static_cast<float>(value_of(test_.accumulated, expected_.data() + i * width)));
    bool empty = test_.first && round == 0;
    int terms = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      if (!has_gradient(rank, interval_, round)) continue;
      const auto gradient = gradient_of(test_, slot_, rank, interval_, round);
      for (int64_t i = 0; i < elements; ++i) {
        const std::byte* const at = gradient.data() + bytes_of(test_.gradient, begin_ * test_.columns + i);
        float& sum = acc[static_cast<size_t>(i)];
        sum = fold_one(sum, empty, static_cast<float>(value_of(test_.gradient, at)), test_.scale);
      }
      empty = false;
      ++terms;
    }
    expected_contributors_[round] = terms;
    for (int64_t i = 0; i < elements && terms > 0; ++i)
      put_value(test_.accumulated, acc[static_cast<size_t>(i)], expected_.data() + i * width);
  }

  const FoldCase test_;
  const uint32_t slot_;
  const uint64_t interval_;
  int64_t begin_ = 0;
  int64_t rows_ = 0;
  std::vector<std::byte> accumulated_;
  std::vector<std::byte> expected_;
  std::array<int, kRounds> contributors_{};
  std::array<int, kRounds> expected_contributors_{};
};

// Shows and produces this rank's gradients of an interval.
void produce(Group& group, const FoldCase& test, uint32_t slot, uint64_t interval, std::vector<SharedBuffer>& memory) {
  for (uint64_t round = 0; round < kRounds && has_gradient(group.rank(), interval, round); ++round) {
    const auto gradient = gradient_of(test, slot, group.rank(), interval, round);
    SharedBuffer& buffer = memory.emplace_back(SharedHeap::process().allocate(gradient.size() + 1));
    std::copy(gradient.begin(), gradient.end(), buffer.data());
    const MemoryRef place = group.refer(buffer.data(), gradient.size());
    group.set_gradient(slot, interval, round, {.memory = place, .dtype = test.gradient});
    group.set(Word::kProduced, slot, round_word(interval, round + 1));
  }
}

void fold_intervals(Group& group, const std::vector<FoldCase>& cases, uint64_t intervals) {
  const auto stream = group.device().make_stream({.name = "fold"});
  for (uint64_t interval = 0; interval < intervals; ++interval) {
    std::list<FoldedRows> folded;
    for (uint32_t slot = 0; slot < cases.size(); ++slot) {
      FoldedRows& rows = folded.emplace_back(cases[slot], slot, interval, group.rank(), group.size());
      for (uint64_t round = 0; round < kRounds; ++round) {
        const FoldPart part = rows.part(round);
        fold(group, *stream, {&part, 1});  // it waits for the gradients
      }
    }
    std::vector<SharedBuffer> memory;
    for (uint32_t slot = 0; slot < cases.size(); ++slot) produce(group, cases[slot], slot, interval, memory);
    group.set(Word::kClosed, kWholeRank, interval + 1);
    group.device().wait_host(stream->record(), group.deadline());
    for (const FoldedRows& rows : folded) rows.expect();
    for (uint32_t slot = 0; slot < cases.size(); ++slot)
      EXPECT_EQ(group.get(group.rank(), Word::kFolded, slot), round_word(interval, kRounds));
    group.barrier("drained");
  }
}

class Folds : public testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Folds, testing::Combine(testing::Values(1, 2, 3, 4), testing::Bool()),
                         [](const auto& test) {
                           return std::to_string(std::get<0>(test.param)) +
                                  (std::get<1>(test.param) ? "Sockets" : "Threads");
                         });

TEST_P(Folds, EqualALongHandSumBitForBit) {
  const auto [ranks, sockets] = GetParam();
  const std::vector<FoldCase> cases = fold_cases();
  run_ranks_well({.size = ranks, .sockets = sockets, .slots = static_cast<uint32_t>(cases.size())},
                 [&](Group& group) { fold_intervals(group, cases, 3); });
}

// The same on ranks that are simulated, in orders that a seed chooses.
class VirtualFolds : public testing::TestWithParam<uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, VirtualFolds, testing::Range<uint64_t>(0, 8));

TEST_P(VirtualFolds, EqualALongHandSumInAnyOrder) {
  const std::vector<FoldCase> cases{{.rows = 7, .columns = 3},
                                    {.gradient = DType::kBF16, .first = true, .rows = 2, .columns = 2}};
  run_virtual_ranks(3, GetParam(), [&](Group& group) { fold_intervals(group, cases, 3); });
}

TEST(Fold, ListsAreOneOperation) {
  const std::vector<FoldCase> cases(5, FoldCase{.rows = 9, .columns = 4});
  run_ranks_well({.size = 2}, [&](Group& group) {
    std::list<FoldedRows> folded;
    std::array<std::vector<FoldPart>, kRounds> parts;
    for (uint32_t slot = 0; slot < cases.size(); ++slot) {
      FoldedRows& rows = folded.emplace_back(cases[slot], slot, 0, group.rank(), group.size());
      for (uint64_t round = 0; round < kRounds; ++round) parts[round].push_back(rows.part(round));
    }
    const auto stream = group.device().make_stream({.name = "fold"});
    for (const auto& list : parts) fold(group, *stream, list);
    fold(group, *stream, {});
    std::vector<SharedBuffer> memory;
    for (uint32_t slot = 0; slot < cases.size(); ++slot) produce(group, cases[slot], slot, 0, memory);
    group.set(Word::kClosed, kWholeRank, 1);
    stream->synchronize(group.deadline());
    for (const FoldedRows& rows : folded) rows.expect();
    group.barrier("drained");
  });
}

// What one rank shows and says, and the error of the other's fold.
std::string error_of_fold(const std::function<void(Group&, const MemoryRef&)>& shown) {
  std::string error;
  run_ranks_well({.size = 2}, [&](Group& group) {
    const SharedBuffer memory = SharedHeap::process().allocate(64);
    if (group.rank() == 1) shown(group, group.refer(memory.data(), 64));
    group.barrier("shown");
    if (group.rank() == 0) {
      std::vector<float> accumulated(8);
      const FoldPart part{.interval = 1,
                          .round = 0,
                          .rows = 4,
                          .total_rows = 8,
                          .columns = 2,
                          .accumulated = accumulated.data(),
                          .weight = "wte.weight"};
      group.set(Word::kClosed, kWholeRank, 2);
      const auto stream = group.device().make_stream({.name = "fold"});
      fold(group, *stream, {&part, 1});
      error = error_of([&] { stream->synchronize(group.deadline()); });
    }
    group.barrier("read");
  });
  return error;
}

TEST(Fold, RefusesWhatIsNotTheGradient) {
  const auto produce_as = [](const ShownGradient& gradient, uint64_t interval, uint64_t shown_interval) {
    return [=](Group& group, const MemoryRef& memory) {
      ShownGradient own = gradient;
      own.memory.offset = memory.offset;
      group.set_gradient(0, shown_interval, 0, own);
      group.set(Word::kProduced, 0, round_word(interval, 1));
    };
  };
  EXPECT_EQ(error_of_fold(produce_as({.memory = {.bytes = 64}}, 1, 1)), "(no error)");
  EXPECT_THAT(error_of_fold(produce_as({.memory = {.bytes = 60}}, 1, 1)),
              AllOf(HasSubstr("rank 1"), HasSubstr("60 bytes of f32"), HasSubstr("expects 64 of f32")));
  EXPECT_THAT(error_of_fold(produce_as({.memory = {.bytes = 64}, .dtype = DType::kBF16}, 1, 1)),
              HasSubstr("64 bytes of bf16"));
  EXPECT_THAT(error_of_fold(produce_as({.memory = {.bytes = 64}}, 1, 0)),
              HasSubstr("does not show gradient 0 of wte.weight any more"));
  EXPECT_THAT(error_of_fold(produce_as({.memory = {.bytes = 64}}, 2, 2)),
              HasSubstr("in interval 2, and rank 0 still folds round 0 of interval 1"));
}

TEST(Fold, ChecksItsParts) {
  run_ranks_well({.size = 1}, [](Group& group) {
    const auto error = [&](const FoldPart& part) {
      return error_of([&] { fold(group, *group.device().caller(), {&part, 1}); });
    };
    EXPECT_THAT(error({.gradient_dtype = DType::kF64, .weight = "w"}), HasSubstr("fold of w: f64 into f32"));
    EXPECT_THAT(error({.begin_row = 3, .rows = 2, .total_rows = 4, .columns = 1, .weight = "w"}),
                HasSubstr("rows [3, +2) of 4"));
    EXPECT_THAT(error_of([&] { fold_operation(group, {}); }), HasSubstr("no part"));
  });
}

// Replicated tensors
// ---------------------------------------------------------------------------------------------------

class Sums : public testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Sums, testing::Combine(testing::Values(1, 2, 4), testing::Bool()),
                         [](const auto& test) {
                           return std::to_string(std::get<0>(test.param)) +
                                  (std::get<1>(test.param) ? "Sockets" : "Threads");
                         });

// Rank 1 has no gradient of odd tensors, nobody has one of the fourth.
TEST_P(Sums, EqualALongHandSumBitForBit) {
  const auto [ranks, sockets] = GetParam();
  const auto has = [](int rank, size_t tensor) { return tensor != 3 && (rank != 1 || tensor % 2 == 0); };
  constexpr int64_t kElements = 10'000;
  run_ranks_well({.size = ranks, .sockets = sockets}, [&, size = ranks](Group& group) {
    const FoldCase cases[] = {{.scale = 0.5F},
                              {.gradient = DType::kBF16},
                              {.first = true},
                              {},
                              {.accumulated = DType::kBF16, .scale = 0.25F}};
    std::vector<SharedBuffer> memory;
    std::vector<std::vector<std::byte>> accumulated;
    std::vector<SumPart> parts;
    for (size_t t = 0; t < std::size(cases); ++t) {
      accumulated.push_back(draw(cases[t].accumulated, kElements, t));
      const auto gradient = draw(cases[t].gradient, kElements, 100 * t + static_cast<uint64_t>(group.rank()));
      SharedBuffer& shown = memory.emplace_back(SharedHeap::process().allocate(gradient.size()));
      std::copy(gradient.begin(), gradient.end(), shown.data());
      parts.push_back({.gradient = has(group.rank(), t) ? shown.data() : nullptr,
                       .gradient_dtype = cases[t].gradient,
                       .accumulated = accumulated[t].data(),
                       .accumulated_dtype = cases[t].accumulated,
                       .elements = kElements,
                       .scale = cases[t].scale,
                       .first = cases[t].first,
                       .name = "norm"});
    }
    const std::vector<int> contributors = group.sum_exchange(parts);
    for (size_t t = 0; t < std::size(cases); ++t) {
      std::vector<std::byte> expected = draw(cases[t].accumulated, kElements, t);
      int terms = 0;
      for (int rank = 0; rank < size; ++rank) terms += has(rank, t) ? 1 : 0;
      std::vector<std::vector<std::byte>> gradients;
      for (int rank = 0; rank < size; ++rank)
        gradients.push_back(draw(cases[t].gradient, kElements, 100 * t + static_cast<uint64_t>(rank)));
      for (int64_t i = 0; i < kElements && terms > 0; ++i) {
        std::byte* const at = expected.data() + bytes_of(cases[t].accumulated, i);
        auto acc = static_cast<float>(value_of(cases[t].accumulated, at));
        bool empty = cases[t].first;
        for (int rank = 0; rank < size; ++rank) {
          if (!has(rank, t)) continue;
          const std::byte* const term = gradients[static_cast<size_t>(rank)].data() + bytes_of(cases[t].gradient, i);
          acc = fold_one(acc, empty, static_cast<float>(value_of(cases[t].gradient, term)), cases[t].scale);
          empty = false;
        }
        put_value(cases[t].accumulated, acc, at);
      }
      EXPECT_EQ(contributors[t], terms);
      EXPECT_EQ(accumulated[t], expected) << "tensor " << t;
    }
  });
}

TEST(Sum, TensorsMustMatch) {
  const auto statuses = run_ranks({.size = 2}, [](Group& group) {
    float accumulated[4] = {};
    const SumPart part{.accumulated = accumulated, .elements = group.rank() == 0 ? 4 : 3, .name = "norm.bias"};
    group.sum_exchange({&part, 1});
  });
  EXPECT_THAT(statuses,
              testing::Each(testing::Property(
                  &Status::message, AllOf(HasSubstr("norm.bias"), HasSubstr("sums 3"), HasSubstr("sums 4")))));
}

TEST(Sum, RefusesMemoryThatOverlaps) {
  run_ranks_well({.size = 1}, [](Group& group) {
    float memory[8] = {};
    SumPart part{.gradient = memory, .accumulated = memory + 3, .elements = 4, .name = "norm.bias"};
    EXPECT_THAT(error_of([&] { group.sum_exchange({&part, 1}); }), HasSubstr("overlap"));
    part.accumulated = memory + 4;
    EXPECT_EQ(group.sum_exchange({&part, 1}), std::vector<int>{1});
    part.gradient_dtype = DType::kI32;
    EXPECT_THAT(error_of([&] { group.sum_exchange({&part, 1}); }), HasSubstr("sum of norm.bias"));
  });
}

}  // namespace
}  // namespace tessera::collective
