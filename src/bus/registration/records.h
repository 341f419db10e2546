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

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/process.h"
#include "bus/registration/manifest.h"
#include "peer/identity.h"
#include "tessera/layout.h"

namespace tessera::bus {

struct RankRecord {
  Incarnation incarnation;
  int32_t world = 0;
  std::string address;  // the agent's Unix socket
  std::string release;
  std::optional<Incarnation> worker;  // whose agent that process is, if it is a daemon

  std::string write() const;
  static RankRecord read(std::string_view key, std::string_view value);
};

struct PairRecord {
  RankRecord rank;
  std::string peer;  // the job this rank wants to be joined with

  std::string write() const;
  static PairRecord read(std::string_view key, std::string_view value);
};

// Which registration of a batch a record belongs to: processes may register one again and again.
struct Registration {
  Incarnation incarnation;
  uint32_t attempt = 0;  // counts the process' registrations of that batch, from 1

  bool operator==(const Registration&) const = default;
  void write(ByteWriter& out) const;
  static Registration read(ByteReader& in);
};

struct ManifestRecord {
  Registration of;
  Manifest manifest;

  std::string write() const;
  static ManifestRecord read(std::string_view key, std::string_view value);
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

  std::string write() const;
  static BatchRecord read(std::string_view key, std::string_view value);
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
};

// A rank that cannot register tells the others why, so that they need not wait for it.
struct FailureRecord {
  Registration of;  // the one that failed
  Status status;
  std::vector<Seen> seen;  // whose records it read: to them it speaks

  std::string write() const;
  static FailureRecord read(std::string_view key, std::string_view value);
};

// A rank that registers again has read what others registered before, and will not build on that: those who have kept
// it register again. There while it registers.
struct RenewalRecord {
  Registration of;
  std::vector<Seen> stale;

  std::string write() const;
  static RenewalRecord read(std::string_view key, std::string_view value);
};

// What a rank tells its own ranks before it registers.
struct GatheredRecord {
  Registration of;
  std::string value;

  std::string write() const;
  static GatheredRecord read(std::string_view key, std::string_view value);
};

// Whose record of a batch it is, without reading the rest.
Registration record_registration(std::string_view key, std::string_view value);

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
std::string failure_key(std::string_view meeting, std::string_view job, Rank rank);
std::string renewal_prefix(std::string_view meeting, std::string_view job);
std::string renewal_key(std::string_view meeting, std::string_view job, Rank rank);
std::string gathered_key(std::string_view meeting, std::string_view job, Rank rank);
std::string decision_prefix(std::string_view meeting, std::string_view job);  // of all versions
std::string decision_key(std::string_view meeting, std::string_view job, std::string_view session, uint32_t epoch);
// The other one of the two jobs that meet under `key`, a key below a batch_prefix(); empty if `job` is none of them.
std::string met_job(std::string_view batch_prefix, std::string_view key, std::string_view job);

}  // namespace tessera::bus
