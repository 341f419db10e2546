#include "peer/messages.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <type_traits>

namespace tessera::bus {
namespace {

constexpr uint32_t kMaxText = 64 << 10;
constexpr uint32_t kMaxRejectText = 2 << 10;
constexpr uint32_t kMaxArenas = 1 << 16;

// Digests travel as they lie in memory: u64 d0, u64 d1, u64 elements.
static_assert(sizeof(Digest) == 24 && std::is_trivially_copyable_v<Digest>);
static_assert(offsetof(Digest, d) == 0 && offsetof(Digest, elements) == 16);
// So do keys: u32 group, u32 matrix, u32 row, u32 column.
static_assert(sizeof(AmaxKey) == 16 && std::is_trivially_copyable_v<AmaxKey>);

// An array whose elements travel as they lie in memory, at most `most` of them, into `room`.
template <typename T>
std::vector<T> read_array(ByteReader& in, std::string_view what, uint32_t most, std::vector<T> room = {}) {
  const std::span<const std::byte> bytes = in.get_bytes(most * static_cast<uint32_t>(sizeof(T)));
  if (bytes.size() % sizeof(T) != 0)
    fail(ErrorCode::kInvalidArgument, "{}: {} bytes are no whole number of elements", what, bytes.size());
  room.resize(bytes.size() / sizeof(T));
  std::ranges::copy(bytes, std::as_writable_bytes(std::span(room)).begin());
  return room;
}

ErrorCode read_code(ByteReader& in) {
  const auto code = in.get<uint8_t>();
  if (code > static_cast<uint8_t>(ErrorCode::kInternal))
    fail(ErrorCode::kInvalidArgument, "message: unknown error code {}", code);
  return static_cast<ErrorCode>(code);
}

}  // namespace

void write_status(const Status& status, ByteWriter& out) {
  out.put(static_cast<uint8_t>(status.code()));
  out.put_string(std::string_view(status.message()).substr(0, kMaxText));
}

Status read_status(ByteReader& in) {
  const ErrorCode code = read_code(in);
  std::string text = in.get_string(kMaxText);
  return code == ErrorCode::kOk ? Status() : Status(code, std::move(text));
}

// What another rank says of a transfer. That it was cancelled is that rank's affair: to this one it is lost.
static Status read_heard(ByteReader& in) {
  const Status status = read_status(in);
  return status.code() == ErrorCode::kCancelled ? Status(ErrorCode::kPeerLost, status.message()) : status;
}

std::string_view to_string(MessageType type) {
  switch (type) {
    case MessageType::kHello:
      return "Hello";
    case MessageType::kWelcome:
      return "Welcome";
    case MessageType::kReject:
      return "Reject";
    case MessageType::kAttach:
      return "Attach";
    case MessageType::kAttached:
      return "Attached";
    case MessageType::kPrepare:
      return "Prepare";
    case MessageType::kPrepared:
      return "Prepared";
    case MessageType::kOffer:
      return "Offer";
    case MessageType::kWithdraw:
      return "Withdraw";
    case MessageType::kTake:
      return "Take";
    case MessageType::kGrant:
      return "Grant";
    case MessageType::kRefuse:
      return "Refuse";
    case MessageType::kRevoke:
      return "Revoke";
    case MessageType::kDigests:
      return "Digests";
    case MessageType::kProgress:
      return "Progress";
    case MessageType::kDone:
      return "Done";
    case MessageType::kChosen:
      return "Chosen";
    case MessageType::kDetach:
      return "Detach";
    case MessageType::kBroken:
      return "Broken";
    case MessageType::kHold:
      return "Hold";
    case MessageType::kHeld:
      return "Held";
    case MessageType::kRelease:
      return "Release";
    case MessageType::kGot:
      return "Got";
    case MessageType::kDecided:
      return "Decided";
    case MessageType::kInspect:
      return "Inspect";
    case MessageType::kReport:
      return "Report";
    case MessageType::kLendArenas:
      return "LendArenas";
    case MessageType::kMakeRun:
      return "MakeRun";
    case MessageType::kGiveRing:
      return "GiveRing";
    case MessageType::kStartRun:
      return "StartRun";
    case MessageType::kAbortRun:
      return "AbortRun";
    case MessageType::kDropRun:
      return "DropRun";
    case MessageType::kRunProgress:
      return "RunProgress";
    case MessageType::kRunEnded:
      return "RunEnded";
    case MessageType::kSync:
      return "Sync";
    case MessageType::kSynced:
      return "Synced";
    case MessageType::kJoins:
      return "Joins";
    case MessageType::kAmaxes:
      return "Amaxes";
    case MessageType::kAgreed:
      return "Agreed";
  }
  return "an unknown message";
}

void Hello::write(ByteWriter& out) const {
  out.put(protocol_min);
  out.put(protocol_max);
  out.put_string(release);
  if (!speaks_ours()) return;
  out.put_string(name_space);
  out.put_string(job);
  out.put(rank);
  incarnation.write(out);
}

Hello Hello::read(ByteReader& in) {
  Hello hello;
  hello.protocol_min = in.get<uint16_t>();
  hello.protocol_max = in.get<uint16_t>();
  hello.release = in.get_string(64);
  if (hello.speaks_ours()) {  // else the rest may look otherwise
    hello.name_space = in.get_string(256);
    hello.job = in.get_string(64);
    hello.rank = in.get<Rank>();
    hello.incarnation = Incarnation::read(in);
  }
  in.skip_rest();  // a later version may have more to say
  return hello;
}

void Welcome::write(ByteWriter& out) const {
  out.put(protocol);
  out.put_string(release);
  out.put_string(job);
  out.put(rank);
  incarnation.write(out);
}

Welcome Welcome::read(ByteReader& in) {
  Welcome welcome;
  welcome.protocol = in.get<uint16_t>();
  welcome.release = in.get_string(64);
  welcome.job = in.get_string(64);
  welcome.rank = in.get<Rank>();
  welcome.incarnation = Incarnation::read(in);
  return welcome;
}

void Reject::write(ByteWriter& out) const {
  write_status(Status(code, text.substr(0, kMaxRejectText)), out);
}

Reject Reject::read(ByteReader& in) {
  Reject reject;
  reject.code = read_code(in);
  reject.text = in.get_string(kMaxRejectText);
  if (reject.code == ErrorCode::kOk) fail(ErrorCode::kInvalidArgument, "Reject: without an error");
  return reject;
}

void Attach::write(ByteWriter& out) const {
  out.put_string(pair);
  out.put_string(batch);
  out.put(purpose);
  out.put_string(session);
}

Attach Attach::read(ByteReader& in) {
  Attach attach;
  attach.pair = in.get_string(64);
  attach.batch = in.get_string(64);
  attach.purpose = in.get_enum(Purpose::kAgree);
  attach.session = in.get_string(16);
  return attach;
}

void Attached::write(ByteWriter& out) const {
  out.put(slots);
  out.put(static_cast<uint32_t>(arenas.size()));
  for (const ArenaDesc& arena : arenas) arena.write(out);
  out.put(more_arenas);
  out.put(static_cast<uint32_t>(places.size()));
  for (const Place& place : places) {
    place.memory.write(out);
    out.put(place.origin);
    out.put(static_cast<uint8_t>(place.strides.size()));
    for (const Index stride : place.strides) out.put(stride);
    out.put(place.slot_bytes);
    out.put(place.delta.has_value());
    if (!place.delta) continue;
    place.delta->write(out);
    out.put(place.delta_slot_bytes);
  }
}

Attached Attached::read(ByteReader& in) {
  Attached attached;
  attached.slots = in.get<uint32_t>();
  if (attached.slots < 1 || attached.slots > kMaxSlots)
    fail(ErrorCode::kInvalidArgument, "Attached: {} slots", attached.slots);
  for (uint32_t count = in.get_count(kMaxArenas, 12); count > 0; --count)
    attached.arenas.push_back(ArenaDesc::read(in));
  attached.more_arenas = in.get_bool();
  for (uint32_t count = in.get_count(kMaxRoutes, 10); count > 0; --count) {
    Place place;
    place.memory = MemoryDesc::read(in);
    place.origin = in.get<uint64_t>();
    const auto dims = in.get<uint8_t>();
    if (dims > kMaxDims) fail(ErrorCode::kInvalidArgument, "Attached: a tensor of {} dims", dims);
    for (int d = 0; d < dims; ++d) place.strides.push_back(in.get<Index>());
    place.slot_bytes = in.get<uint64_t>();
    if (in.get_bool()) {
      place.delta = MemoryDesc::read(in);
      place.delta_slot_bytes = in.get<uint64_t>();
    }
    attached.places.push_back(std::move(place));
  }
  return attached;
}

void Prepare::write(ByteWriter& out) const {
  out.put(ring);
  out.put(static_cast<uint32_t>(skipped.size()));
  for (const uint32_t position : skipped) out.put(position);
}

Prepare Prepare::read(ByteReader& in) {
  Prepare prepare;
  prepare.ring = in.get_bool();
  for (uint32_t count = in.get_count(kMaxRoutes, 4); count > 0; --count) {
    const auto position = in.get<uint32_t>();
    if (!prepare.skipped.empty() && position <= prepare.skipped.back())
      fail(ErrorCode::kInvalidArgument, "Prepare: skipped routes out of order at {}", position);
    prepare.skipped.push_back(position);
  }
  return prepare;
}

void Take::write(ByteWriter& out) const {
  VersionMessage<kType>{.version = version, .epoch = epoch}.write(out);
  out.put(held);
}

Take Take::read(ByteReader& in) {
  const auto of = VersionMessage<kType>::read(in);
  return {.version = of.version, .epoch = of.epoch, .held = in.get<Stamp>()};
}

void Grant::write(ByteWriter& out) const {
  VersionMessage<kType>{.version = version, .epoch = epoch}.write(out);
  out.put(stamp);
  out.put_bytes(std::as_bytes(std::span(deltas)));
}

Grant Grant::read(ByteReader& in, std::vector<int64_t> room) {
  const auto of = VersionMessage<kType>::read(in);
  Grant grant{.version = of.version, .epoch = of.epoch, .stamp = in.get<Stamp>(), .deltas = {}};
  grant.deltas = read_array<int64_t>(in, "Grant", kMaxRoutes, std::move(room));
  const auto bad = std::ranges::find_if(grant.deltas, [](int64_t bytes) { return bytes < kInFull; });
  if (bad != grant.deltas.end()) fail(ErrorCode::kInvalidArgument, "Grant: a delta of {} bytes", *bad);
  return grant;
}

template <MessageType type>
void EndMessage<type>::write(ByteWriter& out) const {
  VersionMessage<type>{.version = version, .epoch = epoch}.write(out);
  write_status(reason, out);
}

template <MessageType type>
EndMessage<type> EndMessage<type>::read(ByteReader& in) {
  const auto of = VersionMessage<type>::read(in);
  return {.version = of.version, .epoch = of.epoch, .reason = read_heard(in)};
}

template struct EndMessage<MessageType::kRefuse>;
template struct EndMessage<MessageType::kRevoke>;
template struct EndMessage<MessageType::kGot>;

void Decided::write(ByteWriter& out) const {
  VersionMessage<kType>{.version = version, .epoch = epoch}.write(out);
  out.put(verdict);
  write_status(reason, out);
}

Decided Decided::read(ByteReader& in) {
  const auto of = VersionMessage<kType>::read(in);
  Decided decided;
  decided.version = of.version;
  decided.epoch = of.epoch;
  decided.verdict = in.get_enum(Verdict::kAskStore);
  decided.reason = read_heard(in);
  return decided;
}

void Digests::write(ByteWriter& out) const {
  out.put(version);
  out.put_bytes(std::as_bytes(std::span(digests)));  // at once: there is one a route
}

Digests Digests::read(ByteReader& in, std::vector<Digest> room) {
  Digests read{.digests = std::move(room)};
  read.version = in.get<int64_t>();
  read.digests = read_array<Digest>(in, "Digests", kMaxRoutes, std::move(read.digests));
  return read;
}

void ProgressReport::write(ByteWriter& out) const {
  out.put(version);
  out.put(bytes);
}

ProgressReport ProgressReport::read(ByteReader& in) {
  ProgressReport report;
  report.version = in.get<int64_t>();
  report.bytes = in.get<int64_t>();
  return report;
}

void Done::write(ByteWriter& out) const {
  out.put(version);
  out.put(bytes);
  write_status(status, out);
}

Done Done::read(ByteReader& in) {
  Done done;
  done.version = in.get<int64_t>();
  done.bytes = in.get<int64_t>();
  done.status = read_heard(in);
  return done;
}

void Joins::write(ByteWriter& out) const {
  out.put_bytes(std::as_bytes(std::span(keys)));
}

Joins Joins::read(ByteReader& in) {
  Joins joins{.keys = read_array<AmaxKey>(in, "Joins", kMaxAmaxes)};
  const auto disorder = std::ranges::adjacent_find(joins.keys, std::greater_equal<>{});
  if (disorder != joins.keys.end())
    fail(ErrorCode::kInvalidArgument, "Joins: keys out of order at {}", disorder - joins.keys.begin());
  return joins;
}

static void write_finding(const NonfiniteFinding& finding, ByteWriter& out) {
  out.put(finding.tensor);
  out.put(finding.index);
  out.put(finding.rank);
  out.put(finding.value);
}

static NonfiniteFinding read_finding(ByteReader& in, std::string_view what) {
  NonfiniteFinding finding;
  finding.tensor = in.get<uint32_t>();
  finding.index = in.get<uint64_t>();
  finding.rank = in.get<Rank>();
  finding.value = in.get<float>();
  if (finding.any() && (finding.rank < 0 || std::isfinite(finding.value)))
    fail(ErrorCode::kInvalidArgument, "{}: rank {} has found {}", what, finding.rank, finding.value);
  return finding;
}

template <MessageType type>
void AmaxMessage<type>::write(ByteWriter& out) const {
  out.put(version);
  out.put(epoch);
  write_status(status, out);
  write_finding(finding, out);
  out.put_bytes(std::as_bytes(std::span(amaxes)));
}

template <MessageType type>
AmaxMessage<type> AmaxMessage<type>::read(ByteReader& in, std::vector<float> room) {
  const std::string_view what = to_string(type);
  AmaxMessage message;
  message.version = in.get<int64_t>();
  message.epoch = in.get<uint32_t>();
  if (message.version < 1) fail(ErrorCode::kInvalidArgument, "{}: version {}", what, message.version);
  message.status = read_heard(in);
  message.finding = read_finding(in, what);
  message.amaxes = read_array<float>(in, what, kMaxAmaxes, std::move(room));
  const auto bad = std::ranges::find_if_not(
      message.amaxes, [](float amax) { return std::isfinite(amax) && amax >= 0 && !std::signbit(amax); });
  if (bad != message.amaxes.end())
    fail(ErrorCode::kInvalidArgument, "{}: an amax of {}: they are finite, and 0 or more", what, *bad);
  if (!message.amaxes.empty() && (!message.status.ok() || message.finding.any()))
    fail(ErrorCode::kInvalidArgument, "{}: {} amaxes, and a reason for having none", what, message.amaxes.size());
  return message;
}

template struct AmaxMessage<MessageType::kAmaxes>;
template struct AmaxMessage<MessageType::kAgreed>;

Status Detach::reason(const std::string& name) const {
  if (status.ok()) return failed(ErrorCode::kPeerLost, "{} has closed the batch", name);
  return failed(status.code(), "{} has closed the batch: {}", name, status.message());
}

void Detach::write(ByteWriter& out) const {
  write_status(status, out);
}

Detach Detach::read(ByteReader& in) {
  return {.status = read_heard(in)};
}

void Broken::write(ByteWriter& out) const {
  write_status(status, out);
}

Broken Broken::read(ByteReader& in) {
  Broken broken{.status = read_heard(in)};
  if (broken.status.ok()) fail(ErrorCode::kInvalidArgument, "Broken: without an error");
  return broken;
}

}  // namespace tessera::bus
