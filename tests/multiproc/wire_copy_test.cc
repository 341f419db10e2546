// Senders that have a quantised copy beside their elements, as ETP publishes: it is sent instead of quantising, and
// what arrives is the same, bit for bit. They count what they quantise.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/metrics.h"
#include "tests/support/brute_values.h"
#include "tests/support/fixture.h"
#include "tests/support/wire_jobs.h"

namespace tessera::test {
namespace {

constexpr Index kExperts = 2, kRows = 256, kColumns = 96;
constexpr int kQuantised = 4;  // exit status of a sender that has quantised what it should not have, or the reverse

constexpr Format kFormats[] = {Format::kFp8E4M3, Format::kFp8Block1x128, Format::kMxfp8, Format::kFp8Block128x128,
                               Format::kNvfp4};

struct CopyJobs {
  const char* layout = "2:S1";
  int sources = 2;
  bool fits = true;  // no edge of the layout is inside a block
  Asks asks = Asks::kBoth;
  Mode mode = Mode::kInPlace;
  Mutation mistake = Mutation::kNone;  // of the senders
};

std::vector<float> whole_tensor(int64_t version) {
  std::vector<float> values;
  for (Index i = 0; i < kExperts * kRows * kColumns; ++i) {
    const uint64_t hash = mix(static_cast<uint64_t>(version * 1'000'003 + i));
    values.push_back(std::ldexp(static_cast<float>(hash % 2047) - 1023, static_cast<int>(i % 97 / 9)));
  }
  return values;
}

// Bytes of both planes of some matrices, each in one block.
class Blocks {
 public:
  Blocks(Format format, Index rows) : format_(format), rows_(rows) {
    layout_ = quantized_layout({.format = format}, kPlanes, 1, rows, kColumns);
    for (std::vector<std::byte>& block : blocks_) block.resize(static_cast<size_t>(layout_.bytes));
  }

  // `values`: [experts][rows][columns]; the amaxes are those of the whole tensor.
  void fill(const std::vector<float>& values, const std::vector<float>& whole) {
    for (size_t e = 0; e < blocks_.size(); ++e) {
      const MatrixView all{whole.data() + e * kRows * kColumns, DType::kF32, kRows, kColumns, kColumns};
      const float amax = compute_amax({&all, 1})[0].value;
      const auto plane = [&](const QuantizedLayout::Place& place) {
        if (needs_amax(format_)) std::memcpy(blocks_[e].data() + place.amaxes, &amax, sizeof(amax));
        return PlaneMemory{blocks_[e].data() + place.codes, place.shape.code_row_bytes(),
                           blocks_[e].data() + place.scales, place.shape.scale_row_bytes()};
      };
      quantize({values.data() + static_cast<Index>(e) * rows_ * kColumns, DType::kF32, rows_, kColumns, kColumns},
               {.format = format_}, {amax, amax}, {plane(*layout_.row), plane(*layout_.column)});
    }
  }
  std::vector<const std::byte*> matrices() const { return {blocks_[0].data(), blocks_[1].data()}; }
  const std::vector<std::byte>& block(size_t expert) const { return blocks_[expert]; }

  static constexpr PlaneSet kPlanes{.row = true, .column = true};

 private:
  Format format_;
  Index rows_;
  QuantizedLayout layout_;
  std::vector<std::vector<std::byte>> blocks_{kExperts};
};

// One tensor of a sending rank.
struct Sent {
  std::vector<float> values;
  Blocks blocks;
  std::shared_ptr<std::atomic<bool>> current = std::make_shared<std::atomic<bool>>(false);
  Interval rows;

