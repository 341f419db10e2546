// What agents say to each other, one struct a message type (docs/formats/bus-protocol.md). Frames carry the type;
// `read` checks everything against limits before it believes it.
//
// A connection is opened by the side that pulls: a receiver to each sender, the owner of a reduction to each of its
// peers, a receiver to its own rank 0, a sender that quantises to its own. It says Hello, is answered Welcome (or
// Reject), says Attach, and then:
//
//   puller                              source
//   ------                              ------
//                              Attached  arenas (with descriptors) and where each tensor lies
//   Prepare                              ring wanted? routes that ties make superfluous
//                              Prepared  with the ring's descriptor, if wanted
//                              Offer     a version is ready        (Withdraw: not any more)
//   Hold                                 rank 0: keep it, I may choose it   (Release: I do not)
//                              Held      (Refuse)
//   Take                                 may I read it?
//                              Grant     (Refuse)
//                              Digests   one a route
//   Progress                             now and then
//   Done                                 I have it, or why not
//
// and between ranks of a receiving job: Chosen (epoch, version), from rank 0 to the others; Got, from them, once they
// have pulled it; Decided, to them, whether a staged version is committed. Between ranks of a sending job that
// quantises: Joins, once, Amaxes (of a version), to rank 0, and Agreed, from it (amax_exchange.h). Either side ends
// with Detach; Broken passes on that a third rank was lost; Revoke asks a puller to stop reading.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/process.h"
#include "codec/simd/digest.h"
#include "tessera/error.h"
#include "tessera/layout.h"
#include "transport/memory_desc.h"

