// What ranks publish in the store, and under which keys (docs/formats/bus-protocol.md). Values; whatever is read is
// checked.
//
//   NS/rank/JOB/RANK                          RankRecord    one a process: claims (job, rank)
//   NS/pair/PAIR/JOB/RANK                     PairRecord
//   NS/pair/PAIR/!failed/JOB/RANK             FailureRecord  why that rank gave up; outlives it
//   NS/batch/PAIR/BATCH/JOBS/JOB/manifest     ManifestRecord  by rank 0
//   NS/batch/PAIR/BATCH/JOBS/JOB/rank/RANK    BatchRecord
//   NS/batch/PAIR/BATCH/JOBS/JOB/failed/RANK  FailureRecord  likewise
//   NS/batch/PAIR/BATCH/JOBS/JOB/renew/RANK   RenewalRecord
//   NS/batch/PAIR/BATCH/JOBS/JOB/gathered/RANK  GatheredRecord
//   NS/batch/PAIR/BATCH/JOBS/JOB/decision/SESSION/EPOCH
//                                             "commit" or "abort": of a staged version
//
// JOBS names the two jobs that meet, in alphabetical order: "inference+trainer". A sender registers a batch once for
// each receiving job.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fields.h"
#include "base/message.h"
#include "base/process.h"
#include "bus/registration/manifest.h"
#include "peer/identity.h"
#include "tessera/bus.h"
#include "tessera/layout.h"

namespace tessera::bus {

struct RankRecord {
  Incarnation incarnation;
  int32_t world = 0;
  std::string address;  // the agent's Unix socket
  std::string release;
  std::optional<Incarnation> worker;  // whose agent that process is, if it is a daemon

  static void fields(auto& f, auto& self) {
    f("incarnation", self.incarnation);
    f("world", self.world);
    f.require(self.world >= 1 && self.world <= kMaxWorld, "store key {}: a world of {}"_message, f.what(), self.world);
    f("address", self.address, 108);
    f("release", self.release, 64);
    f("worker", self.worker);
  }
};

struct PairRecord {
  RankRecord rank;
  std::vector<std::string> peers;  // the jobs this rank wants to be joined with, in alphabetical order

  static void fields(auto& f, auto& self) {
    f("rank", self.rank);
    f("peers", self.peers, uint32_t{kMaxPeers}, 64);
    f.require(std::ranges::is_sorted(self.peers), "store key {}: peers out of order"_message, f.what());
  }
};

// Which registration of a batch a record belongs to: processes may register one again and again.
struct Registration {
  Incarnation incarnation;
  uint32_t attempt = 0;  // counts the process' registrations of that batch, from 1

  bool operator==(const Registration&) const = default;
  static void fields(auto& f, auto& self) {
    f("incarnation", self.incarnation);
    f("attempt", self.attempt);
  }
};

struct ManifestRecord {
  Registration of;
  Manifest manifest;

  static void fields(auto& f, auto& self) {
    f("of", self.of);
    f("manifest", self.manifest);
  }
};

struct BatchRecord {
  Registration of;
  bool sends = false;  // offers (or accepts)
  bool digest = true;
  bool delta = false;
  int64_t version = 0;  // that this rank sent last, or holds; 0: none
  int64_t newest = 0;   // that it has offered at all: the next one's number goes on from there
  std::string hash;     // of this rank's manifest
  ManifestDiff diff;    // against rank 0's

  static void fields(auto& f, auto& self) {
    f("of", self.of);
    f("sends", self.sends);
    f("digest", self.digest);
    f("delta", self.delta);
    f("version", self.version);
    f("newest", self.newest);
    f.require(self.version >= 0 && self.newest >= self.version && self.newest <= kMaxVersion,
              "store key {}: version {} of {}"_message, f.what(), self.version, self.newest);
    f("hash", self.hash, 16);
    f("diff", self.diff);
  }
};

// A rank of a process, as a number. A process may have several, each with registrations of its own.
uint64_t speaker_of(const Incarnation& incarnation, std::string_view job, Rank rank);

// The processes that hold the ranks of a job, as a number.
uint64_t membership_of(std::span<const RankRecord> ranks);

// A registration that somebody has read.
struct Seen {
  uint64_t speaker = 0;  // speaker_of() whose it is
  uint32_t attempt = 0;
  bool operator==(const Seen&) const = default;
  static void fields(auto& f, auto& self) {
    f("speaker", self.speaker);
    f("attempt", self.attempt);
  }
};
inline constexpr uint32_t kMaxSeen = 2 * kMaxWorld;

// A rank that cannot register publishes the reason, so that the others need not wait for it.
struct FailureRecord {
  Registration of;  // the one that failed
  Status status;
  std::vector<Seen> seen;  // whose records it read: to them it speaks
  bool only_seen = false;  // and to nobody who comes later: the rank is there for other jobs

