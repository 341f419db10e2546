#include "collective/shared/page.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/enum_name.h"
#include "base/escape.h"
#include "base/fail.h"
#include "base/fields.h"
#include "base/rounding.h"

namespace tessera::collective {
namespace {

constexpr size_t kUnit = 4096;
constexpr size_t kFirstMails = 2;  // in front of the words; the others are behind the gradients
constexpr size_t kSlotWords = static_cast<size_t>(kLastSlotWord) + 1;

constexpr size_t mail_begin() {
  return kUnit;
}
constexpr size_t words_begin() {
  return mail_begin() + round_up(kFirstMails * sizeof(Mail), kUnit);
}
// Each kind of word in an array of its own: a list's words are neighbours.
constexpr size_t words_bytes(uint32_t slots) {
  return round_up(size_t{slots} * sizeof(uint64_t), kUnit);
}
constexpr size_t gradients_begin(uint32_t slots) {
  return words_begin() + kSlotWords * words_bytes(slots);
}

constexpr size_t last_mails_begin(uint32_t slots) {
  return gradients_begin(slots) + round_up(size_t{slots} * kShownRounds * sizeof(GradientEntry), kUnit);
}

}  // namespace

std::string_view to_string(Word word) {
  static constexpr std::string_view kNames[] = {"published", "produced",  "folded", "retired",
                                                "closed",    "left plan", "done"};
  return kNames[static_cast<size_t>(word)];
}

std::string_view to_string(CallKind kind) {
  static constexpr std::string_view kNames[] = {"exchange", "max_exchange", "sum_exchange", "end of sum_exchange",
                                                "barrier",  "refusal"};
  return kNames[static_cast<size_t>(kind)];
}

size_t Page::bytes_for(uint32_t slots) {
  return last_mails_begin(slots) + round_up((kMails - kFirstMails) * sizeof(Mail), kUnit);
}

Page Page::create(std::byte* memory, uint32_t rank, uint32_t size, uint32_t slots) {
  const Page page(memory, slots);
  PageHeader& header = page.header();
  header.magic = kPageMagic;
  header.version = kPageVersion;
  header.rank = rank;
  header.size = size;
  header.slots = slots;
  return page;
}

Page Page::open(const std::byte* memory, size_t bytes, uint32_t rank, uint32_t size, uint32_t slots,
                std::string_view owner) {
  if (bytes < bytes_for(slots))
    tessera::fail(ErrorCode::kMismatch, "page of {}: {} bytes, {} slots need {}"_message, owner, bytes, slots,
                  bytes_for(slots));
  const Page page(const_cast<std::byte*>(memory), slots);
  const PageHeader& header = page.header();
  if (header.magic != kPageMagic || header.version != kPageVersion)
    tessera::fail(ErrorCode::kMismatch,
                  "page of {}: magic {:x} version {}, not {:x} version {}: run the same release on all ranks"_message,
                  owner, header.magic, header.version, kPageMagic, kPageVersion);
  if (header.rank != rank || header.size != size || header.slots != slots)
    tessera::fail(ErrorCode::kMismatch,
                  "page of {}: it says rank {} of {} with {} slots, not rank {} of {} with {}"_message, owner,
                  header.rank, header.size, header.slots, rank, size, slots);
  return page;
}

PageHeader& Page::header() const {
  return *std::launder(reinterpret_cast<PageHeader*>(memory_));
}

bool Page::has(Word word, uint32_t slot) const {
  return word <= kLastSlotWord ? slot < slots_ : slot == kWholeRank;
}

std::atomic<uint64_t>& Page::word(Word word, uint32_t slot) const {
  const auto index = static_cast<size_t>(word);
  if (word > kLastSlotWord) return header().words[index - kSlotWords];
  return reinterpret_cast<std::atomic<uint64_t>*>(memory_ + words_begin() + index * words_bytes(slots_))[slot];
}

GradientEntry& Page::gradient(uint32_t slot, uint64_t round) const {
  auto* const entries = reinterpret_cast<GradientEntry*>(memory_ + gradients_begin(slots_));
  return entries[size_t{slot} * kShownRounds + round % kShownRounds];
}

Mail& Page::mail(uint64_t step) const {
  const uint64_t place = step % kMails;
  if (place < kFirstMails) return reinterpret_cast<Mail*>(memory_ + mail_begin())[place];
  return reinterpret_cast<Mail*>(memory_ + last_mails_begin(slots_))[place - kFirstMails];
}

RankState Page::state() const {
  const uint64_t state = header().state.load(std::memory_order_acquire);
  return state > static_cast<uint64_t>(RankState::kFailed) ? RankState::kFailed : static_cast<RankState>(state);
}

void Page::set_state(RankState state) const {
  std::atomic<uint64_t>& at = header().state;
  const auto wanted = static_cast<uint64_t>(state);
  uint64_t before = at.load(std::memory_order_seq_cst);
  while (before < wanted && !at.compare_exchange_weak(before, wanted, std::memory_order_seq_cst)) {
  }
}

void Page::set_failure(const Status& status) const {
  const std::string_view text = std::string_view(status.message()).substr(0, PageHeader::kFailureBytes);
  std::ranges::copy(text, header().failure);
  header().failure_code.store(static_cast<uint32_t>(status.code()), std::memory_order_relaxed);
  header().failure_bytes.store(static_cast<uint32_t>(text.size()), std::memory_order_relaxed);
  set_state(RankState::kFailed);
}

Status Page::failure(std::string_view owner) const {
  const uint32_t code = header().failure_code.load(std::memory_order_relaxed);
  const size_t bytes =
      std::min<size_t>(header().failure_bytes.load(std::memory_order_relaxed), PageHeader::kFailureBytes);
  std::string text(header().failure, bytes);
  const bool known = code > 0 && code <= kLastErrorCode;
  if (text.empty()) return failed(ErrorCode::kPeerLost, "{} has failed and gave no reason"_message, owner);
  return {known ? static_cast<ErrorCode>(code) : ErrorCode::kPeerLost, printable(text)};
}

}  // namespace tessera::collective
