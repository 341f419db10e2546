// What ranks publish in the store, and under which keys (docs/formats/bus-protocol.md). Values; whatever is read is
// checked.
//
//   NS/rank/JOB/RANK                          RankRecord    one for each process: claims (job, rank)
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
// JOBS names the two jobs in alphabetical order: "inference+trainer". A sender registers a batch once for each
// receiving job.
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
#include "bus/registration/digest_choice.h"
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
  std::optional<Incarnation> worker;  // the worker of that process, if it is a daemon

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
  std::vector<std::string> peers;  // the jobs that this rank wants to join, in alphabetical order

  static void fields(auto& f, auto& self) {
    f("rank", self.rank);
    f("peers", self.peers, uint32_t{kMaxPeers}, 64);
    f.require(std::ranges::is_sorted(self.peers), "store key {}: peers out of order"_message, f.what());
  }
};

// The registration of a batch that a record belongs to: processes may register a batch repeatedly.
struct Registration {
  Incarnation incarnation;
  uint32_t attempt = 0;  // counts the process's registrations of that batch, from 1

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
  bool sends = false;  // otherwise it receives
  DigestMode digest = {};
  bool delta = false;
  int64_t version = 0;  // that this rank sent last, or holds; 0: none
  int64_t newest = 0;   // that it has offered at all: numbering goes on from there
  std::string hash;     // of this rank's manifest
  ManifestDiff diff;    // relative to rank 0's

  static void fields(auto& f, auto& self) {
    f("of", self.of);
    f("sends", self.sends);
    digest_field(f, self.digest);
    f("delta", self.delta);
    f("version", self.version);
    f("newest", self.newest);
    f.require(self.version >= 0 && self.newest >= self.version && self.newest <= kMaxVersion,
              "store key {}: version {} of {}"_message, f.what(), self.version, self.newest);
    f("hash", self.hash, 16);
    f("diff", self.diff);
  }
};

// Identifies a rank of a process by a number. A process may have several ranks, each with separate registrations.
uint64_t speaker_of(const Incarnation& incarnation, std::string_view job, Rank rank);

// Identifies the processes that hold the ranks of a job by a number.
uint64_t membership_of(std::span<const RankRecord> ranks);

// A registration that somebody has read.
struct Seen {
  uint64_t speaker = 0;  // speaker_of() its process
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
  Registration of;  // the registration that failed
  Status status;
  std::vector<Seen> seen;  // the registrations that it had read: the failure is for them
  bool only_seen = false;  // and not for ranks that come later: the rank remains for other jobs

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

// A rank that registers again has read earlier registrations of others, and will not build on them: the ranks that
// still use those must register again. The record exists while it registers.
struct RenewalRecord {
  Registration of;
  std::vector<Seen> stale;

  static void fields(auto& f, auto& self) {
    f("of", self.of);
    f("stale", self.stale, kMaxSeen);
  }
};

// The value that a rank publishes for the other ranks of its job before it registers.
struct GatheredRecord {
  Registration of;
  std::string value;

  static void fields(auto& f, auto& self) {
    f("of", self.of);
    f("value", self.value, uint32_t{kMaxGathered});
  }
};

// A record begins with its version. Throws Error(kMismatch), which names both versions, if they differ.
void begin_record(ByteWriter& out);
ByteReader begin_record(std::string_view key, std::string_view value);
std::string record_value(const ByteWriter& out);

// The value to store under a key.
template <typename Record>
std::string write_record(const Record& record) {
  ByteWriter out;
  begin_record(out);
  write_fields(record, out);
  return record_value(out);
}
// Throws Error, which names `key`.
template <typename Record>
Record read_record(std::string_view key, std::string_view value) {
  ByteReader in = begin_record(key, value);
  Record record;
  read_fields(in, record);
  in.finish();
  return record;
}

// A ManifestRecord. Throws Error(kInvalidArgument) if it is too large for a value of the store.
std::string write_manifest(const Registration& of, const Manifest& manifest);

// The registration that a record of a batch belongs to; does not read the rest.
Registration record_registration(std::string_view key, std::string_view value);
// The Manifest::hash() in a ManifestRecord; likewise.
std::string record_manifest_hash(std::string_view key, std::string_view value);

std::string rank_key(std::string_view name_space, std::string_view job, Rank rank);
std::string pair_prefix(std::string_view name_space, std::string_view pair);
std::string pair_key(std::string_view name_space, std::string_view pair, std::string_view job, Rank rank);
std::string batch_prefix(std::string_view name_space, std::string_view pair, std::string_view batch);
std::string pair_failure_prefix(std::string_view name_space, std::string_view pair);
// All keys below are under `meeting`, a meeting_prefix().
std::string meeting_prefix(std::string_view name_space, std::string_view pair, std::string_view batch,
                           std::string_view job, std::string_view other_job);
std::string manifest_key(std::string_view meeting, std::string_view job);
std::string batch_key(std::string_view meeting, std::string_view job, Rank rank);
std::string failure_prefix(std::string_view meeting, std::string_view job);
std::string failure_key(std::string_view meeting, std::string_view job, Rank rank);
std::string renewal_prefix(std::string_view meeting, std::string_view job);
std::string renewal_key(std::string_view meeting, std::string_view job, Rank rank);
std::string gathered_key(std::string_view meeting, std::string_view job, Rank rank);
std::string decision_prefix(std::string_view meeting, std::string_view job);  // for all versions
std::string decision_key(std::string_view meeting, std::string_view job, std::string_view session, uint32_t epoch);
// The parts of a key, or of its end, between slashes.
std::vector<std::string_view> parts_of_key(std::string_view key);
// The other job of the two in `key`, a key below a batch_prefix(); empty if `job` is neither of them.
std::string met_job(std::string_view batch_prefix, std::string_view key, std::string_view job);

}  // namespace tessera::bus
