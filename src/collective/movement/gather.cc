#include "collective/movement/gather.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "codec/simd/cast.h"
#include "codec/simd/stream.h"
#include "collective/conditions.h"
#include "collective/movement/copy_rows.h"

namespace tessera::collective {
namespace {

using GatherParts = std::shared_ptr<const std::vector<GatherPart>>;

uint64_t version_of(const GatherPart& part) {
  return part.version_now == nullptr ? part.version : *part.version_now;
}

bool has_rows(const GatherPart& part, int owner) {
  return part.from->owners[static_cast<size_t>(owner)].count > 0 && part.from->columns > 0;
}

// Some owners have published exactly the versions wanted of the parts that they have rows of. `noted`: a recorder will
// ask for its words.
class PublishedCondition final : public WordsCondition {
 public:
  PublishedCondition(std::shared_ptr<const Group> of, std::span<const int> owners, GatherParts parts, bool noted)
      : WordsCondition(std::move(of)), parts_(std::move(parts)) {
    for (const int owner : owners)
      for (const GatherPart& part : *parts_)
        if (has_rows(part, owner)) wanted_.push_back({owner, &part});
    if (!noted) return;
    edges_ = edges();
    met_text_ = fmt::format("rank{} {} to publish {}", owners.size() == 1 ? "" : "s", fmt::join(owners, ", "),
                            parts_->front().weight);
  }

  bool reached() const override {
    return std::ranges::all_of(wanted_, [this](const Wanted& wanted) { return is_published(wanted); });
  }
  std::string to_string() const override {
    for (const auto& [owner, part] : wanted_)
      if (group().get(owner, Word::kPublished, part->slot) < version_of(*part))
        return fmt::format("rank {} to publish version {} of {}", owner, version_of(*part), part->weight);
    return fmt::format("the owners to publish {}", parts_->front().weight);
  }
  void note(device::WaitNotes& notes) const override {
    if (edges_.empty()) {
      notes.say(to_string());
      notes.edges = edges();
      return;
    }
    notes.text = met_text_;
    notes.edges = edges_;  // without an allocation
    for (size_t i = 0; i < wanted_.size(); ++i) notes.edges[i].value = version_of(*wanted_[i].part);
  }

 private:
  struct Wanted {
    int owner;
    const GatherPart* part;
  };

  bool is_published(const Wanted& wanted) const {
    return collective::is_published(group(), wanted.owner, *wanted.part);
  }
  std::vector<device::WordEdge> edges() const {
    std::vector<device::WordEdge> edges;
    for (const auto& [owner, part] : wanted_)
      edges.push_back(group().edge(owner, Word::kPublished, part->slot, version_of(*part)));
    return edges;
  }
  std::vector<int> awaited() const override {
    std::vector<int> late;
    for (const Wanted& wanted : wanted_)
      if ((late.empty() || late.back() != wanted.owner) && !is_published(wanted)) late.push_back(wanted.owner);
    return late;
  }

