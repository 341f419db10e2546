// The messages between a worker and its agent daemon (docs/formats/agent-protocol.md).
//
// Frames over the daemon's Unix socket open a session, which lives as long as that connection, and carry calls that are
// large or block: each has a separate connection. Transfers go through the command queue, whose memory comes with Open.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/fields.h"
#include "base/message.h"
#include "base/process.h"
#include "bus/registration/digest_choice.h"
#include "bus/registration/manifest.h"
#include "peer/handshake.h"
#include "peer/identity.h"
#include "tessera/bus.h"
#include "tessera/error.h"

namespace tessera::bus {

inline constexpr uint32_t kAgentMagic = 0x41535354;  // "TSSA"
inline constexpr uint16_t kAgentProtocol = 6;
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
  kPeers,
  kPeerList,
  kWaitPeers,
  kGiveUp,
  kBatchClosed,
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

inline constexpr uint32_t kMaxPeersTold = 1 << 16;  // jobs may come that no pair names
// Texts and timeouts of this conversation.
inline constexpr uint32_t kMaxRecordText = 700;  // for a status, in a record of the queue
// An empty text means no layout: the pair's, or replicated.
template <typename Fields, typename Of>
void layout_field(Fields& f, Of& layout) {
  std::string text = layout == Layout{} ? std::string() : layout.to_string();
  f("layout", text, 64 << 10);
  if constexpr (kReads<Fields>) layout = text.empty() ? Layout{} : Layout::parse(text);
}
template <typename Fields, typename Time>
void timeout_field(Fields& f, std::string_view name, Time& timeout) {
  int64_t nanoseconds = timeout.count();
  f(name, nanoseconds);
  f.require(nanoseconds >= 0, "agent: a timeout of {} ns"_message, nanoseconds);
  if constexpr (kFills<Fields>) timeout = Timeout(nanoseconds);
}

// The first frame, with the descriptor of the command queue. A session belongs to one Bus. As in a Hello, the version
// range and the release have the same place in every version.
struct OpenSession {
  static constexpr AgentMessage kType = AgentMessage::kOpen;
  uint16_t protocol_min = kAgentProtocol;
  uint16_t protocol_max = kAgentProtocol;
  std::string release;
  Incarnation worker;
  BusOptions options;  // all except stop and agent
  bool speaks_ours() const { return protocol_min <= kAgentProtocol && protocol_max >= kAgentProtocol; }
  static void fields(auto& f, auto& self) {
    f("protocol_min", self.protocol_min);
    f("protocol_max", self.protocol_max);
    f("release", self.release, kMaxReleaseBytes);
    if (self.speaks_ours()) {
      auto& options = self.options;
      f("worker", self.worker);
      f("job", options.job, kMaxNameBytes);
      f("rank", options.rank);
      f("world", options.world);
      f("store", options.store, 4096);
      f("name_space", options.name_space, kMaxNameBytes);
      f("threads", options.threads);
      digest_field(f, options.digest);
      timeout_field(f, "timeout", options.timeout);
      timeout_field(f, "stall", options.stall);
    }
    f.end_of_this_version();
  }
};

struct SessionOpened {
  static constexpr AgentMessage kType = AgentMessage::kOpened;
  uint16_t protocol = 0;
  std::string release;
  uint64_t session = 0;  // a random number that the worker's other connections begin with
  Incarnation agent;
  static void fields(auto& f, auto& self) {
    f("protocol", self.protocol);
    f("release", self.release, kMaxReleaseBytes);
    f("session", self.session);
    f("agent", self.agent);
  }
};

// The answer to a failed call; it ends the connection.
struct CallFailed {
  static constexpr AgentMessage kType = AgentMessage::kFailed;
  Status status;
  static void fields(auto& f, auto& self) { status_field(f, self.status); }
};

struct PairCall {
  static constexpr AgentMessage kType = AgentMessage::kPair;
  uint64_t session = 0;
  PairOptions options;
  static void fields(auto& f, auto& self) {
    f("session", self.session);
    f("name", self.options.name, kMaxNameBytes);
    f("peer", self.options.peer, kMaxNameBytes);
    f("peers", self.options.peers, kMaxPeers, kMaxNameBytes);
    timeout_field(f, "timeout", self.options.timeout);
    layout_field(f, self.options.layout);
  }
};

struct Paired {
  static constexpr AgentMessage kType = AgentMessage::kPaired;
  uint32_t pair = 0;
  int32_t peer_world = 0;
  uint64_t membership = 0;
  static void fields(auto& f, auto& self) {
    f("pair", self.pair);
    f("peer_world", self.peer_world);
    f("membership", self.membership);
  }
};

struct ManifestCall {
  static constexpr AgentMessage kType = AgentMessage::kManifest;
  uint64_t session = 0;
  uint32_t pair = 0;
  std::string batch;
  Timeout timeout{};
  static void fields(auto& f, auto& self) {
    f("session", self.session);
    f("pair", self.pair);
    f("batch", self.batch, kMaxNameBytes);
    timeout_field(f, "timeout", self.timeout);
  }
};

struct Offered {
  static constexpr AgentMessage kType = AgentMessage::kOffered;
  Manifest manifest;
  static void fields(auto& f, auto& self) { f("manifest", self.manifest); }
};

struct AllGatherCall {
  static constexpr AgentMessage kType = AgentMessage::kAllGather;
  uint64_t session = 0;
  uint32_t pair = 0;
  std::string batch;
  std::string value;
  Timeout timeout{};
  static void fields(auto& f, auto& self) {
    f("session", self.session);
    f("pair", self.pair);
    f("batch", self.batch, kMaxNameBytes);
    f("value", self.value, uint32_t{kMaxGathered});
    timeout_field(f, "timeout", self.timeout);
  }
};

struct Gathered {
  static constexpr AgentMessage kType = AgentMessage::kGathered;
  std::vector<std::string> values;  // by rank
  static void fields(auto& f, auto& self) { f("values", self.values, kMaxWorld, uint32_t{kMaxGathered}); }
};

struct GiveUpCall {
  static constexpr AgentMessage kType = AgentMessage::kGiveUp;
  uint64_t session = 0;
  uint32_t pair = 0;
  std::string batch;
  Status why;
  static void fields(auto& f, auto& self) {
    f("session", self.session);
    f("pair", self.pair);
    f("batch", self.batch, kMaxNameBytes);
    status_field(f, self.why);
  }
};

// Sent before Register, as often as needed: the descriptors of the arenas that tensors are in, numbered in this order.
// If the worker lends memory, a socket to its lender comes last (lending/messages.h).
struct Arenas {
  static constexpr AgentMessage kType = AgentMessage::kArenas;
  uint64_t session = 0;
  static void fields(auto& f, auto& self) { f("session", self.session); }
};

struct RegisterCall {
  static constexpr AgentMessage kType = AgentMessage::kRegister;
  static constexpr uint32_t kLent = UINT32_MAX;  // instead of an arena
  // The place of the first element of a spec whose `data` is null, unless this rank holds nothing of it.
  struct Place {
    uint32_t arena = 0;
    uint64_t offset = 0;  // in the arena, or in the addresses of lent memory
    static void fields(auto& f, auto& self) {
      f("arena", self.arena);
      f("offset", self.offset);
    }
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
  uint64_t lent_bytes = 0;  // of addresses for lent tensors
  std::vector<Tensor> tensors;
  static void fields(auto& f, auto& self) {
    f("session", self.session);
    f("pair", self.pair);
    f("batch", self.batch, kMaxNameBytes);
    f("sends", self.sends);
    timeout_field(f, "timeout", self.timeout);
    f("mode", self.options.mode, Mode::kStaged);
    f("snapshots", self.options.snapshots);
    timeout_field(f, "grace", self.options.grace);
    f("pinned", self.options.pinned);
    f("delta", self.options.delta);
    f("lent_bytes", self.lent_bytes);
    tensors_field(f, self.tensors);
  }

