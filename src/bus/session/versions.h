// Messages about versions over a prepared connection (peer/exchange/messages.h, docs/formats/bus-protocol.md):
//
//   puller                              source
//   ------                              ------
//                              Offer     a version is ready        (Withdraw: no longer)
//   Hold                                 rank 0: keep it, I may choose it   (Release: I do not)
//                              Held      (Refuse)
//   Take                                 may I read it?
//                              Grant     (Refuse)
//                              Digests   one for each route
//   Progress                             now and then
//   Done                                 I have it, or why not
//
//   Ahead                                others of your job offer a newer version
//
// And between ranks of a receiving job: Newest, which version all senders offer, and Chosen (epoch, version), from rank
// 0 to the others; Got, from them, once they have pulled it; Decided, to them, whether a staged version is committed.
// Revoke asks a puller to stop reading.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/message.h"
#include "codec/simd/digest.h"
#include "peer/exchange/messages.h"
#include "peer/message.h"
#include "tessera/bus.h"
#include "tessera/error.h"

namespace tessera::bus {

enum class VersionMessage : uint16_t {
  kOffer = 8,
  kWithdraw,
  kTake,
  kGrant,
  kRefuse,
  kRevoke,
  kDigests,
  kProgress,
  kDone,
  kChosen,
  kHold = 20,
  kHeld,
  kRelease,
  kGot,
  kDecided,
  kNewest = 43,
  kAhead = 46,
};

// Digests travel as they are in memory: u64 d0, u64 d1, u64 elements.
static_assert(sizeof(Digest) == 24 && std::is_trivially_copyable_v<Digest>);
static_assert(offsetof(Digest, d) == 0 && offsetof(Digest, elements) == 16);

// A peer that names another version has not counted as the bus does.
void require_version(auto& f, std::string_view message, int64_t version) {
  f.require(version >= 1 && version <= kMaxVersion, "{}: version {}"_message, message, version);
}

// A version, and the slot that holds it.
struct Offer {
  static constexpr auto kType = VersionMessage::kOffer;
  int64_t version = 0;
  uint32_t slot = 0;  // index of the places in Attached
  static void fields(auto& f, auto& self) {
    f("version", self.version);
    f("slot", self.slot);
    require_version(f, kNameOf<kType>, self.version);
  }
};

// A version and the number of a transfer, with which most of the following messages begin.
template <VersionMessage type>
void version_fields(auto& f, auto& self) {
  f("version", self.version);
  f("epoch", self.epoch);
  require_version(f, kNameOf<type>, self.version);
}

// Messages about one version differ only in their type.
template <VersionMessage type>
struct VersionStep {
  static constexpr auto kType = type;
  int64_t version = 0;
  uint32_t epoch = 0;  // the transfer's number; 0 in a Withdraw
  static void fields(auto& f, auto& self) { version_fields<type>(f, self); }
};
using Withdraw = VersionStep<VersionMessage::kWithdraw>;
using Chosen = VersionStep<VersionMessage::kChosen>;
using Hold = VersionStep<VersionMessage::kHold>;
using Held = VersionStep<VersionMessage::kHeld>;
using Release = VersionStep<VersionMessage::kRelease>;

// Identifies a state of the source's tensors among all that it has granted over this connection; 0: none to build on.
using Stamp = uint32_t;

struct Take {
  static constexpr auto kType = VersionMessage::kTake;
  int64_t version = 0;
  uint32_t epoch = 0;
  Stamp held = 0;  // of the last Grant, if the puller's tensors still hold that
  // The puller reads until it has said Done, whatever becomes of this link: until then, or until its process has ended
  // or has attached again, the source writes nothing there.
  bool lease = false;
  // A second Take of an epoch asks the source to pack everything that a stream carries again, in full; the stream's
  // epoch then has this bit.
  static constexpr uint32_t kSecondFill = uint32_t{1} << 31;
  static void fields(auto& f, auto& self) {
    version_fields<kType>(f, self);
    f("held", self.held);
    f("lease", self.lease);
  }
};

struct Grant {
  static constexpr auto kType = VersionMessage::kGrant;
  static constexpr int64_t kInFull = -1;
  int64_t version = 0;
  uint32_t epoch = 0;
  Stamp stamp = 0;  // of the granted version
  // For each route of the connection the size of its delta to what the puller claims to hold, or kInFull. Empty: all
  // are in full.
  std::vector<int64_t> deltas = {};
  static void fields(auto& f, auto& self) {
    version_fields<kType>(f, self);
    f("stamp", self.stamp);
    f.array("deltas", self.deltas, kMaxRoutes);
    const auto bad = std::ranges::find_if(self.deltas, [](int64_t bytes) { return bytes < kInFull; });
    if (bad != self.deltas.end()) f.require(false, "Grant: a delta of {} bytes"_message, *bad);
  }
};

// Refuse and Revoke: the source sends them instead of Held or Grant, or later; the puller fails with `reason`. Got: ok,
// or why that rank does not have the version.
template <VersionMessage type>
struct VersionEnd {
  static constexpr auto kType = type;
  int64_t version = 0;
  uint32_t epoch = 0;  // of the Take that this answers
  Status reason;
  static void fields(auto& f, auto& self) {
    version_fields<type>(f, self);
    heard_status_field(f, self.reason);
  }
};
using Refuse = VersionEnd<VersionMessage::kRefuse>;
using Revoke = VersionEnd<VersionMessage::kRevoke>;
using Got = VersionEnd<VersionMessage::kGot>;

struct Decided {
  static constexpr auto kType = VersionMessage::kDecided;
  enum class Verdict : uint8_t {
    kAbort,
    kCommit,
    kAskStore,  // rank 0 does not know the store's decision
  };
  int64_t version = 0;
  uint32_t epoch = 0;
  Verdict verdict = Verdict::kAbort;
  Status reason;  // of an abort
  static void fields(auto& f, auto& self) {
    version_fields<kType>(f, self);
    f("verdict", self.verdict, Verdict::kAskStore);
    heard_status_field(f, self.reason);
  }
};

// Rank 0 of the receivers, which hears from all senders, tells the others.
struct Newest {
  static constexpr auto kType = VersionMessage::kNewest;
  int64_t version = 0;  // the newest that every sender offers; 0: none
  static void fields(auto& f, auto& self) {
    f("version", self.version);
    f.require(self.version >= 0 && self.version <= kMaxVersion, "Newest: version {}"_message, self.version);
  }
};

// From a puller that hears from several ranks of the source's job: rank 0 of the receivers, or the owner of a
// reduction.
struct Ahead {
  static constexpr auto kType = VersionMessage::kAhead;
  int64_t version = 0;  // that another rank of that job offers, while the source offers an older one
  static void fields(auto& f, auto& self) {
    f("version", self.version);
    require_version(f, kNameOf<kType>, self.version);
  }
};

struct Digests {
  static constexpr auto kType = VersionMessage::kDigests;
  int64_t version = 0;
  // One for each route of this connection that has bytes in the sample, then the remainder of each quantised route,
  // then the piece of each route that may travel as a delta and is cast (none for the others).
  std::vector<Digest> digests;
  static void fields(auto& f, auto& self) {
    f("version", self.version);
    f.array("digests", self.digests, kMaxRoutes);
  }
};

struct ProgressReport {
  static constexpr auto kType = VersionMessage::kProgress;
  int64_t version = 0;
  int64_t bytes = 0;  // pulled over this connection so far
  static void fields(auto& f, auto& self) {
    f("version", self.version);
    f("bytes", self.bytes);
  }
};

struct Done {
  static constexpr auto kType = VersionMessage::kDone;
  int64_t version = 0;
  int64_t bytes = 0;
  Status status;
  static void fields(auto& f, auto& self) {
    f("version", self.version);
    f("bytes", self.bytes);
    heard_status_field(f, self.status);
  }
};

using VersionMessages = MessageList<Offer, Withdraw, Take, Grant, Refuse, Revoke, Digests, ProgressReport, Done, Chosen,
                                    Hold, Held, Release, Got, Decided, Newest, Ahead>;

}  // namespace tessera::bus