  static void fields(auto& f, auto& self) {
    f("of", self.of);
    ErrorCode code = self.status.code();
    error_code_field(f, code, [&](uint8_t byte) {
      f.require(byte != 0 && byte <= kLastErrorCode, "store key {}: unknown error code {}"_message, f.what(), byte);
    });
    status_text_field(f, code, self.status, 64 << 10);
    f("seen", self.seen, kMaxSeen);
    f("only_seen", self.only_seen);
  }
};

// A rank that registers again has read what others registered before, and will not build on that: those who have kept
// it register again. There while it registers.
struct RenewalRecord {
  Registration of;
  std::vector<Seen> stale;

  static void fields(auto& f, auto& self) {
    f("of", self.of);
    f("stale", self.stale, kMaxSeen);
  }
};

// The value that a rank gives the other ranks of its job before it registers.
struct GatheredRecord {
  Registration of;
  std::string value;

  static void fields(auto& f, auto& self) {
    f("of", self.of);
    f("value", self.value, uint32_t{kMaxGathered});
  }
};

// A record begins with its version. Throws Error(kMismatch) that names both where it is another one.
void begin_record(ByteWriter& out);
ByteReader begin_record(std::string_view key, std::string_view value);
std::string record_value(const ByteWriter& out);

// As the value of a key.
template <typename Record>
std::string write_record(const Record& record) {
  ByteWriter out;
  begin_record(out);
  write_fields(record, out);
  return record_value(out);
}
// Throws Error that names `key`.
template <typename Record>
Record read_record(std::string_view key, std::string_view value) {
  ByteReader in = begin_record(key, value);
  Record record;
  read_fields(in, record);
  in.finish();
  return record;
}

// A ManifestRecord. Throws Error(kInvalidArgument) if the store holds no value of that size.
std::string write_manifest(const Registration& of, const Manifest& manifest);

// Whose record of a batch it is, without reading the rest.
Registration record_registration(std::string_view key, std::string_view value);
// Manifest::hash() of a ManifestRecord's, likewise.
std::string record_manifest_hash(std::string_view key, std::string_view value);

std::string rank_key(std::string_view name_space, std::string_view job, Rank rank);
std::string pair_prefix(std::string_view name_space, std::string_view pair);
std::string pair_key(std::string_view name_space, std::string_view pair, std::string_view job, Rank rank);
std::string batch_prefix(std::string_view name_space, std::string_view pair, std::string_view batch);
std::string pair_failure_prefix(std::string_view name_space, std::string_view pair);
// What follows lies below `meeting`, a meeting_prefix().
std::string meeting_prefix(std::string_view name_space, std::string_view pair, std::string_view batch,
                           std::string_view job, std::string_view other_job);
std::string manifest_key(std::string_view meeting, std::string_view job);
std::string batch_key(std::string_view meeting, std::string_view job, Rank rank);
std::string failure_prefix(std::string_view meeting, std::string_view job);
std::string failure_key(std::string_view meeting, std::string_view job, Rank rank);
std::string renewal_prefix(std::string_view meeting, std::string_view job);
std::string renewal_key(std::string_view meeting, std::string_view job, Rank rank);
std::string gathered_key(std::string_view meeting, std::string_view job, Rank rank);
std::string decision_prefix(std::string_view meeting, std::string_view job);  // of all versions
std::string decision_key(std::string_view meeting, std::string_view job, std::string_view session, uint32_t epoch);
// The other one of the two jobs that meet under `key`, a key below a batch_prefix(); empty if `job` is none of them.
std::string met_job(std::string_view batch_prefix, std::string_view key, std::string_view job);

}  // namespace tessera::bus
