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

constexpr uint16_t kRecordVersion = 3;
constexpr uint32_t kMaxFailureBytes = 64 << 10;

ByteWriter begin() {
  ByteWriter out;
  out.put(kRecordVersion);
  return out;
}

ByteReader begin(std::string_view key, std::string_view value) {
  ByteReader in(std::as_bytes(std::span(value)), key);
  if (const auto version = in.get<uint16_t>(); version != kRecordVersion)
    fail(ErrorCode::kMismatch, "store key {}: record version {}, this release reads {}", key, version, kRecordVersion);
  return in;
}

std::string finish(const ByteWriter& out) {
  return std::string(as_store_value(out.view()));
}

void write_rank(const RankRecord& record, ByteWriter& out) {
  record.incarnation.write(out);
  out.put(record.world);
  out.put_string(record.address);
  out.put_string(record.release);
  out.put(record.worker.has_value());
  if (record.worker) record.worker->write(out);
}

RankRecord read_rank(ByteReader& in, std::string_view key) {
  RankRecord record;
  record.incarnation = Incarnation::read(in);
  record.world = in.get<int32_t>();
  if (record.world < 1 || record.world > kMaxWorld)
    fail(ErrorCode::kInvalidArgument, "store key {}: a world of {}", key, record.world);
  record.address = in.get_string(108);
  record.release = in.get_string(64);
  if (in.get_bool()) record.worker = Incarnation::read(in);
  return record;
}

void write_seen(const std::vector<Seen>& seen, ByteWriter& out) {
  out.put(static_cast<uint32_t>(seen.size()));
  for (const Seen& one : seen) {
    out.put(one.speaker);
    out.put(one.attempt);
  }
}

std::vector<Seen> read_seen(ByteReader& in) {
  std::vector<Seen> seen;
  for (uint32_t count = in.get_count(2 * kMaxWorld, 12); count > 0; --count) {
    Seen one;
    one.speaker = in.get<uint64_t>();
    one.attempt = in.get<uint32_t>();
    seen.push_back(one);
  }
  return seen;
}

}  // namespace

std::string RankRecord::write() const {
  ByteWriter out = begin();
  write_rank(*this, out);
  return finish(out);
}

RankRecord RankRecord::read(std::string_view key, std::string_view value) {
  ByteReader in = begin(key, value);
  RankRecord record = read_rank(in, key);
  in.finish();
  return record;
}

std::string PairRecord::write() const {
  ByteWriter out = begin();
  write_rank(rank, out);
  out.put_string(peer);
  return finish(out);
}

PairRecord PairRecord::read(std::string_view key, std::string_view value) {
  ByteReader in = begin(key, value);
  PairRecord record;
  record.rank = read_rank(in, key);
  record.peer = in.get_string(64);
  in.finish();
  return record;
}

void Registration::write(ByteWriter& out) const {
  incarnation.write(out);
  out.put(attempt);
}

Registration Registration::read(ByteReader& in) {
  Registration of;
  of.incarnation = Incarnation::read(in);
  of.attempt = in.get<uint32_t>();
  return of;
}

uint64_t speaker_of(const Incarnation& incarnation, std::string_view job, Rank rank) {
  const std::string name = rank_name(job, rank);
  return XXH3_64bits_withSeed(name.data(), name.size(), incarnation.nonce);
}

uint64_t membership_of(std::span<const RankRecord> ranks) {
  ByteWriter out;
  for (const RankRecord& rank : ranks) rank.incarnation.write(out);
  return XXH3_64bits(out.view().data(), out.size());
}

std::string ManifestRecord::write() const {
  ByteWriter out = begin();
  of.write(out);
  manifest.write(out);
  if (out.size() > kMaxStoreValueBytes)
    fail(
        ErrorCode::kInvalidArgument,
        "the manifest of {} tensors takes {} bytes, the store holds at most {} a value: register it as several batches",
        manifest.entries.size(), out.size(), kMaxStoreValueBytes);
  return finish(out);
}

ManifestRecord ManifestRecord::read(std::string_view key, std::string_view value) {
  ByteReader in = begin(key, value);
  ManifestRecord record;
  record.of = Registration::read(in);
  record.manifest = Manifest::read(in);
  in.finish();
  return record;
}

std::string BatchRecord::write() const {
  ByteWriter out = begin();
  of.write(out);
  out.put(sends);
  out.put(digest);
  out.put(delta);
  out.put(version);
  out.put(newest);
  out.put_string(hash);
  diff.write(out);
  return finish(out);
}

BatchRecord BatchRecord::read(std::string_view key, std::string_view value) {
  ByteReader in = begin(key, value);
  BatchRecord record;
  record.of = Registration::read(in);
  record.sends = in.get_bool();
  record.digest = in.get_bool();
  record.delta = in.get_bool();
  record.version = in.get<int64_t>();
  record.newest = in.get<int64_t>();
  if (record.version < 0 || record.newest < record.version)
    fail(ErrorCode::kInvalidArgument, "store key {}: version {} of {}", key, record.version, record.newest);
  record.hash = in.get_string(16);
  record.diff = ManifestDiff::read(in);
  in.finish();
  return record;
}

std::string FailureRecord::write() const {
  ByteWriter out = begin();
  of.write(out);
  out.put(static_cast<uint8_t>(status.code()));
  out.put_string(std::string_view(status.message()).substr(0, kMaxFailureBytes));
  write_seen(seen, out);
  return finish(out);
}

FailureRecord FailureRecord::read(std::string_view key, std::string_view value) {
  ByteReader in = begin(key, value);
  FailureRecord record;
  record.of = Registration::read(in);
  const auto code = in.get<uint8_t>();
  if (code == 0 || code > static_cast<uint8_t>(ErrorCode::kInternal))
    fail(ErrorCode::kInvalidArgument, "store key {}: unknown error code {}", key, code);
  record.status = Status(static_cast<ErrorCode>(code), in.get_string(kMaxFailureBytes));
  record.seen = read_seen(in);
  in.finish();
  return record;
}

std::string RenewalRecord::write() const {
  ByteWriter out = begin();
  of.write(out);
  write_seen(stale, out);
  return finish(out);
}

RenewalRecord RenewalRecord::read(std::string_view key, std::string_view value) {
  ByteReader in = begin(key, value);
  RenewalRecord record;
  record.of = Registration::read(in);
  record.stale = read_seen(in);
  in.finish();
  return record;
}

std::string GatheredRecord::write() const {
  ByteWriter out = begin();
  of.write(out);
  out.put_string(value);
  return finish(out);
}

GatheredRecord GatheredRecord::read(std::string_view key, std::string_view value) {
  ByteReader in = begin(key, value);
  GatheredRecord record;
  record.of = Registration::read(in);
  record.value = in.get_string(kMaxGathered);
  in.finish();
  return record;
}

Registration record_registration(std::string_view key, std::string_view value) {
  ByteReader in = begin(key, value);
  return Registration::read(in);
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

std::string failure_key(std::string_view meeting, std::string_view job, Rank rank) {
  return fmt::format("{}{}/failed/{}", meeting, job, rank);
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
