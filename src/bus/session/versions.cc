#include "bus/session/versions.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "peer/exchange/messages.h"

namespace tessera::bus {

// Digests travel as they lie in memory: u64 d0, u64 d1, u64 elements.
static_assert(sizeof(Digest) == 24 && std::is_trivially_copyable_v<Digest>);
static_assert(offsetof(Digest, d) == 0 && offsetof(Digest, elements) == 16);

void Take::write(ByteWriter& out) const {
  VersionStep<kType>{.version = version, .epoch = epoch}.write(out);
  out.put(held);
}

Take Take::read(ByteReader& in) {
  const auto of = VersionStep<kType>::read(in);
  return {.version = of.version, .epoch = of.epoch, .held = in.get<Stamp>()};
}

void Grant::write(ByteWriter& out) const {
  VersionStep<kType>{.version = version, .epoch = epoch}.write(out);
  out.put(stamp);
  out.put_bytes(std::as_bytes(std::span(deltas)));
}

Grant Grant::read(ByteReader& in, std::vector<int64_t> room) {
  const auto of = VersionStep<kType>::read(in);
  Grant grant{.version = of.version, .epoch = of.epoch, .stamp = in.get<Stamp>(), .deltas = {}};
  grant.deltas = read_array<int64_t>(in, "Grant", kMaxRoutes, std::move(room));
  const auto bad = std::ranges::find_if(grant.deltas, [](int64_t bytes) { return bytes < kInFull; });
  if (bad != grant.deltas.end()) fail(ErrorCode::kInvalidArgument, "Grant: a delta of {} bytes", *bad);
  return grant;
}

template <VersionMessage type>
void VersionEnd<type>::write(ByteWriter& out) const {
  VersionStep<type>{.version = version, .epoch = epoch}.write(out);
  write_status(reason, out);
}

template <VersionMessage type>
VersionEnd<type> VersionEnd<type>::read(ByteReader& in) {
  const auto of = VersionStep<type>::read(in);
  return {.version = of.version, .epoch = of.epoch, .reason = read_heard(in)};
}

template struct VersionEnd<VersionMessage::kRefuse>;
template struct VersionEnd<VersionMessage::kRevoke>;
template struct VersionEnd<VersionMessage::kGot>;

void Decided::write(ByteWriter& out) const {
  VersionStep<kType>{.version = version, .epoch = epoch}.write(out);
  out.put(verdict);
  write_status(reason, out);
}

Decided Decided::read(ByteReader& in) {
  const auto of = VersionStep<kType>::read(in);
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

}  // namespace tessera::bus
