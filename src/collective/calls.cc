#include "collective/calls.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/escape.h"
#include "base/fail.h"
#include "base/fields.h"

namespace tessera::collective {
namespace {

MailHeader header_for(uint64_t number, CallKind kind, std::string_view what, uint64_t bytes) {
  MailHeader header{.number = number, .kind = kind, .bytes = bytes};
  header.what_bytes = static_cast<uint32_t>(std::min(what.size(), MailHeader::kWhatBytes));
  std::copy_n(what.begin(), header.what_bytes, header.what.begin());
  return header;
}

Status told_refusal(int rank, ErrorCode code, std::string_view text, bool forwarded) {
  if (forwarded && !text.empty()) return {code, std::string(text)};
  return failed(code, "rank {}: {}"_message, rank, text.empty() ? "it gave no reason" : text);
}

}  // namespace

class Calls::Turn {
 public:
  Turn(Calls& calls, const Deadline& deadline) : calls_(calls) {
    const MutexLock lock(calls_.mutex_);
    while (calls_.busy_)
      if (!calls_.free_.wait_until(calls_.mutex_, deadline) && calls_.busy_)
        fail(ErrorCode::kDeadlineExceeded, "another thread's call of this group has not ended"_message);
    calls_.busy_ = true;
  }
  // REQUIRES: try_turn()
  explicit Turn(Calls& calls) : calls_(calls) {}
  ~Turn() { calls_.end_turn(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Calls& calls_;
};

uint64_t Calls::run(const Call& call, const TakeMail& take, const Deadline& turn) {
  const Turn own_turn(*this, turn);
  settle_refusal();
  const uint64_t number = ++number_;
  const MailHeader header = header_for(number, call.kind, call.what, call.bytes.size());
  mail(header, call.bytes.first(std::min(call.bytes.size(), kMailBytes)));
  await_own(text(header), call.timeout);
  require_no_refusal(number_);
  std::vector<uint64_t> sizes;
  for (size_t rank = 0; rank < room_.pages.size(); ++rank)
    sizes.push_back(header_of(static_cast<int>(rank), header, call).bytes);
  take_step(0, sizes, take);
  const uint64_t longest = std::ranges::max(sizes);
  for (uint64_t offset = kMailBytes; offset < longest; offset += kMailBytes) {
    const uint64_t left = call.bytes.size() > offset ? call.bytes.size() - offset : 0;
    mail(header,
         left == 0 ? std::span<const std::byte>() : call.bytes.subspan(offset, std::min(left, uint64_t{kMailBytes})));
    await_own(text(header), call.timeout);
    require_no_refusal(number_ + 1);  // of a rank that has left this call
    take_step(offset, sizes, take);
  }
  return number;
}

void Calls::await_own(const std::string& what, std::optional<Duration> timeout) {
  try {
    room_.await(step_, what, timeout);
  } catch (...) {
    withdraw(what);
    throw;
  }
}

// Mail m takes the place of mail m - kMails, which ranks that have mailed m - kMails + 1 have read.
bool Calls::has_room() const {
  return std::ranges::all_of(room_.pages, [this](const Page& page) {
    return page.step().load(std::memory_order_seq_cst) + kMails >= step_ + 2;
  });
}

void Calls::withdraw(const std::string& what) {
  if (has_room()) mail_refusal("interrupted", failed(ErrorCode::kCancelled, "interrupted in {}"_message, what), false);
}

void Calls::mail_refusal(std::string_view what, const Status& reason, bool forwarded) {
  const std::string_view kept = std::string_view(reason.message()).substr(0, kMaxRefusalBytes);
  MailHeader header = header_for(++number_, CallKind::kRefused, what, kept.size());
  header.code = static_cast<uint32_t>(reason.code());
  header.forwarded = forwarded ? 1 : 0;
  mail(header, std::as_bytes(std::span(kept)));
  unsettled_ = text(header);
  {
    const MutexLock lock(mutex_);
    last_refusal_ = told_refusal(room_.rank, reason.code(), kept, forwarded);
  }
  note({.reason = Status(reason.code(), std::string(kept)), .own = !forwarded});
}

void Calls::note(Refusal refusal) {
  const MutexLock lock(mutex_);
  ++refusals_;
  latest_ = std::move(refusal);
}

void Calls::refuse(std::string_view what, const Status& reason, bool forwarded, const Deadline& turn) {
  const Turn own_turn(*this, turn);
  if (!has_room()) settle_refusal();
  mail_refusal(what, reason, forwarded);
}

bool Calls::try_turn() {
  const MutexLock lock(mutex_);
  return !std::exchange(busy_, true);
}

void Calls::end_turn() {
  const MutexLock lock(mutex_);
  busy_ = false;
  free_.notify_one();
}

std::optional<Status> Calls::hear() {
  if (!try_turn()) return std::nullopt;
  const Turn turn(*this);
  std::optional<Status> refusal = find_refusal(step_ + 1, number_ + 1);
  if (!refusal || !has_room()) return std::nullopt;
  mail_refusal("told", *refusal, true);
  return refusal;
}

std::optional<Status> Calls::refused_next() {
  if (!try_turn()) return std::nullopt;
  const Turn turn(*this);
  return find_refusal(step_ + 1, number_ + 1);
}

bool Calls::has_called_next(int rank) const {
  const Page& page = room_.pages[static_cast<size_t>(rank)];
  const uint64_t step = step_;
  if (page.step().load(std::memory_order_seq_cst) <= step) return false;
  const MailHeader header = page.mail(step + 1).header;
  return header.kind != CallKind::kRefused && header.number == number_ + 1;
}

Status Calls::refuse_difference(int rank, const std::string& waits) {
  if (!try_turn()) return {};
  const Turn turn(*this);
  if (!has_called_next(rank) || !has_room()) return {};
  const MailHeader theirs = room_.pages[static_cast<size_t>(rank)].mail(step_ + 1).header;
  const Status reason = failed(ErrorCode::kMismatch,
                               "{} calls {}, {} waits for {}: all ranks must make the same calls in the same "
                               "order"_message,
                               room_.describe(rank), text(theirs), room_.describe(room_.rank), waits);
  mail_refusal("told", reason, true);
  return reason;
}

std::optional<Status> Calls::last_refusal() const {
  const MutexLock lock(mutex_);
  return last_refusal_;
}

uint64_t Calls::refusals() const {
  const MutexLock lock(mutex_);
  return refusals_;
}

std::optional<Calls::Refusal> Calls::latest() const {
  const MutexLock lock(mutex_);
  return latest_;
}

void Calls::settle_refusal() {
  if (unsettled_.empty()) return;
  await_own(unsettled_);
  unsettled_.clear();
  const MutexLock lock(mutex_);
  last_refusal_.reset();
}

// Looks in the order of ranks, so that all ranks that find all mails of the step find the same. Whoever passes on what
// another has refused comes after those.
std::optional<Status> Calls::find_refusal(uint64_t step, uint64_t number) const {
  std::optional<Status> passed_on;
  for (size_t rank = 0; rank < room_.pages.size(); ++rank) {
    const Page& page = room_.pages[rank];
    if (page.step().load(std::memory_order_seq_cst) < step) continue;
    const Mail& mail = page.mail(step);
    const MailHeader header = mail.header;  // a copy: its sender may change it while it is checked
    if (header.kind != CallKind::kRefused || header.number != number) continue;
    const auto refuser = static_cast<int>(rank);
    const bool known = header.code > 0 && header.code <= kLastErrorCode;
    if (!known || header.bytes > kMaxRefusalBytes) {
      const Status status = failed(ErrorCode::kDataLoss, "{} refuses a call with code {} and {} bytes"_message,
                                   room_.describe(refuser), header.code, header.bytes);
      room_.fail(status);
      throw Error(status.code(), status.message());
    }
    const std::string reason(reinterpret_cast<const char*>(mail.bytes.data()), header.bytes);
    const bool forwarded = header.forwarded != 0;
    Status refusal = told_refusal(refuser, static_cast<ErrorCode>(header.code), printable(reason), forwarded);
    if (!forwarded) return refusal;
    if (!passed_on) passed_on = std::move(refusal);
  }
  return passed_on;
}

// A refusal of another number is left to header_of(), which says that the calls differ.
void Calls::require_no_refusal(uint64_t number) {
  const std::optional<Status> refusal = find_refusal(step_, number);
  if (!refusal) return;
  number_ = number;
  note({.reason = *refusal, .own = false});
  throw Error(refusal->code(), refusal->message());
}

void Calls::mail(const MailHeader& header, std::span<const std::byte> bytes) {
  const Page& own = room_.pages[static_cast<size_t>(room_.rank)];
  Mail& mail = own.mail(step_ + 1);
  mail.header = header;
  if (!bytes.empty()) std::memcpy(mail.bytes.data(), bytes.data(), bytes.size());
  own.step().store(++step_, std::memory_order_seq_cst);
  room_.ring();
}

// A copy: its sender may change it while it is checked.
MailHeader Calls::header_of(int rank, const MailHeader& own, const Call& call) {
  MailHeader header = room_.pages[static_cast<size_t>(rank)].mail(step_).header;
  header.what_bytes = std::min(header.what_bytes, static_cast<uint32_t>(MailHeader::kWhatBytes));
  const bool same = header.number == own.number && header.kind == own.kind && header.what_bytes == own.what_bytes &&
                    header.what == own.what && (!call.equal_sizes || header.bytes == own.bytes);
  if (same && header.bytes <= call.most_bytes) return header;
  if (same || header.number != own.number || header.kind > kLastCallKind) {
    const Status status =
        same ? failed(ErrorCode::kMismatch, "{}: {} sends {} bytes to {}, at most {} are taken"_message, text(own),
                      room_.describe(rank), header.bytes, text(own), call.most_bytes)
             : difference(rank, header, own);
    room_.fail(status);
    throw Error(status.code(), status.message());
  }
  // All ranks find a difference in this step, and none goes on with the call.
  const Status status = difference(rank, header, own);
  note({.reason = status, .own = false});
  throw Error(status.code(), status.message());
}

Status Calls::difference(int rank, const MailHeader& theirs, const MailHeader& own) const {
  return failed(ErrorCode::kMismatch,
                "{} calls {}, {} calls {}: all ranks must make the same calls in the same order"_message,
                room_.describe(std::min(rank, room_.rank)), text(rank < room_.rank ? theirs : own),
                room_.describe(std::max(rank, room_.rank)), text(rank < room_.rank ? own : theirs));
}

void Calls::take_step(uint64_t offset, const std::vector<uint64_t>& sizes, const TakeMail& take) {
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    if (sizes[rank] <= offset && offset > 0) continue;
    const Mail& mail = room_.pages[rank].mail(step_);
    take(static_cast<int>(rank), offset,
         std::span(mail.bytes).first(std::min(sizes[rank] - offset, uint64_t{kMailBytes})));
  }
}

std::string Calls::text(const MailHeader& header) const {
  const size_t bytes = std::min<size_t>(header.what_bytes, MailHeader::kWhatBytes);
  const std::string what = printable({header.what.data(), bytes});
  const bool known = header.kind <= kLastCallKind;
  return fmt::format("{} '{}' of {} bytes (number {})", known ? to_string(header.kind) : "an unknown call", what,
                     header.bytes, header.number);
}

}  // namespace tessera::collective
