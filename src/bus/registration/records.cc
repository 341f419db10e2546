#include "bus/registration/records.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cctype>
#include <charconv>

#include "base/fail.h"
#include "tessera/bus.h"
#include "tessera/store.h"

namespace tessera::bus {
namespace {

constexpr uint16_t kRecordVersion = 5;
}  // namespace

void begin_record(ByteWriter& out) {
  out.put(kRecordVersion);
}

ByteReader begin_record(std::string_view key, std::string_view value) {
  ByteReader in(std::as_bytes(std::span(value)), key);
  if (const auto version = in.get<uint16_t>(); version != kRecordVersion)
    fail(ErrorCode::kMismatch, "store key {}: record version {}, this release reads {}"_message, key, version,
         kRecordVersion);
  return in;
}

std::string record_value(const ByteWriter& out) {
  return std::string(as_store_value(out.view()));
}

std::string write_manifest(const Registration& of, const Manifest& manifest) {
  ByteWriter out;
  begin_record(out);
  write_fields(of, out);
  write_fields(manifest, out);
  std::string value = record_value(out);
  if (value.size() > kMaxStoreValueBytes)
    fail(
        ErrorCode::kInvalidArgument,
        "the manifest of {} tensors takes {} bytes, the store holds at most {} a value: register it as several batches"_message,
        manifest.entries.size(), value.size(), kMaxStoreValueBytes);
  return value;
}

uint64_t speaker_of(const Incarnation& incarnation, std::string_view job, Rank rank) {
  const std::string name = rank_name(job, rank);
  return XXH3_64bits_withSeed(name.data(), name.size(), incarnation.nonce);
}

uint64_t membership_of(std::span<const RankRecord> ranks) {
  ByteWriter out;
  for (const RankRecord& rank : ranks) write_fields(rank.incarnation, out);
  return XXH3_64bits(out.view().data(), out.size());
}

Registration record_registration(std::string_view key, std::string_view value) {
  ByteReader in = begin_record(key, value);
  return read_fields<Registration>(in);
}

std::string record_manifest_hash(std::string_view key, std::string_view value) {
  ByteReader in = begin_record(key, value);
  read_fields<Registration>(in);
  return Manifest::hash_of(in.rest());
}

std::string rank_key(std::string_view name_space, std::string_view job, Rank rank) {
  return store_key(name_space, "rank", fmt::format("{}/{}", job, rank));
}

std::string pair_prefix(std::string_view name_space, std::string_view pair) {
  return store_key(name_space, "pair", fmt::format("{}/", pair));
}

std::string pair_key(std::string_view name_space, std::string_view pair, std::string_view job, Rank rank) {
  return fmt::format("{}{}/{}", pair_prefix(name_space, pair), job, rank);
}

std::string batch_prefix(std::string_view name_space, std::string_view pair, std::string_view batch) {
  return store_key(name_space, "batch", fmt::format("{}/{}/", pair, batch));
}

std::string pair_failure_prefix(std::string_view name_space, std::string_view pair) {
  return pair_prefix(name_space, pair) + "!failed/";  // no job has such a name
}

std::string meeting_prefix(std::string_view name_space, std::string_view pair, std::string_view batch,
                           std::string_view job, std::string_view other_job) {
  const auto [first, second] = std::minmax(job, other_job);
  return fmt::format("{}{}+{}/", batch_prefix(name_space, pair, batch), first, second);  // no job's name has a '+'
}

std::string manifest_key(std::string_view meeting, std::string_view job) {
  return fmt::format("{}{}/manifest", meeting, job);
}

std::string batch_key(std::string_view meeting, std::string_view job, Rank rank) {
  return fmt::format("{}{}/rank/{}", meeting, job, rank);
}

std::string failure_prefix(std::string_view meeting, std::string_view job) {
  return fmt::format("{}{}/failed/", meeting, job);
}

std::string failure_key(std::string_view meeting, std::string_view job, Rank rank) {
  return fmt::format("{}{}", failure_prefix(meeting, job), rank);
}

std::string renewal_prefix(std::string_view meeting, std::string_view job) {
  return fmt::format("{}{}/renew/", meeting, job);
}

std::string renewal_key(std::string_view meeting, std::string_view job, Rank rank) {
  return fmt::format("{}{}", renewal_prefix(meeting, job), rank);
}

std::string gathered_key(std::string_view meeting, std::string_view job, Rank rank) {
  return fmt::format("{}{}/gathered/{}", meeting, job, rank);
}

std::string decision_prefix(std::string_view meeting, std::string_view job) {
  return fmt::format("{}{}/decision/", meeting, job);
}

std::string decision_key(std::string_view meeting, std::string_view job, std::string_view session, uint32_t epoch) {
  std::string hex;
  for (const char byte : session) hex += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return fmt::format("{}{}/{}", decision_prefix(meeting, job), hex, epoch);
}

std::vector<std::string_view> parts_of_key(std::string_view key) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t slash = key.find('/');
    parts.push_back(key.substr(0, slash));
    if (slash == std::string_view::npos) return parts;
    key.remove_prefix(slash + 1);
  }
}

std::string met_job(std::string_view batch_prefix, std::string_view key, std::string_view job) {
  if (!key.starts_with(batch_prefix)) return {};
  const std::string_view rest = key.substr(batch_prefix.size());
  const std::string_view jobs = rest.substr(0, rest.find('/'));
  const size_t plus = jobs.find('+');
  if (plus == std::string_view::npos) return {};
  const std::string_view first = jobs.substr(0, plus);
  const std::string_view second = jobs.substr(plus + 1);
  if (first != job && second != job) return {};
  return std::string(first == job ? second : first);
}

}  // namespace tessera::bus