namespace tessera::bus {

inline constexpr uint32_t kBusMagic = 0x42535354;  // "TSSB"
// Protocol versions that this release speaks: two jobs may run different releases.
inline constexpr uint16_t kProtocolMin = 4;
inline constexpr uint16_t kProtocolMax = 4;
inline constexpr uint32_t kMaxHelloBytes = 4096;
inline constexpr uint32_t kMaxMessageBytes = 256u << 20;
inline constexpr uint32_t kMaxRoutes = 1u << 24;  // of one pair of ranks
inline constexpr uint32_t kMaxSlots = 8;          // versions that a sender keeps
inline constexpr uint32_t kMaxAmaxes = 1u << 22;  // that one rank joins

enum class MessageType : uint16_t {
  kHello = 1,
  kWelcome,
  kReject,
  kAttach,
  kAttached,
  kPrepare,
  kPrepared,
  kOffer,
  kWithdraw,
  kTake,
  kGrant,
  kRefuse,
  kRevoke,
  kDigests,
  kProgress,
  kDone,
  kChosen,
  kDetach,
  kBroken,
  kHold,
  kHeld,
  kRelease,
  kGot,
  kDecided,
  kInspect,  // report.h
  kReport,
  kLendArenas,  // from here on between an agent and its worker: lending_messages.h
  kMakeRun,
  kGiveRing,
  kStartRun,
  kAbortRun,
  kDropRun,
  kRunProgress,
  kRunEnded,
  kSync,
  kSynced,
  kJoins,  // from here on between senders again
  kAmaxes,
  kAgreed,
};
std::string_view to_string(MessageType type);

// An error code (u8) and a text, cut where it is long.
void write_status(const Status& status, ByteWriter& out);
Status read_status(ByteReader& in);

// Where a message below carries a status, its reader takes Cancelled for PeerLost: what another rank's user has
// cancelled was not cancelled by this rank's.

// Who is calling, and which protocol versions it speaks. The range and the release stay where they are in every
// version; without a common one nothing else is read.
struct Hello {
  static constexpr MessageType kType = MessageType::kHello;
  uint16_t protocol_min = 0;
  uint16_t protocol_max = 0;
  std::string release;
  std::string name_space;
  std::string job;
  Rank rank = 0;
  Incarnation incarnation;
  bool speaks_ours() const { return protocol_max >= kProtocolMin && protocol_min <= kProtocolMax; }
  void write(ByteWriter& out) const;
  static Hello read(ByteReader& in);
};

struct Welcome {
  static constexpr MessageType kType = MessageType::kWelcome;
  uint16_t protocol = 0;  // the highest both speak
  std::string release;
  std::string job;
  Rank rank = 0;
  Incarnation incarnation;
  void write(ByteWriter& out) const;
  static Welcome read(ByteReader& in);
};

// Ends a connection with a reason that the other end reports. Longer texts are cut: it fits wherever a Hello does.
struct Reject {
  static constexpr MessageType kType = MessageType::kReject;
  ErrorCode code = ErrorCode::kInternal;
  std::string text;
  void write(ByteWriter& out) const;
  static Reject read(ByteReader& in);
};

struct Attach {
  static constexpr MessageType kType = MessageType::kAttach;
  enum class Purpose : uint8_t {
    kPull,     // a receiver, to a sender
    kReduce,   // the owner of a reduction, to a peer of its own job
    kControl,  // a receiver, to its own rank 0
    kAgree,    // a sender that quantises, to its own rank 0
  };
  std::string pair;
  std::string batch;
  Purpose purpose = Purpose::kPull;
  std::string session;  // which registrations the caller has read: both must have planned the same
  void write(ByteWriter& out) const;
  static Attach read(ByteReader& in);
};

// Where the source's data lies, in the order of the routes between the two ranks: one entry a tensor, or one a route
// where the tensor is reduced first (docs/formats/bus-protocol.md).
struct Attached {
  static constexpr MessageType kType = MessageType::kAttached;
  struct Place {
    MemoryDesc memory;
    uint64_t origin = 0;         // of the first element, from the start of `memory`
    std::vector<Index> strides;  // bytes
    uint64_t slot_bytes = 0;     // slot s lies s times as far behind
    // Where the route's delta piece lies, if it may travel as one; slot s likewise.
    std::optional<MemoryDesc> delta = {};
    uint64_t delta_slot_bytes = 0;
  };
  uint32_t slots = 1;             // that Offer names; one where tensors are read in place
  std::vector<ArenaDesc> arenas;  // one descriptor each, with this frame
  bool more_arenas = false;       // another Attached follows; only the last one has places
  std::vector<Place> places;
  void write(ByteWriter& out) const;
  static Attached read(ByteReader& in);
};

struct Prepare {
  static constexpr MessageType kType = MessageType::kPrepare;
  bool ring = false;
  std::vector<uint32_t> skipped;  // positions in the routes of this connection, ascending
  void write(ByteWriter& out) const;
  static Prepare read(ByteReader& in);
};

struct Prepared {
  static constexpr MessageType kType = MessageType::kPrepared;
  void write(ByteWriter&) const {}
  static Prepared read(ByteReader&) { return {}; }
};

// Messages about one version differ in their type alone.
template <MessageType type>
struct VersionMessage {
  static constexpr MessageType kType = type;
  int64_t version = 0;
  uint32_t epoch = 0;  // the transfer's number; Offer: the slot; Withdraw: 0
  void write(ByteWriter& out) const {
    out.put(version);
    out.put(epoch);
  }
  static VersionMessage read(ByteReader& in) {
    VersionMessage message;
    message.version = in.get<int64_t>();
    message.epoch = in.get<uint32_t>();
    if (message.version < 1) fail(ErrorCode::kInvalidArgument, "{}: version {}", to_string(type), message.version);
    return message;
  }
};
using Offer = VersionMessage<MessageType::kOffer>;
using Withdraw = VersionMessage<MessageType::kWithdraw>;
using Chosen = VersionMessage<MessageType::kChosen>;
using Hold = VersionMessage<MessageType::kHold>;
using Held = VersionMessage<MessageType::kHeld>;
using Release = VersionMessage<MessageType::kRelease>;

// A state of the source's tensors, among all that it has granted over this connection; 0: none that can be built upon.
using Stamp = uint32_t;

struct Take {
  static constexpr MessageType kType = MessageType::kTake;
  int64_t version = 0;
  uint32_t epoch = 0;
  Stamp held = 0;  // what the puller's tensors hold, of the last Grant
  void write(ByteWriter& out) const;
  static Take read(ByteReader& in);
};

struct Grant {
  static constexpr MessageType kType = MessageType::kGrant;
  static constexpr int64_t kInFull = -1;
  int64_t version = 0;
  uint32_t epoch = 0;
  Stamp stamp = 0;  // of what is granted
  // One a route of the connection: the bytes of its delta, on top of what the puller has said it holds, or kInFull.
  // Empty: all are in full.
  std::vector<int64_t> deltas = {};
  void write(ByteWriter& out) const;
  static Grant read(ByteReader& in, std::vector<int64_t> room = {});
};

// Refuse and Revoke: what the source says instead of Held or Grant, or after it; `reason` is what the puller fails
// with. Got: ok, or why that rank does not have it.
template <MessageType type>
struct EndMessage {
  static constexpr MessageType kType = type;
  int64_t version = 0;
  uint32_t epoch = 0;  // of the Take that this is about
  Status reason;
  void write(ByteWriter& out) const;
  static EndMessage read(ByteReader& in);
};
using Refuse = EndMessage<MessageType::kRefuse>;
using Revoke = EndMessage<MessageType::kRevoke>;
using Got = EndMessage<MessageType::kGot>;

struct Decided {
  static constexpr MessageType kType = MessageType::kDecided;
  enum class Verdict : uint8_t {
    kAbort,
    kCommit,
    kAskStore,  // rank 0 does not know what the store holds
  };
  int64_t version = 0;
  uint32_t epoch = 0;
  Verdict verdict = Verdict::kAbort;
  Status reason;  // of an abort
  void write(ByteWriter& out) const;
  static Decided read(ByteReader& in);
};

struct Digests {
  static constexpr MessageType kType = MessageType::kDigests;
  int64_t version = 0;
  // One a route of this connection, then the rest of each that is quantised, then the piece of each that may travel as
  // a delta and is cast (of the others' none).
  std::vector<Digest> digests;
  void write(ByteWriter& out) const;
  static Digests read(ByteReader& in, std::vector<Digest> room = {});
};

struct ProgressReport {
  static constexpr MessageType kType = MessageType::kProgress;
  int64_t version = 0;
  int64_t bytes = 0;  // pulled over this connection so far
  void write(ByteWriter& out) const;
  static ProgressReport read(ByteReader& in);
};

struct Done {
  static constexpr MessageType kType = MessageType::kDone;
  int64_t version = 0;
  int64_t bytes = 0;
  Status status;
  void write(ByteWriter& out) const;
  static Done read(ByteReader& in);
};

// An amax that ranks of a sending job agree on: of a matrix, or of a block of it that a rank does not hold whole. Keys
// of several ranks meet or they do not; nothing else is known of them here.
struct AmaxKey {
  static constexpr uint32_t kWhole = UINT32_MAX;  // in place of a block's row and column
  uint32_t group = 0;                             // of tensors that are quantised as one
  uint32_t matrix = 0;
  uint32_t row = kWhole;
  uint32_t column = kWhole;
  auto operator<=>(const AmaxKey&) const = default;
};

// A value that no format takes: NaN or infinity.
struct NonfiniteFinding {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t tensor = kNone;  // ordinal in the match
  uint64_t index = 0;       // row-major
  Rank rank = 0;            // that found it
  float value = 0;
  bool any() const { return tensor != kNone; }
};

struct Joins {
  static constexpr MessageType kType = MessageType::kJoins;
  std::vector<AmaxKey> keys;  // ascending
  void write(ByteWriter& out) const;
  static Joins read(ByteReader& in);
};

// Amaxes: what one rank has of a version; Agreed: what all have.
template <MessageType type>
struct AmaxMessage {
  static constexpr MessageType kType = type;
  int64_t version = 0;
  uint32_t epoch = 0;              // counts what the rank that is not rank 0 has begun, or 0: it will not begin it
  Status status = {};              // not ok: why there are none
  NonfiniteFinding finding = {};   // likewise
  std::vector<float> amaxes = {};  // in the order of that rank's Joins
  void write(ByteWriter& out) const;
  // Amaxes are finite and not negative; there are none where there is a reason for that.
  static AmaxMessage read(ByteReader& in, std::vector<float> room = {});
};
using Amaxes = AmaxMessage<MessageType::kAmaxes>;
using Agreed = AmaxMessage<MessageType::kAgreed>;

struct Detach {
  static constexpr MessageType kType = MessageType::kDetach;
  Status status;  // why, if it is not simply over
  // What the one who is told says of it: `name` is the rank that detached.
  Status reason(const std::string& name) const;
  void write(ByteWriter& out) const;
  static Detach read(ByteReader& in);
};

struct Broken {
  static constexpr MessageType kType = MessageType::kBroken;
  Status status;
  void write(ByteWriter& out) const;
  static Broken read(ByteReader& in);
};

// A whole message out of a frame's payload; throws if anything is left over. `more` is what its read() takes besides.
template <typename Message, typename... More>
Message parse(std::span<const std::byte> payload, More&&... more) {
  ByteReader in(payload, to_string(Message::kType));
  Message message = Message::read(in, std::forward<More>(more)...);
  in.finish();
  return message;
}

}  // namespace tessera::bus
