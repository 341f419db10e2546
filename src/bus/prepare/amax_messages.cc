#include "bus/prepare/amax_messages.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>

namespace tessera::bus {

// Keys travel as they lie in memory: u32 group, u32 matrix, u32 row, u32 column.
static_assert(sizeof(AmaxKey) == 16 && std::is_trivially_copyable_v<AmaxKey>);

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

template <AmaxMessage type>
void AmaxValues<type>::write(ByteWriter& out) const {
  out.put(version);
  out.put(epoch);
  write_status(status, out);
  write_finding(finding, out);
  out.put_bytes(std::as_bytes(std::span(amaxes)));
}

template <AmaxMessage type>
AmaxValues<type> AmaxValues<type>::read(ByteReader& in, std::vector<float> room) {
  const std::string_view what = kNameOf<type>;
  AmaxValues message;
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

template struct AmaxValues<AmaxMessage::kAmaxes>;
template struct AmaxValues<AmaxMessage::kAgreed>;

}  // namespace tessera::bus
