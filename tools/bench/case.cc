#include "tools/bench/case.h"

#include <fmt/format.h>

#include <array>
#include <set>
#include <utility>

namespace tessera::bench {
namespace {

struct Change {
  std::string_view name;
  std::string_view src;
  std::string_view dst;
  bool contiguous;  // whole rows are transferred
};
constexpr std::array kChanges{
    Change{"rows-to-rows", "4:S0", "2:S0", true},
    Change{"rows-to-columns", "4:S0", "2:S1", false},
    Change{"replicated-rows-to-columns", "2,2:R,S0", "2:S1", false},
    Change{"rows-to-replicas", "4:S0", "2:R", true},
    Change{"columns-to-rows", "4:S1", "2:S0", false},
};
constexpr std::array<Index, 2> kWidths{8192, 1024};
constexpr std::array kMemories{Memory::kShared, Memory::kPrivate};
constexpr std::array<DigestMode, 3> kDigests{DigestMode::kOff, DigestMode::kSampled, DigestMode::kFull};

// Many small tensors: how many, and the seconds in which they should be registered, which are proportional to that.
struct Many {
  int tensors;
  double register_seconds;
};
constexpr Many kMany{10'000, 0.3}, kTenTimesAsMany{100'000, 3};
constexpr Index kSmallRows = 32, kSmallColumns = 64;  // 4 KiB of bf16
constexpr double kSmallTarget = 0.3;
constexpr double kSampledTarget = 1 / 1.1;  // of the rate without a digest
constexpr double kModelTarget = 0.35;
constexpr char kModel[] = "MiniLM/shared/f32-bf16";
constexpr double kStagedTarget = 0.45;

// Pieces are whole blocks of rows; otherwise they have 8 KiB (4 KiB from columns) at a width of 8,192, and 1 KiB (512
// B) at 1,024. With the digest the source reads everything once more; private memory has targets only without it. A
// case with sampled digests is compared with the case without digests.
std::optional<double> target_of(const Change& change, Index width, Memory memory, DigestMode digest) {
  if (digest == DigestMode::kSampled) return kSampledTarget;
  const bool full = digest == DigestMode::kFull;
  const bool wide = width == kWidths[0];
  if (memory == Memory::kShared) return full ? (wide ? 0.45 : 0.35) : (wide ? 0.8 : 0.6);
  if (full) return std::nullopt;
  return change.contiguous ? 0.85 : wide ? 0.5 : 0.4;
}

const char* suffix_of(DigestMode digest) {
  if (digest == DigestMode::kSampled) return "/sampled";
  return digest == DigestMode::kFull ? "/digest" : "";
}

std::string name_of(std::string_view what, Memory memory, DigestMode digest) {
  return fmt::format("{}/{}{}", what, to_string(memory), suffix_of(digest));
}

std::string large_name(const Change& change, Index width, Memory memory, DigestMode digest) {
  return name_of(fmt::format("{}/{}", change.name, width), memory, digest);
}

Case large_case(const Change& change, Index width, int64_t bytes, Memory memory, DigestMode digest) {
  return {.name = large_name(change, width, memory, digest),
          .groups = {{.src = std::string(change.src),
                      .dst = std::string(change.dst),
                      .shape = {bytes / (2 * width), width}}},
          .memory = memory,
          .digest = digest,
          .beside_plain = digest == DigestMode::kSampled,
          .target = target_of(change, width, memory, digest),
          .quick = change.name == "rows-to-rows" ? width == kWidths[0]
                                                 : change.name == "rows-to-columns" && digest == DigestMode::kOff};
}

struct Cast {
  DType from;
  DType to;
};
constexpr std::array kCasts{Cast{DType::kF32, DType::kBF16}, Cast{DType::kBF16, DType::kF32}};

Case cast_case(const Change& change, Index width, int64_t bytes, Memory memory, const Cast& cast) {
  Case c = large_case(change, width, bytes, memory, DigestMode::kOff);
  c.name += fmt::format("/{}-{}", to_string(cast.from), to_string(cast.to));
  TensorGroup& group = c.groups.front();
  group.shape[0] = bytes * 8 / (bits_of(cast.from) * width);
  group.src_dtype = cast.from;
  group.dst_dtype = cast.to;
  c.target.reset();
  c.quick = change.name == "rows-to-columns" && width == kWidths[0];
  return c;
}

Case small_case(const Many& many, Memory memory, DigestMode digest) {
  const Change& rows = kChanges[0];
  const std::string what = fmt::format("{}x4KiB", many.tensors);
  const bool sampled = digest == DigestMode::kSampled;
  return {.name = name_of(what, memory, digest),
          .groups = {{.src = std::string(rows.src),
                      .dst = std::string(rows.dst),
                      .shape = {kSmallRows, kSmallColumns},
                      .tensors = many.tensors}},
          .memory = memory,
          .digest = digest,
          .baseline = sampled ? "" : large_name(rows, kWidths[0], memory, digest),
          .beside_plain = sampled,
          .target = sampled ? kSampledTarget : kSmallTarget,
          .register_target_s = many.register_seconds,
          .quick = digest == DigestMode::kOff && many.tensors == kMany.tensors};
}

// Staged on both sides, so with a copy on each: rows to rows, from shared memory.
Case staged_case(Index width, int64_t bytes, DigestMode digest) {
  Case c = large_case(kChanges[0], width, bytes, Memory::kShared, digest);
  c.name += "/staged";
  c.staged = true;
  c.beside_plain = false;
  c.target = kStagedTarget;
  return c;
}

// all-MiniLM-L6-v2 as scripts/demo.sh moves it: 104 tensors, namely 90 MB of f32 and one vector of i64, from
// dp=2,fsdp=2 to tp=2 in bf16.
Case model_case(DigestMode digest) {
  const bool sampled = digest == DigestMode::kSampled;
  constexpr Index kHidden = 384, kInner = 1536, kWords = 30522, kPlaces = 512;
  constexpr int kLayers = 6;
  const auto group = [](int tensors, Shape shape, const char* dst) {
    return TensorGroup{.src = "2,2:R,S0",
                       .dst = dst,
                       .shape = std::move(shape),
                       .tensors = tensors,
                       .src_dtype = DType::kF32,
                       .dst_dtype = DType::kBF16};
  };
  TensorGroup positions = group(1, {1, kPlaces}, "2:R");
  positions.src_dtype = positions.dst_dtype = DType::kI64;
  return {
      .name = std::string(kModel) + suffix_of(digest),
      .groups = {positions, group(1, {kWords, kHidden}, "2:S0"), group(1, {kPlaces, kHidden}, "2:R"),
                 group(1, {2, kHidden}, "2:R"), group(3 * kLayers, {kHidden, kHidden}, "2:S0"),  // query, key, value
                 group(3 * kLayers, {kHidden}, "2:S0"),
                 group(kLayers, {kHidden, kHidden}, "2:S1"),  // the attention's output
                 group(kLayers, {kInner, kHidden}, "2:S0"), group(kLayers, {kInner}, "2:S0"),
                 group(kLayers, {kHidden, kInner}, "2:S1"), group(1, {kHidden, kHidden}, "2:R"),  // the pooler
                 group(6 * kLayers + 3, {kHidden}, "2:R")},                                       // norms and biases
      .memory = Memory::kShared,
      .digest = digest,
      .beside_plain = sampled,
      .target = sampled ? kSampledTarget : kModelTarget,
      .quick = digest == DigestMode::kFull};
}

}  // namespace

std::string_view to_string(Memory memory) {
  return memory == Memory::kShared ? "shared" : "private";
}

std::string_view to_string(Victim victim) {
  return victim == Victim::kSource ? "killed-source" : "killed-destination";
}

std::vector<Case> all_cases(int64_t bytes) {
  std::vector<Case> cases;
  for (const Memory memory : kMemories) {
    for (const Index width : kWidths)
      for (const Change& change : kChanges)
        for (const DigestMode digest : kDigests) cases.push_back(large_case(change, width, bytes, memory, digest));
    for (const Cast& cast : kCasts)
      for (const Index width : kWidths)
        for (const Change& change : {kChanges[0], kChanges[1]})
          cases.push_back(cast_case(change, width, bytes, memory, cast));
    for (const DigestMode digest : kDigests) cases.push_back(small_case(kMany, memory, digest));
  }
  for (const DigestMode digest : kDigests) cases.push_back(staged_case(kWidths[0], bytes, digest));
  cases.push_back(small_case(kTenTimesAsMany, Memory::kShared, DigestMode::kOff));
  for (const DigestMode digest : kDigests) cases.push_back(model_case(digest));
  return cases;
}

std::vector<Case> select_cases(std::vector<Case> cases, const std::function<bool(const Case&)>& wanted) {
  std::set<std::string> baselines;
  for (const Case& c : cases)
    if (wanted(c)) baselines.insert(c.baseline);
  for (Case& c : cases) c.only_baseline = !wanted(c);
  std::erase_if(cases, [&](const Case& c) { return c.only_baseline && !baselines.contains(c.name); });
  return cases;
}

}  // namespace tessera::bench
