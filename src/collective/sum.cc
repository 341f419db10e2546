// Sums of replicated tensors: all ranks say where their gradients lie, each reads all of them, and all say when they
// have.
#include <algorithm>

#include "base/fail.h"
#include "codec/simd/fold.h"
#include "collective/group_impl.h"
#include "collective/movement/fold_rows.h"

namespace tessera::collective {
namespace {

constexpr uint32_t kMaxSumName = 512;
constexpr uint32_t kMaxSums = 1 << 20;

// What a rank says of a part.
struct SumOffer {
  std::string name{};
  DType gradient_dtype = DType::kF32;
  int64_t elements = 0;
  float scale = 1;
  bool has_gradient = false;
  MemoryRef memory{};
  static void fields(auto& f, auto& self) {
    f("name", self.name, kMaxSumName);
    f("dtype", self.gradient_dtype, kLastDType);
    f("elements", self.elements);
    f("scale", self.scale);
    f("has_gradient", self.has_gradient);
    f("arena", self.memory.arena);
    f("offset", self.memory.offset);
    f("bytes", self.memory.bytes);
  }
  bool matches(const SumOffer& other) const {
    return name == other.name && gradient_dtype == other.gradient_dtype && elements == other.elements &&
           scale == other.scale;
  }
};

struct SumOffers {
  std::vector<SumOffer> parts{};
  static void fields(auto& f, auto& self) { f("parts", self.parts, kMaxSums); }
};

void check_sum(const SumPart& part) {
  if (!foldable(part.gradient_dtype) || !foldable(part.accumulated_dtype) || part.elements < 0)
    tessera::fail(ErrorCode::kInvalidArgument,
                  "sum of {}: {} elements of {} into {}: gradients are f32, f16 or bf16"_message, part.name,
                  part.elements, to_string(part.gradient_dtype), to_string(part.accumulated_dtype));
  const auto* const gradient = static_cast<const std::byte*>(part.gradient);
  const auto* const accumulated = static_cast<const std::byte*>(part.accumulated);
  if (gradient != nullptr && accumulated != nullptr &&
      gradient < accumulated + bytes_of(part.accumulated_dtype, part.elements) &&
      accumulated < gradient + bytes_of(part.gradient_dtype, part.elements))
    tessera::fail(ErrorCode::kInvalidArgument,
                  "sum of {}: the gradient and what is accumulated overlap: peers read one while the other is "
                  "written"_message,
                  part.name);
}

SumOffers offers_of(const Group& group, std::span<const SumPart> parts) {
  SumOffers offers;
  for (const SumPart& part : parts) {
    check_sum(part);
    SumOffer& offer = offers.parts.emplace_back();
    offer.name = part.name.substr(0, kMaxSumName);
    offer.gradient_dtype = part.gradient_dtype;
    offer.elements = part.elements;
    offer.scale = part.scale;
    offer.has_gradient = part.gradient != nullptr && part.elements > 0;
    if (offer.has_gradient)
      offer.memory = group.refer(part.gradient, static_cast<size_t>(bytes_of(part.gradient_dtype, part.elements)));
  }
  return offers;
}

}  // namespace

std::vector<int> Group::sum_exchange(std::span<const SumPart> parts) {
  impl_->require_usable();
  const SumOffers own = offers_of(*this, parts);
  const std::vector<std::byte> blob = message_bytes(own);
  std::vector<std::vector<std::byte>> blobs(static_cast<size_t>(size()));
  const std::string_view what = parts.empty() ? std::string_view("nothing") : parts.front().name;
  impl_->call({.kind = CallKind::kSum, .what = what, .bytes = blob, .most_bytes = kMaxBlobBytes},
              [&](int from, uint64_t, std::span<const std::byte> bytes) {
                auto& all = blobs[static_cast<size_t>(from)];
                all.insert(all.end(), bytes.begin(), bytes.end());
              });
  std::vector<std::vector<const std::byte*>> terms(parts.size());
  for (int from = 0; from < size(); ++from) {
    SumOffers theirs;
    try {
      theirs = read_message<SumOffers>(blobs[static_cast<size_t>(from)], "sum");
    } catch (const Error& error) {
      impl_->fail_for(from, {error.code(), error.what()});
    }
    if (theirs.parts.size() != parts.size())
      impl_->fail_for(from, failed(ErrorCode::kMismatch, "it sums {} tensors, {} sums {}"_message, theirs.parts.size(),
                                   describe(rank()), parts.size()));
    for (size_t i = 0; i < parts.size(); ++i) {
      const SumOffer& offer = theirs.parts[i];
      const auto bytes = static_cast<uint64_t>(bytes_of(parts[i].gradient_dtype, parts[i].elements));
      if (!offer.matches(own.parts[i]) || (offer.has_gradient && offer.memory.bytes != bytes))
        impl_->fail_for(
            from, failed(ErrorCode::kMismatch, "it sums {} elements of {} of '{}', {} sums {} of {} of '{}'"_message,
                         offer.elements, to_string(offer.gradient_dtype), offer.name, describe(rank()),
                         parts[i].elements, to_string(parts[i].gradient_dtype), parts[i].name));
      if (offer.has_gradient) terms[i].push_back(map(from, offer.memory));
    }
  }
  std::vector<int> contributors;
  for (size_t i = 0; i < parts.size(); ++i) {
    const SumPart& part = parts[i];
    contributors.push_back(static_cast<int>(terms[i].size()));
    if (part.accumulated == nullptr) continue;
    fold_rows({.accumulated = part.accumulated,
               .accumulated_dtype = part.accumulated_dtype,
               .gradient_dtype = part.gradient_dtype,
               .scale = part.scale,
               .first = part.first,
               .elements = part.elements},
              terms[i]);
  }
  impl_->call({.kind = CallKind::kSumDone, .what = what, .equal_sizes = true}, [](int, uint64_t, auto) {});
  return contributors;
}

}  // namespace tessera::collective
