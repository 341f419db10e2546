#include "collective/movement/fold.h"

#include <algorithm>

#include "base/fail.h"
#include "codec/simd/fold.h"
#include "collective/conditions.h"
#include "collective/movement/fold_rows.h"

namespace tessera::collective {
namespace {

using FoldParts = std::shared_ptr<const std::vector<FoldPart>>;

uint64_t interval_of(const FoldPart& part) {
  return part.interval_now == nullptr ? part.interval : *part.interval_now;
}
uint64_t round_of(const FoldPart& part) {
  return part.round_now == nullptr ? part.round : *part.round_now;
}

// Whether a rank has a gradient of a round; open while it may still come.
enum class Share : uint8_t { kOpen, kGradient, kNone };

// The interval's end is read first: what was produced in it is then final.
Share share_of(const Group& group, int rank, const FoldPart& part) {
  const uint64_t interval = interval_of(part);
  const bool closed = group.get(rank, Word::kClosed, kWholeRank) > interval;
  const uint64_t produced = group.get(rank, Word::kProduced, part.slot);
  if (collective::interval_of(produced) > interval)
    fail(ErrorCode::kMismatch,
         "{} has produced a gradient of {} in interval {}, and rank {} still folds round {} of interval {}: it did not "
         "drain before it went on"_message,
         group.describe(rank), part.weight, collective::interval_of(produced), group.rank(), round_of(part), interval);
  // This rank has not folded the round so far, if it owns rows, and a rank shows few rounds more than that.
  if (part.rows > 0 && produced > round_word(interval, round_of(part) + kShownRounds))
    group.distrust(rank, Word::kProduced, part.slot,
                   fmt::format("rank {} has reduced {} gradients of {} in interval {}", group.rank(), round_of(part),
                               part.weight, interval));
  if (produced >= round_word(interval, round_of(part) + 1)) return Share::kGradient;
  return closed ? Share::kNone : Share::kOpen;
}

// The rows of each gradient of the round, in rank order.
std::vector<const std::byte*> terms_of(Group& group, const FoldPart& part) {
  std::vector<const std::byte*> terms;
  const auto bytes = static_cast<uint64_t>(bytes_of(part.gradient_dtype, part.total_rows * part.columns));
  for (int rank = 0; rank < group.size(); ++rank) {
    if (share_of(group, rank, part) != Share::kGradient) continue;
    const auto shown = group.gradient(rank, part.slot, interval_of(part), round_of(part));
    if (!shown)
      fail(ErrorCode::kMismatch,
           "{} does not show gradient {} of {} any more: it was replaced before it was folded"_message,
           group.describe(rank), round_of(part), part.weight);
    if (shown->memory.bytes == 0 && bytes > 0) continue;  // a round without a gradient
    if (shown->dtype != part.gradient_dtype || shown->memory.bytes != bytes)
      fail(ErrorCode::kMismatch, "{} shows {} bytes of {} as gradient of {}, rank {} expects {} of {}"_message,
           group.describe(rank), shown->memory.bytes, to_string(shown->dtype), part.weight, group.rank(), bytes,
           to_string(part.gradient_dtype));
    terms.push_back(group.map(rank, shown->memory) + bytes_of(part.gradient_dtype, part.begin_row * part.columns));
  }
  return terms;
}

// Every rank has produced the rounds, or will not.
class ProducedCondition final : public WordsCondition {
 public:
  ProducedCondition(const std::shared_ptr<Group>& of, FoldParts parts)
      : WordsCondition(of), group_(*of), parts_(std::move(parts)) {}

  bool reached() const override {
    return std::ranges::all_of(*parts_, [this](const FoldPart& part) {
      for (int rank = 0; rank < group().size(); ++rank)
        if (share_of(group(), rank, part) == Share::kOpen) return false;
      return true;
    });
  }
  std::string to_string() const override {
    const FoldPart* part = &parts_->front();
    for (const FoldPart& other : *parts_) {
      if (open_ranks(other).empty()) continue;
      part = &other;
      break;
    }
    return fmt::format("rank(s) {} to produce gradient {} of {} in interval {}", fmt::join(open_ranks(*part), ", "),
                       round_of(*part), part->weight, interval_of(*part));
  }
  void note(device::WaitNotes& notes) const override {
    notes.say(to_string());
    for (const FoldPart& part : *parts_) {
      const uint64_t word = round_word(interval_of(part), round_of(part) + 1);
      for (int rank = 0; rank < group().size(); ++rank)
        notes.edges.push_back(share_of(group(), rank, part) == Share::kGradient
                                  ? group().edge(rank, Word::kProduced, part.slot, word)
                                  : group().edge(rank, Word::kClosed, kWholeRank, interval_of(part) + 1));
      if (part.rows == 0) continue;
      const auto bytes = static_cast<size_t>(bytes_of(part.gradient_dtype, part.rows * part.columns));
      for (const std::byte* term : terms_of(group_, part)) notes.accesses.push_back(device::read_of(term, bytes));
    }
  }

