// What a worker and the agent daemon that works for it say to each other (docs/formats/agent-protocol.md). `read`
// checks everything against limits before it believes it.
//
// Frames over the daemon's Unix socket open a session, which lives as long as that connection, and carry what is large
// or blocks: each such call has a connection of its own. Transfers go through the command queue, whose memory comes
// with Open.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/process.h"
#include "bus/registration/manifest.h"
#include "tessera/bus.h"
#include "tessera/error.h"

namespace tessera::bus {

inline constexpr uint32_t kAgentMagic = 0x41535354;  // "TSSA"
inline constexpr uint16_t kAgentProtocol = 3;
inline constexpr uint32_t kMaxAgentFrame = 512u << 20;

enum class AgentMessage : uint16_t {
  kOpen = 1,
  kOpened,
  kFailed,
  kStop,
  kClose,
  kClosed,
  kPair,
  kPaired,
  kManifest,
  kOffered,
  kArenas,
  kRegister,
  kRegistered,
  kCommit,
  kWaitVersion,
  kWithdraw,
  kNumber,
  kDigests,
  kDigestList,
  kCloseBatch,
  kClosePair,
  kAllGather,
  kGathered,
  kInterrupt,
};

// Commands of the queue.
enum class AgentCommand : uint16_t {
  kSend = 1,
  kRecv,
  kStage,
  kCancel,
  kProgress,
  kState,
  kStats,
};

// The first frame, with the descriptor of the command queue. The session is that of one Bus. As in a Hello, the range
// and the release stay where they are in every version.
struct OpenSession {
  static constexpr AgentMessage kType = AgentMessage::kOpen;
  uint16_t protocol_min = kAgentProtocol;
  uint16_t protocol_max = kAgentProtocol;
  std::string release;
  Incarnation worker;
  BusOptions options;  // all but stop and agent
  bool speaks_ours() const { return protocol_min <= kAgentProtocol && protocol_max >= kAgentProtocol; }
  void write(ByteWriter& out) const;
  static OpenSession read(ByteReader& in);
};

struct SessionOpened {
  static constexpr AgentMessage kType = AgentMessage::kOpened;
  uint16_t protocol = 0;
  std::string release;
  uint64_t session = 0;  // a random number, with which the worker's other connections begin
  Incarnation agent;
  void write(ByteWriter& out) const;
  static SessionOpened read(ByteReader& in);
};

// The answer to a call that fails; it ends the connection.
struct CallFailed {
  static constexpr AgentMessage kType = AgentMessage::kFailed;
  Status status;
  void write(ByteWriter& out) const { out_status(out); }
  static CallFailed read(ByteReader& in);