  const GatherParts parts_;
  std::string met_text_{};                 // both made once if noted, and told at each gather
  std::vector<device::WordEdge> edges_{};  // of wanted_
  std::vector<Wanted> wanted_{};           // by owner
};

void note_reads(const GatherPart& part, const PublishedRows& rows, std::vector<device::Access>& accesses) {
  const PublishedWeight& weight = *part.from;
  if (!weight.spec) {
    const auto bytes = static_cast<size_t>(bytes_of(weight.dtype, rows.count * weight.columns));
    accesses.push_back(device::read_of(rows.data, bytes, part.version));
    return;
  }
  const PlaneShape shape = plane_shape(*weight.spec, weight.plane, rows.count, weight.columns);
  const auto extent = [](int64_t lines, int64_t stride, int64_t bytes) {
    return static_cast<size_t>(lines == 0 ? 0 : (lines - 1) * stride + bytes);
  };
  accesses.push_back(device::read_of(
      rows.plane.codes, extent(shape.code_rows, rows.plane.code_stride, shape.code_row_bytes()), part.version));
  accesses.push_back(device::read_of(
      rows.plane.scales, extent(shape.scale_rows, rows.plane.scale_stride, shape.scale_row_bytes()), part.version));
}

void note_writes(const GatherPart& part, const PublishedRows& rows, std::vector<device::Access>& accesses) {
  auto* const out = static_cast<std::byte*>(part.to.data) + bytes_of(part.to.dtype, rows.begin * part.to.row_stride);
  const int64_t elements = (rows.count - 1) * part.to.row_stride + part.to.columns;
  accesses.push_back(device::write_of(out, static_cast<size_t>(bytes_of(part.to.dtype, elements)), part.version));
}

// As they travel.
int64_t bytes_read(const PublishedWeight& weight, const PublishedRows& rows) {
  if (!weight.spec) return bytes_of(weight.dtype, rows.count * weight.columns);
  const PlaneShape shape = plane_shape(*weight.spec, weight.plane, rows.count, weight.columns);
  return shape.code_bytes() + shape.scale_bytes();
}

std::string subject_of(std::span<const GatherPart> parts) {
  const std::string first(parts.front().weight);
  return parts.size() == 1 ? first : fmt::format("{} +{}", first, parts.size() - 1);
}

void check_gather(const GatherPart& part, const Group& group) {
  if (part.from == nullptr || part.from->owners.size() != static_cast<size_t>(group.size()))
    fail(ErrorCode::kInvalidArgument, "gather of {}: it is published by {} ranks, the group has {}"_message,
         part.weight, part.from == nullptr ? 0 : part.from->owners.size(), group.size());
  const PublishedWeight& from = *part.from;
  const MatrixMemory& to = part.to;
  if (to.rows != from.rows || to.columns != from.columns || to.row_stride < to.columns)
    fail(ErrorCode::kInvalidArgument, "gather of {}: [{}, {}] to [{}, {}] with rows {} apart"_message, part.weight,
         from.rows, from.columns, to.rows, to.columns, to.row_stride);
  if (!from.spec && !castable(from.dtype, to.dtype))
    fail(ErrorCode::kInvalidArgument, "gather of {}: {} cannot be cast to {}"_message, part.weight,
         to_string(from.dtype), to_string(to.dtype));
}

// `noted`: with its accesses, for the recorder.
std::shared_ptr<const device::Operation> operation_of(Group& group, std::vector<int> owners, const GatherParts& parts,
                                                      bool noted, bool past_caches) {
  auto operation = std::make_shared<device::Operation>();
  for (const int owner : owners)
    for (const GatherPart& part : *parts) {
      if (!has_rows(part, owner)) continue;
      const PublishedRows& rows = part.from->owners[static_cast<size_t>(owner)];
      operation->bytes += bytes_read(*part.from, rows);
      if (!noted) continue;
      note_reads(part, rows, operation->accesses);
      if (owners.size() == 1) note_writes(part, rows, operation->accesses);
    }
  if (noted && owners.size() > 1)  // all that have rows: one write of each matrix
    for (const GatherPart& part : *parts)
      if (part.from->rows > 0 && part.from->columns > 0)
        note_writes(part, {.begin = 0, .count = part.from->rows}, operation->accesses);
  operation->name = "gather";
  operation->subject = subject_of(*parts);
  operation->after = {std::make_shared<PublishedCondition>(group.shared_from_this(), owners, parts, noted)};
  operation->body = [owners = std::move(owners), parts, past_caches] {
    for (const int owner : owners)
      for (const GatherPart& part : *parts)
        copy_rows(*part.from, part.from->owners[static_cast<size_t>(owner)], part.to, past_caches);
    if (past_caches) stream_fence();
  };
  return operation;
}

}  // namespace

bool is_published(const Group& group, int owner, const GatherPart& part) {
  const uint64_t published = group.get(owner, Word::kPublished, part.slot);
  const uint64_t version = version_of(part);
  if (published > version)
    fail(ErrorCode::kMismatch,
         "{} has published version {} of {}, and rank {} still reads version {}: it wrote a new one before all ranks "
         "retired the old one"_message,
         group.describe(owner), published, part.weight, group.rank(), version);
  return published == version;
}

void check_published(const PublishedWeight& published, int ranks, std::string_view weight) {
  int64_t next = 0;
  for (const PublishedRows& rows : published.owners) {
    const bool in_place = rows.begin == next || rows.count == 0;
    const bool has_memory =
        rows.count == 0 ||
        (published.spec ? rows.plane.codes != nullptr && rows.plane.scales != nullptr : rows.data != nullptr);
    if (rows.count < 0 || !in_place || !has_memory)
      fail(ErrorCode::kInvalidArgument, "{}: rows [{}, +{}) of an owner do not follow row {}, or lie nowhere"_message,
           weight, rows.begin, rows.count, next);
    next += rows.count;
    if (published.spec && rows.count > 0) plane_shape(*published.spec, published.plane, rows.count, published.columns);
  }
  if (next != published.rows || published.columns < 0 || published.owners.size() != static_cast<size_t>(ranks))
    fail(ErrorCode::kInvalidArgument, "{}: {} owners have {} rows, {} ranks should have {}"_message, weight,
         published.owners.size(), next, ranks, published.rows);
  if (published.spec && needs_amax(published.spec->format) && published.amax == nullptr)
    fail(ErrorCode::kInvalidArgument, "{}: {} needs an amax"_message, weight, to_string(published.spec->format));
}

namespace {

std::vector<std::shared_ptr<const device::Operation>> operations_of(Group& group, std::vector<GatherPart> parts,
                                                                    bool together, bool noted) {
  std::vector<std::shared_ptr<const device::Operation>> operations;
  if (parts.empty()) return operations;
  int64_t bytes = 0;
  for (const GatherPart& part : parts) {
    check_gather(part, group);
    bytes += bytes_of(part.to.dtype, part.to.rows * part.to.columns);
  }
  const bool past_caches = goes_past_caches(bytes);
  const auto shared = std::make_shared<const std::vector<GatherPart>>(std::move(parts));
  std::vector<int> owners;
  for (int turn = 0; turn < group.size(); ++turn) {
    const int owner = (group.rank() + turn) % group.size();
    if (std::ranges::any_of(*shared, [owner](const GatherPart& part) { return has_rows(part, owner); }))
      owners.push_back(owner);
  }
  if (together && !owners.empty()) return {operation_of(group, std::move(owners), shared, noted, past_caches)};
  for (const int owner : owners) operations.push_back(operation_of(group, {owner}, shared, noted, past_caches));
  return operations;
}

}  // namespace

std::vector<std::shared_ptr<const device::Operation>> gather_operations(Group& group, std::span<const GatherPart> parts,
                                                                        bool together) {
  return operations_of(group, {parts.begin(), parts.end()}, together, true);
}

void gather(Group& group, device::Stream& stream, std::span<const GatherPart> parts, bool together) {
  gather(group, stream, std::vector(parts.begin(), parts.end()), together);
}

void gather(Group& group, device::Stream& stream, std::vector<GatherPart>&& parts, bool together) {
  for (auto& operation : operations_of(group, std::move(parts), together, group.device().recorder().on()))
    stream.enqueue(std::move(operation));
}

}  // namespace tessera::collective
