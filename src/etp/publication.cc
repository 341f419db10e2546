#define XXH_INLINE_ALL
#include "etp/publication.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fail.h"
#include "base/mutation.h"
#include "codec/simd/cast.h"
#include "layout/text_reader.h"

namespace tessera::etp {
namespace {

using collective::Word;

QuantSpec spec_of(const Parameter& p, const RuntimeOptions& options) {
  QuantSpec spec = p.weight.format.spec();
  spec.nonfinite = options.nonfinite;
  return spec;
}

void cast_rows(const MatrixView& from, DType to_dtype, std::byte* to) {
  cast_row(from.dtype, to_dtype)(from.data, to, static_cast<size_t>(from.rows * from.columns));
}

}  // namespace

std::vector<Amax> Publisher::amax(std::span<Parameter* const> weights, const float* noop) const {
  std::vector<MatrixView> views;
  for (const Parameter* p : weights) {
    views.push_back(p->source());
    if (views.back().data == nullptr) views.back().rows = 0;  // of which cast() tells
  }
  std::vector<Amax> found(weights.size());
  compute_amax(views, found, {}, noop);
  return found;
}

void Publisher::agree(std::span<Parameter* const> weights, std::span<const Amax> own) {
  // For each weight its amax, then the number of a rank that has a value which is not finite; 0: none.
  std::vector<float> values;
  const auto me = static_cast<float>(context_.rank() + 1);
  for (const Amax& amax : own) values.push_back(amax.value);
  for (const Amax& amax : own) values.push_back(amax.nonfinite > 0 ? me : 0);
  const std::vector<float> mine = values;
  if (context_.ranks() > 1) {
    context_.group.max_exchange(values);
    ++context_.counters.max_exchanges;
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    const Parameter& p = *weights[i];
    const auto rank = static_cast<int>(values[weights.size() + i]) - 1;
    if (rank >= 0 && context_.options.nonfinite == Nonfinite::kError) {
      if (own[i].nonfinite > 0)
        fail(
            ErrorCode::kDataLoss,
            "{}: {} values of this rank's rows are not finite, the first in row {}; nonfinite=\"propagate\" lets them through"_message,
            tessera::quoted(p.name()), own[i].nonfinite,
            p.weight.rows.begin + own[i].first_nonfinite / p.weight.columns());
      fail(ErrorCode::kDataLoss, "{}: {} has values that are not finite; its own error names the row"_message,
           tessera::quoted(p.name()), context_.group.describe(rank));
    }
    if (p.weight.format.needs_amax())
      weights[i]->publication.amax = mutated(Mutation::kLocalAmax) ? mine[i] : values[i];
  }
}

void Publisher::cast(Parameter& p, const float* noop) const {
  if (p.weight.rows.empty() || (noop != nullptr && *noop != 0)) return;
  const MatrixView from = p.source();
  if (from.data == nullptr)
    fail(ErrorCode::kInvalidArgument, "{} is native and has no master: set_master() before it is published"_message,
         tessera::quoted(p.name()));
  Publication& shown = p.publication;
  const device::Access write = device::write_of(shown.planes->data(), shown.planes->bytes(), shown.version + 1);
  context_.device.recorder().host_access("cast", p.name(), {&write, 1});
  if (!p.weight.format.quantised()) {
    cast_rows(from, p.weight.format.dtype(), shown.planes->data());
    return;
  }
  const auto plane = [&](const std::optional<QuantizedLayout::Place>& place) -> PlaneMemory {
    if (!place) return {};
    return {.codes = shown.planes->data() + place->codes,
            .code_stride = place->shape.code_row_bytes(),
            .scales = shown.planes->data() + place->scales,
            .scale_stride = place->shape.scale_row_bytes()};
  };
  quantize(from, spec_of(p, context_.options), {.row = shown.amax, .column = shown.amax},
           {.row = plane(shown.layout.row), .column = plane(shown.layout.column)});
  for (const auto& place : {shown.layout.row, shown.layout.column})
    if (place && p.weight.format.needs_amax())
      std::memcpy(shown.planes->data() + place->amaxes, &shown.amax, sizeof(shown.amax));
}

void Publisher::publish(std::span<Parameter* const> weights, const float* noop, Together together) {
  std::vector<Parameter*> list(weights.begin(), weights.end());
  if (mutated(Mutation::kUnorderedIteration) && !list.empty())
    std::ranges::rotate(list, list.begin() + context_.rank() % static_cast<std::ptrdiff_t>(list.size()));
  if (mutated(Mutation::kWordBeforeData)) show(list);
  // What a rank finds while it casts, the others would learn from the loss of their group.
  const bool checks = together == Together::kYes && context_.options.nonfinite == Nonfinite::kError;
  std::vector<Parameter*> scaled;
  for (Parameter* p : list)
    if (p->weight.format.needs_amax() || (checks && p->weight.format.quantised())) scaled.push_back(p);
  const bool skips = noop != nullptr && *noop != 0;
  if (!scaled.empty() && !skips) {
    const std::vector<Amax> own = amax(scaled, noop);
    const size_t at_once = context_.options.coalesce_amax ? scaled.size() : 1;
    for (size_t i = 0; i < scaled.size(); i += at_once)
      agree(std::span(scaled).subspan(i, at_once), std::span(own).subspan(i, at_once));
  }
  for (Parameter* p : list) {
    if (p->weight.in_place) continue;
    try {
      cast(*p, noop);
    } catch (const Error& error) {
      // Other ranks have no part in this cast, and would wait for this rank's version.
      context_.group.fail(Status(error.code(), fmt::format("{}: {}", p->name(), error.what())));
      throw;
    }
  }
  for (const Parameter* p : list)
    if (!skips) p->publication.current->store(true);
  if (!mutated(Mutation::kWordBeforeData)) show(list);
}

void Publisher::show(std::span<Parameter* const> weights) {
  std::vector<uint32_t> slots;
  std::vector<uint64_t> versions;
  slots.reserve(weights.size());
  versions.reserve(weights.size());
  for (Parameter* p : weights) {
    Publication& shown = p->publication;
    shown.stale = false;
    slots.push_back(p->weight.id);
    versions.push_back(++shown.version);
    if (context_.check) note_digests(*p);
  }
  context_.group.set(Word::kPublished, slots, versions);
  context_.counters.publications += std::ssize(weights);
}

void Publisher::note_digests(Parameter& p) const {
  const MatrixView rows = p.source();
  p.publication.digests.clear();
  if (p.weight.spec.native) return;
  const auto row_bytes = static_cast<size_t>(bytes_of(rows.dtype, rows.columns));
  for (int64_t row = 0; row < rows.rows; ++row)
    p.publication.digests.push_back(
        XXH3_64bits(static_cast<const std::byte*>(rows.data) + static_cast<size_t>(row) * row_bytes, row_bytes));
}

void Publisher::check_unwritten() const {
  if (!context_.check) return;
  for (const auto& p : context_.parameters) {
    const MatrixView rows = p->source();
    const auto row_bytes = static_cast<size_t>(bytes_of(rows.dtype, rows.columns));
    const std::vector<uint64_t>& digests = p->publication.digests;
    for (size_t row = 0; row < digests.size(); ++row)
      if (XXH3_64bits(static_cast<const std::byte*>(rows.data) + row * row_bytes, row_bytes) != digests[row])
        fail(ErrorCode::kDataLoss,
             "{}: row {} has been written since version {} was published: write it inside an update"_message,
             tessera::quoted(p->name()), p->weight.rows.begin + static_cast<int64_t>(row), p->publication.version);
  }
}

}  // namespace tessera::etp