 private:
  void out_status(ByteWriter& out) const;
};

struct PairCall {
  static constexpr AgentMessage kType = AgentMessage::kPair;
  uint64_t session = 0;
  PairOptions options;
  void write(ByteWriter& out) const;
  static PairCall read(ByteReader& in);
};

struct Paired {
  static constexpr AgentMessage kType = AgentMessage::kPaired;
  uint32_t pair = 0;
  int32_t peer_world = 0;
  void write(ByteWriter& out) const;
  static Paired read(ByteReader& in);
};

struct ManifestCall {
  static constexpr AgentMessage kType = AgentMessage::kManifest;
  uint64_t session = 0;
  uint32_t pair = 0;
  std::string batch;
  Timeout timeout{};
  void write(ByteWriter& out) const;
  static ManifestCall read(ByteReader& in);
};

struct Offered {
  static constexpr AgentMessage kType = AgentMessage::kOffered;
  Manifest manifest;
  void write(ByteWriter& out) const { manifest.write(out); }
  static Offered read(ByteReader& in) { return {.manifest = Manifest::read(in)}; }
};

struct AllGatherCall {
  static constexpr AgentMessage kType = AgentMessage::kAllGather;
  uint64_t session = 0;
  uint32_t pair = 0;
  std::string batch;
  std::string value;
  Timeout timeout{};
  void write(ByteWriter& out) const;
  static AllGatherCall read(ByteReader& in);
};

struct Gathered {
  static constexpr AgentMessage kType = AgentMessage::kGathered;
  std::vector<std::string> values;  // by rank
  void write(ByteWriter& out) const;
  static Gathered read(ByteReader& in);
};

// Before Register, as often as it takes: the descriptors of the arenas that tensors lie in, numbered as they come;
// where the worker lends memory, one more at the end: of a socket that leads to its lender (lending_messages.h).
struct Arenas {
  static constexpr AgentMessage kType = AgentMessage::kArenas;
  uint64_t session = 0;
  void write(ByteWriter& out) const { out.put(session); }
  static Arenas read(ByteReader& in) { return {.session = in.get<uint64_t>()}; }
};

struct RegisterCall {
  static constexpr AgentMessage kType = AgentMessage::kRegister;
  static constexpr uint32_t kLent = UINT32_MAX;  // in place of an arena
  // A spec whose `data` is null; where its first element lies, unless this rank holds nothing of it.
  struct Place {
    uint32_t arena = 0;
    uint64_t offset = 0;  // in it; in the addresses of what is lent
  };
  struct Tensor {
    TensorSpec spec;
    std::optional<Place> place;
  };
  uint64_t session = 0;
  uint32_t pair = 0;
  std::string batch;
  bool sends = false;
  Timeout timeout{};
  BatchOptions options;
  uint64_t lent_bytes = 0;  // of addresses that lent tensors take
  std::vector<Tensor> tensors;
  void write(ByteWriter& out) const;
  static RegisterCall read(ByteReader& in);
};

struct Registered {
  static constexpr AgentMessage kType = AgentMessage::kRegistered;
  uint32_t batch = 0;
  void write(ByteWriter& out) const { out.put(batch); }
  static Registered read(ByteReader& in) { return {.batch = in.get<uint32_t>()}; }
};

// Commit, WaitVersion, Withdraw, Digests, CloseBatch, ClosePair.
struct ObjectCall {
  uint64_t session = 0;
  uint32_t object = 0;  // a batch's or a pair's number
  int64_t version = 0;
  Timeout timeout{};
  void write(ByteWriter& out) const;
  static ObjectCall read(ByteReader& in);
};

// What a call that gives a number, or a truth, is answered.
struct Number {
  static constexpr AgentMessage kType = AgentMessage::kNumber;
  int64_t value = 0;
  void write(ByteWriter& out) const { out.put(value); }
  static Number read(ByteReader& in) { return {.value = in.get<int64_t>()}; }
};

struct DigestList {
  static constexpr AgentMessage kType = AgentMessage::kDigestList;
  std::vector<TensorDigest> digests;
  void write(ByteWriter& out) const;
  static DigestList read(ByteReader& in);
};

// --- in the command queue ---

// Send, Recv, Stage.
struct TransferCommand {
  uint32_t batch = 0;
  std::optional<int64_t> version;
  Timeout timeout{};
  void write(ByteWriter& out) const;
  static TransferCommand read(ByteReader& in);
};

// Cancel, Progress: of the command `id`.
struct CommandId {
  uint64_t id = 0;
  void write(ByteWriter& out) const { out.put(id); }
  static CommandId read(ByteReader& in) { return {.id = in.get<uint64_t>()}; }
};

// How far an operation is; the result of Send, Recv and Stage once it has ended.
struct OperationState {
  bool done = false;
  Status status;  // once it is done
  int64_t version = 0;
  Progress progress;
  void write(ByteWriter& out) const;
  static OperationState read(ByteReader& in);
};

// State, Stats.
struct BatchNumber {
  uint32_t batch = 0;
  void write(ByteWriter& out) const { out.put(batch); }
  static BatchNumber read(ByteReader& in) { return {.batch = in.get<uint32_t>()}; }
};

struct BatchState {
  int64_t version = 0;
  int64_t newest = 0;
  bool torn = false;
  bool undecided = false;
  void write(ByteWriter& out) const;
  static BatchState read(ByteReader& in);
};

void write_stats(const BatchStats& stats, ByteWriter& out);
BatchStats read_stats(ByteReader& in);

// All of `bytes` as one message. Throws Error(kInvalidArgument).
template <typename Message>
Message read_message(std::span<const std::byte> bytes, std::string_view what) {
  ByteReader in(bytes, what);
  Message message = Message::read(in);
  in.finish();
  return message;
}
template <typename Message>
std::vector<std::byte> message_bytes(const Message& message) {
  ByteWriter out;
  message.write(out);
  return out.take();
}

// The name of the socket of the daemon of that rank, in a folder of the runtime directory.
std::string agent_socket_name(const std::string& name_space, const std::string& job, Rank rank);

}  // namespace tessera::bus