 private:
  std::vector<int> open_ranks(const FoldPart& part) const {
    std::vector<int> open;
    for (int rank = 0; rank < group().size(); ++rank)
      if (share_of(group(), rank, part) == Share::kOpen) open.push_back(rank);
    return open;
  }
  std::vector<int> awaited() const override {
    std::vector<int> all;
    for (const FoldPart& part : *parts_)
      for (const int rank : open_ranks(part))
        if (std::ranges::find(all, rank) == all.end()) all.push_back(rank);
    return all;
  }

  Group& group_;  // kept by the common part
  const FoldParts parts_;
};

void run_part(Group& group, const FoldPart& part) {
  if (part.rows > 0) {
    const std::vector<const std::byte*> terms = terms_of(group, part);
    fold_rows({.accumulated = part.accumulated,
               .accumulated_dtype = part.accumulated_dtype,
               .gradient_dtype = part.gradient_dtype,
               .scale = part.scale,
               .first = part.first,
               .elements = part.rows * part.columns},
              terms);
    if (part.contributors != nullptr) *part.contributors = static_cast<int>(terms.size());
  }
  group.store(Word::kFolded, part.slot, round_word(interval_of(part), round_of(part) + 1));
}

void check_fold(const FoldPart& part) {
  if (!foldable(part.gradient_dtype) || !foldable(part.accumulated_dtype))
    fail(ErrorCode::kInvalidArgument, "fold of {}: {} into {}: gradients are f32, f16 or bf16"_message, part.weight,
         to_string(part.gradient_dtype), to_string(part.accumulated_dtype));
  if (part.rows < 0 || part.begin_row < 0 || part.columns < 0 || part.begin_row > part.total_rows - part.rows)
    fail(ErrorCode::kInvalidArgument, "fold of {}: rows [{}, +{}) of {} with {} columns"_message, part.weight,
         part.begin_row, part.rows, part.total_rows, part.columns);
}

}  // namespace

std::shared_ptr<const device::Operation> fold_operation(Group& group, std::span<const FoldPart> parts) {
  if (parts.empty()) fail(ErrorCode::kInvalidArgument, "fold: no part"_message);
  auto operation = std::make_shared<device::Operation>();
  for (const FoldPart& part : parts) {
    check_fold(part);
    const auto bytes = bytes_of(part.accumulated_dtype, part.rows * part.columns);
    if (bytes > 0) {
      operation->accesses.push_back(device::read_of(part.accumulated, static_cast<size_t>(bytes)));
      operation->accesses.push_back(device::write_of(part.accumulated, static_cast<size_t>(bytes)));
    }
    if (part.rows > 0 && part.contributors != nullptr)
      operation->accesses.push_back(device::write_of(part.contributors, sizeof(*part.contributors)));
    operation->writes.push_back(
        group.edge(group.rank(), Word::kFolded, part.slot, round_word(interval_of(part), round_of(part) + 1)));
    operation->bytes += bytes_of(part.gradient_dtype, part.rows * part.columns) * group.size();
  }
  const auto shared = std::make_shared<const std::vector<FoldPart>>(parts.begin(), parts.end());
  const std::string first(parts.front().weight);
  operation->name = "fold";
  operation->subject = parts.size() == 1 ? first : fmt::format("{} +{}", first, parts.size() - 1);
  operation->after = {std::make_shared<ProducedCondition>(group.shared_from_this(), shared)};
  operation->body = [of = group.shared_from_this(), shared] {
    for (const FoldPart& part : *shared) run_part(*of, part);
  };
  return operation;
}

void fold(Group& group, device::Stream& stream, std::span<const FoldPart> parts) {
  if (!parts.empty()) stream.enqueue(fold_operation(group, parts));
}

}  // namespace tessera::collective