  Sent(Format format, const Interval& of) : blocks(format, of.size()), rows(of) {
    values.resize(static_cast<size_t>(kExperts * rows.size() * kColumns));
  }
  // With a copy of it, or without: then the copy stays what it was.
  void fill(int64_t version, bool copy) {
    const std::vector<float> whole = whole_tensor(version);
    for (Index e = 0; e < kExperts; ++e)
      std::copy_n(whole.begin() + (e * kRows + rows.begin) * kColumns, rows.size() * kColumns,
                  values.begin() + e * rows.size() * kColumns);
    if (copy) blocks.fill(values, whole);
    *current = copy;
  }
  TensorSpec spec(const CopyJobs& jobs, Format format) {
    TensorSpec spec{.name = std::string(to_string(format)),
                    .data = values.data(),
                    .shape = {kExperts, kRows, kColumns},
                    .layout = Layout::parse(jobs.layout)};
    if (jobs.asks != Asks::kReceiver) spec.wire = format;
    spec.quantized = std::make_shared<QuantizedCopy>(QuantizedCopy{
        .format = format, .planes = Blocks::kPlanes, .matrices = blocks.matrices(), .current = [flag = current] {
          return flag->load();
        }});
    return spec;
  }
};

constexpr int64_t kVersions = 3;

bool has_copy(int64_t version) {
  return version != 2;
}

int send_copies(const CopyJobs& jobs, const std::string& store, Rank rank, Barrier& all) {
  Bus bus({.job = "trainer", .rank = rank, .world = jobs.sources, .store = store, .threads = 1});
  Pair pair = bus.pair({.name = "weights", .peer = "inference"});
  const Shape shape{kExperts, kRows, kColumns};
  const Region owned = Layout::parse(jobs.layout).bind(shape).owned(shape, rank);
  std::map<Format, Sent> sent;
  std::vector<TensorSpec> specs;
  for (const Format format : kFormats)
    specs.push_back(
        sent.try_emplace(format, format, owned.dim(1).intervals().front()).first->second.spec(jobs, format));
  std::optional<Batch> batch;
  return until_all_know(all, [&] {
    batch = pair.offer("policy", specs, kRendezvousTimeout, {.mode = jobs.mode});
    const Metrics& metrics = Metrics::process();
    for (int64_t version = 1; version <= kVersions; ++version) {
      for (auto& [format, tensor] : sent) tensor.fill(version, has_copy(version));
      const uint64_t before = metrics.quantized_source_bytes.value();
      const uint64_t copied = metrics.encoded_bytes.value();
      batch->send(version).wait();
      batch->wait_peers(1, version);
      const bool quantises = metrics.quantized_source_bytes.value() != before;
      const bool copies = metrics.encoded_bytes.value() != copied;
      // Some formats have no blocks that the layout could cut.
      const bool well = has_copy(version) ? (jobs.fits ? !quantises : true) && copies : quantises && !copies;
      if (!well) return kQuantised;
    }
    return 0;
  });
}

// Both as floats and as planes.
int receive_copies(const CopyJobs& jobs, const std::string& store, Barrier& all) {
  Bus bus({.job = "inference", .store = store, .threads = 1});
  Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
  struct Taken {
    std::vector<float> values = std::vector<float>(static_cast<size_t>(kExperts * kRows * kColumns));
    std::vector<std::byte> planes;
  };
  std::map<Format, Taken> taken;
  std::vector<TensorSpec> specs;
  const auto layout_of = [](Format format) {
    return quantized_layout({.format = format}, Blocks::kPlanes, kExperts, kRows, kColumns);
  };
  for (const Format format : kFormats) {
    Taken& into = taken[format];
    into.planes.resize(static_cast<size_t>(layout_of(format).bytes));
    TensorSpec floats{
        .name = std::string(to_string(format)), .data = into.values.data(), .shape = {kExperts, kRows, kColumns}};
    if (jobs.asks != Asks::kSender) floats.wire = format;
    TensorSpec planes = floats;
    planes.name += " planes";
    planes.data = into.planes.data();
    planes.source.name = floats.name;
    planes.wire = format;
    planes.planes = Blocks::kPlanes;
    specs.push_back(std::move(floats));
    specs.push_back(std::move(planes));
  }
  std::optional<Batch> batch;
  return until_all_know(all, [&] {
    batch = pair.accept("policy", specs);
    for (int64_t version = 1; version <= kVersions; ++version) {
      if (batch->recv(version).wait() != version) return 2;
      const std::vector<float> whole = whole_tensor(version);
      for (const Format format : kFormats) {
        Blocks expected(format, kRows);
        expected.fill(whole, whole);
        const QuantizedLayout one = quantized_layout({.format = format}, Blocks::kPlanes, 1, kRows, kColumns);
        const QuantizedLayout both = layout_of(format);
        const auto same = [&](int64_t got, int64_t from, int64_t bytes, size_t expert) {
          return std::memcmp(taken[format].planes.data() + got + static_cast<int64_t>(expert) * bytes,
                             expected.block(expert).data() + from, static_cast<size_t>(bytes)) == 0;
        };
        for (size_t e = 0; e < kExperts; ++e) {
          bool equal = true;
          for (const auto& [got, from] : {std::pair(*both.row, *one.row), std::pair(*both.column, *one.column)})
            equal = equal && same(got.codes, from.codes, from.shape.code_bytes(), e) &&
                    same(got.scales, from.scales, from.shape.scale_bytes(), e) &&
                    (!needs_amax(format) || same(got.amaxes, from.amaxes, sizeof(float), e));
          const auto first = static_cast<ptrdiff_t>(e) * kRows * kColumns;
          const std::vector<float> values = quantised_values(
              format, {whole.begin() + first, whole.begin() + first + kRows * kColumns}, kRows, kColumns);
          equal = equal && std::equal(values.begin(), values.end(), taken[format].values.begin() + first);
          if (equal) continue;
          std::fprintf(stderr, "version %ld: %s of expert %zu\n", static_cast<long>(version),
                       std::string(to_string(format)).c_str(), e);
          return kWrong;
        }
      }
    }
    return 0;
  });
}

std::vector<Outcome> transfer_copies(const CopyJobs& jobs) {
  TestJobs group;
  Barrier all;
  for (Rank rank = 0; rank < jobs.sources; ++rank)
    group.start("trainer/" + std::to_string(rank), [&, rank] {
      mutation() = jobs.mistake;
      return send_copies(jobs, group.store(), rank, all);
    });
  group.start("inference/0", [&] { return receive_copies(jobs, group.store(), all); });
  all.open();
  return group.wait(3 * hang_limit());
}

bool any_status(const std::vector<Outcome>& outcomes, int status) {
  return std::ranges::any_of(outcomes, [&](const Outcome& outcome) { return outcome.status == status; });
}

TEST(WireCopies, AreSentInsteadOfQuantisingWhileTheyAreCurrent) {
  for (const Asks asks : {Asks::kSender, Asks::kReceiver, Asks::kBoth})
    expect_all_well(transfer_copies({.asks = asks}));
}

TEST(WireCopies, OfRaggedRowsAndOfReplicas) {
  expect_all_well(transfer_copies({.layout = "2:G1[0;128;256]"}));
  expect_all_well(transfer_copies({.layout = "2:R"}));
}

TEST(WireCopies, StagedAreCopiedWithTheirElements) {
  expect_all_well(transfer_copies({.asks = Asks::kBoth, .mode = Mode::kStaged}));
}

TEST(WireCopies, AreLeftOutWhereAnEdgeIsInsideABlock) {
  expect_all_well(transfer_copies({.layout = "2:G1[0;40;256]", .fits = false}));
  expect_all_well(transfer_copies({.layout = "3:S1", .sources = 3, .fits = false, .mode = Mode::kStaged}));
}

TEST(WireCopyMistakes, ACopyThatIsNotCurrentIsFoundOut) {
  EXPECT_TRUE(any_status(transfer_copies({.mistake = Mutation::kStaleCopy}), kWrong));
}

TEST(WireCopyMistakes, QuantisingAgainIsFoundOut) {
  EXPECT_TRUE(any_status(transfer_copies({.mistake = Mutation::kCopyIgnored}), kQuantised));
}

}  // namespace
}  // namespace tessera::test