 private:
  // Follows the layouts.
  template <typename Fields, typename Tensors>
  static void tensors_field(Fields& f, Tensors& tensors) {
    constexpr size_t kLeastTensor = 4 + 1 + 4 + 4 + 4 + kLeastSource + 1 + 1;  // bytes
    LayoutTable layouts("Register", LayoutTable::Lacking::kAllowed);
    if constexpr (!kFills<Fields>)
      for (const Tensor& tensor : tensors) layouts.add(tensor.spec.layout);
    LayoutTable::fields(f, layouts);
    f.each("tensors", tensors, kMaxTensors, kLeastTensor, [&](auto& g, auto& tensor) {
      auto& spec = tensor.spec;
      g("name", spec.name, kMaxNameBytes);
      g("dtype", spec.dtype, kLastDType);
      g("shape", spec.shape, kMaxDims);
      layouts.field(g, spec.name, spec.layout);
      g("strides", spec.strides, kMaxDims);
      source_field(g, spec);
      WireByte::field(g, spec);
      g("place", tensor.place);
    });
  }
};

struct Registered {
  static constexpr AgentMessage kType = AgentMessage::kRegistered;
  uint32_t batch = 0;
  static void fields(auto& f, auto& self) { f("batch", self.batch); }
};

// Commit, WaitVersion, Withdraw, Digests, Peers, CloseBatch (the timeout is the linger), ClosePair.
struct ObjectCall {
  uint64_t session = 0;
  uint32_t object = 0;  // the number of a batch or a pair
  int64_t version = 0;
  Timeout timeout{};
  static void fields(auto& f, auto& self) {
    f("session", self.session);
    f("object", self.object);
    f("version", self.version);
    timeout_field(f, "timeout", self.timeout);
  }
};

// The answer to a call that returns a number or a bool.
struct Number {
  static constexpr AgentMessage kType = AgentMessage::kNumber;
  int64_t value = 0;
  static void fields(auto& f, auto& self) { f("value", self.value); }
};

// The answer to CloseBatch.
struct BatchClosed {
  static constexpr AgentMessage kType = AgentMessage::kBatchClosed;
  Untaken untaken;
  static void fields(auto& f, auto& self) {
    f("version", self.untaken.version);
    f("jobs", self.untaken.jobs, kMaxPeersTold, kMaxNameBytes);
  }
};

struct DigestList {
  static constexpr AgentMessage kType = AgentMessage::kDigestList;
  std::vector<TensorDigest> digests;
  static void fields(auto& f, auto& self) {
    f.each("digests", self.digests, kMaxTensors, 28, [](auto& g, auto& digest) {
      g("name", digest.name, kMaxNameBytes);
      g("d0", digest.d0);
      g("d1", digest.d1);
      g("elements", digest.elements);
    });
  }
};

struct WaitPeersCall {
  static constexpr AgentMessage kType = AgentMessage::kWaitPeers;
  uint64_t session = 0;
  uint32_t batch = 0;
  int32_t jobs = 0;
  int64_t version = 0;
  Timeout timeout{};
  static void fields(auto& f, auto& self) {
    f("session", self.session);
    f("batch", self.batch);
    f("jobs", self.jobs);
    f("version", self.version);
    timeout_field(f, "timeout", self.timeout);
  }
};

struct PeerList {
  static constexpr AgentMessage kType = AgentMessage::kPeerList;
  std::vector<BatchPeer> peers;
  static void fields(auto& f, auto& self) {
    f.each("peers", self.peers, kMaxPeersTold, 22, [](auto& g, auto& peer) {
      g("job", peer.job, kMaxNameBytes);
      g("attached", peer.attached);
      g("world", peer.world);
      g("version", peer.version);
      status_field(g, peer.error);
    });
  }
};

// --- in the command queue ---

// Send, Recv, Stage.
struct TransferCommand {
  uint32_t batch = 0;
  std::optional<int64_t> version;
  Timeout timeout{};
  static void fields(auto& f, auto& self) {
    f("batch", self.batch);
    bool named = self.version.has_value();
    int64_t version = self.version.value_or(0);  // present on the wire in either case
    f("named", named);
    f("version", version);
    if constexpr (kFills<decltype(f)>) self.version = named ? std::optional(version) : std::nullopt;
    timeout_field(f, "timeout", self.timeout);
  }
};

// Cancel, Progress: for the command `id`.
struct CommandId {
  uint64_t id = 0;
  static void fields(auto& f, auto& self) { f("id", self.id); }
};

// The progress of an operation; the result of Send, Recv and Stage once it has ended.
struct OperationState {
  bool done = false;
  Status status;  // once it is done
  int64_t version = 0;
  Progress progress;
  static void fields(auto& f, auto& self) {
    f("done", self.done);
    status_field(f, self.status, kMaxRecordText);
    f("version", self.version);
    f("bytes_done", self.progress.bytes_done);
    f("bytes_total", self.progress.bytes_total);
    f("seconds", self.progress.seconds);
  }
};

// State, Stats.
struct BatchNumber {
  uint32_t batch = 0;
  static void fields(auto& f, auto& self) { f("batch", self.batch); }
};

struct BatchState {
  int64_t version = 0;
  int64_t newest = 0;
  bool torn = false;
  bool undecided = false;
  static void fields(auto& f, auto& self) {
    f("version", self.version);
    f("newest", self.newest);
    f("torn", self.torn);
    f("undecided", self.undecided);
  }
};

// The answer to Stats.
struct BatchFigures {
  BatchStats stats;
  static void fields(auto& f, auto& self) {
    auto& stats = self.stats;
    f("tensors", stats.tensors);
    f("skipped", stats.skipped);
    f("routes", stats.routes);
    f("bytes_moved", stats.bytes_moved);
    f("bytes_lower_bound", stats.bytes_lower_bound);
    f("rank_bytes", stats.rank_bytes);
    f("transfers", stats.transfers);
    f("sessions", stats.sessions);
    f("snapshot_bytes", stats.snapshot_bytes);
    f("store_requests", stats.store_requests);
    f("plans", stats.plans);
    f("allocations", stats.allocations);
    f("quantized_elements", stats.quantized_elements);
    f("quantized_bytes", stats.quantized_bytes);
    f("quantized_source_bytes", stats.quantized_source_bytes);
    f("quantized_elements_moved", stats.quantized_elements_moved);
    f("quantized_bytes_moved", stats.quantized_bytes_moved);
    f("amax_exchanges", stats.amax_exchanges);
    f("delta_routes", stats.delta_routes);
    f("delta_bytes", stats.delta_bytes);
    f("delta_full_bytes", stats.delta_full_bytes);
    f("register_seconds", stats.register_seconds);
  }
};

// The name of that rank's daemon socket in a folder of the runtime directory.
std::string agent_socket_name(const std::string& name_space, const std::string& job, Rank rank);

}  // namespace tessera::bus
