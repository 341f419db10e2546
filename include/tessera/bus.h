// The tensor bus: tensors of one job move into the memory of another, independently launched job, from one layout into
// another.
//
//   trainer rank r                                   inference rank q
//   Bus bus({.job = "trainer", .rank = r, ...});     Bus bus({.job = "inference", .rank = q, ...});
//   Pair pair = bus.pair({.name = "weights",         Pair pair = bus.pair({.name = "weights",
//                         .peer = "inference"});                           .peer = "trainer"});
//   Batch batch = pair.offer("policy", tensors);     Batch batch = pair.accept("policy", tensors);
//   batch.send().wait();                             int64_t version = batch.recv().wait();
//
// Bus, Pair, Batch and Handle are move-only handles; the last one to go frees everything on both sides. Each may be
// used from any thread; calls on one Batch are serialised. Every waiting call has a deadline and fails with
// tessera::Error: kDeadlineExceeded, kPeerLost, kMismatch, kCancelled, kDataLoss, ... whose text names job/rank and
// what the call waited for. A forked child must not use a handle of its parent: its calls throw kInvalidArgument.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "tessera/dtype.h"
#include "tessera/error.h"
#include "tessera/layout.h"
#include "tessera/quantize.h"

namespace tessera {

// How long a call waits. A call has one deadline, which all its waits share; every wait has one.
using Timeout = std::chrono::nanoseconds;
inline constexpr Timeout kRendezvousTimeout = std::chrono::seconds(300);
inline constexpr Timeout kTransferTimeout = std::chrono::seconds(30);
inline constexpr Timeout kPeerGrace = std::chrono::seconds(1);
inline constexpr size_t kMaxGathered = size_t{4} << 20;
inline constexpr uint32_t kMaxPeers = 64;  // jobs that a pair names

// How what arrives is checked (docs/formats/digest.md); true means kFull, false kOff.
class DigestMode {
 public:
  enum Value : uint8_t {
    kOff,
    kFull,
    // One block of 16 KiB in sixteen, others in each version and tensor. Tensors that travel quantised and batches with
    // deltas are checked in full.
    kSampled,
  };
  // NOLINTBEGIN(google-explicit-constructor): options are written with either
  constexpr DigestMode(Value value = kFull) : value_(value) {}
  constexpr DigestMode(bool digests) : value_(digests ? kFull : kOff) {}
  // NOLINTEND(google-explicit-constructor)
  constexpr Value value() const { return value_; }
  constexpr bool operator==(const DigestMode&) const = default;
  // "full", "sampled" or "off". Throws Error(kInvalidArgument).
  static DigestMode parse(std::string_view text);

 private:
  Value value_;
};

struct BusOptions {
  std::string job = {};  // name of this job, which the peer uses too
  Rank rank = 0;         // in this job, 0 .. world-1
  int world = 1;
  std::string store = {};       // URL; empty: TESSERA_STORE, else "auto"
  std::string name_space = {};  // empty: TESSERA_NAMESPACE, else "default"
  // Who moves the data: "embedded", threads of this process, or "daemon", the `tessera agent` of this (namespace, job,
  // rank) on this machine; the call waits for it until `timeout`. Empty: TESSERA_AGENT, else "embedded".
  std::string agent = {};
  int threads = 0;                       // copy threads; 0: usable CPUs / ranks on this host, at least 1
  DigestMode digest = {};                // of every route; the weaker choice of the two sides holds for both
  Timeout timeout = kRendezvousTimeout;  // until the store answers and (job, rank) is this process'
  Timeout stall = kTransferTimeout;      // a transfer fails after so long without progress
  // Once a stop is requested, from any thread, all waits for other ranks end with kCancelled, now and from then on:
  // Bus(), pair(), offer(), accept(), manifest(), wait_version(). Published records are withdrawn when the objects are
  // destroyed. (A Handle cancels a transfer under way; Bus::interrupt() ends only the present waits.)
  std::stop_token stop = {};
};

struct PairOptions {
  std::string name = {};  // the same in both jobs
  std::string peer = {};  // the other job's name
  // For a sender, instead of `peer`: the jobs that it feeds, each at its own pace, in its own layout and world. None of
  // them is waited for: pair() returns once all ranks of this job are there, offer() once this rank can send. A job of
  // the list may come, go, be killed and come back at any time. All ranks of this job name the same jobs.
  std::vector<std::string> peers = {};
  Timeout timeout = kRendezvousTimeout;  // until all ranks of both jobs are there; with `peers`, of this job
  Layout layout = {};                    // of tensors without one; default: replicated over all ranks of the job
};

// The largest version, which leaves the bus room to count on. The smallest is 1.
inline constexpr int64_t kMaxVersion = (int64_t{1} << 62) - 1;

// Where a batch's versions lie during a transfer.
enum class Mode : uint8_t {
  // Sender: receivers read the registered memory; a send ends when every attached receiving rank has it.
  // Receiver: data goes directly into the registered memory, which is torn while a transfer is incomplete.
  kInPlace,
  // Sender: send() copies into shared memory and ends; receivers take the newest copy while the user writes on.
  // Receiver: data goes into a buffer, and into the registered memory once every rank of the job has the version: all
  // take it, or none does.
  kStaged,
};

struct BatchOptions {
  Mode mode = Mode::kInPlace;
  // Of a staged sender: number of copies of the registered tensors, 2 to 8. One is the newest, and each receiving job
  // may hold another one while it reads. With one copy more than there are jobs no send waits.
  int snapshots = 2;
  // Of an in-place sender with PairOptions::peers: how long a send waits, once one of the jobs has the version, for the
  // others to begin to take it. Who has not begun by then does not get it, and is not waited for again until it takes a
  // version. (It gets the newest as soon as it asks during a send.)
  Timeout grace = kPeerGrace;
  // Refuses a peer that comes back with another world, another mesh or other layouts (kMismatch).
  bool pinned = false;
  // Sends a region as its changes since the last version, where these are smaller. It takes effect only if all ranks
  // of both sides ask for it. The sender spends memory on it: the bits that it sent last, and room for the changes.
  // Nobody else may change the receiver's tensors between two recv().
  bool delta = false;
  // Time for which Batch::close() of a sender waits for the jobs that have not taken the last version yet. Default: the
  // timeout of the registration.
  std::optional<Timeout> linger = {};
  std::stop_token stop = {};  // once requested, a registration that waits for other ranks ends with kCancelled
};

// The source of a receiver's tensor, if that is not the sender's tensor of the same name.
struct TensorSource {
  std::string name = {};           // at the sender; empty: the same name
  std::vector<Slice> slices = {};  // the part to take, in global coordinates, one for each dim; empty: all of it
  bool operator==(const TensorSource&) const = default;
};

// A receiver's tensor that is part of a fused one, such as q, k and v of one matrix. If it travels quantised, all parts
// are quantised as one: they share an amax for each matrix, so all their dims except the last two must be equal, and
// so must their source dtype.
struct FusedPart {
  struct Place {
    Index row = 0;
    Index column = 0;
    bool operator==(const Place&) const = default;
  };
  std::string name = {};  // of the fused tensor; empty: not part of one
  // Place of its first element in a matrix of the fused tensor, whose blocks cross the edges between parts. Without it,
  // each part has blocks of its own, which makes no difference if all parts begin between blocks.
  std::optional<Place> place = std::nullopt;
  bool operator==(const FusedPart&) const = default;
};

// One tensor of a batch, as one rank sees it. Ranks of `layout` are ranks of this job. A rank outside the tensor's
// mesh registers it with data == nullptr or leaves it out. Ranks that register one name with disjoint meshes and equal
// shape, dtype and placements hold replicas.
struct TensorSpec {
  std::string name = {};  // one tensor of the batch
  void* data = nullptr;   // first element of the local tensor; must outlive the Batch
  DType dtype = DType::kF32;
  Shape shape = {};                 // global
  Layout layout = {};               // default (no mesh): that of the pair
  std::vector<Index> strides = {};  // of the local tensor, in elements; empty: contiguous row-major
  TensorSource source = {};         // of a receiver: several tensors may share a source, whole or in part
  // Format that its elements are quantised to on their way: one side asks, or both ask for the same. Amaxes are those
  // of the sender's whole tensor, or of the slice that is taken. Only f64, f32, f16 and bf16 of two dims or more are
  // quantised, each matrix of the last two dims; others travel as they are.
  std::optional<Format> wire = std::nullopt;
  // These planes of `wire` lie in one block from `data` on: quantized_layout() of this rank's part. No dtype or strides
  // then. Edges of shards must not cut a block of a plane that is there. A receiver takes them bit for bit as those of
  // the whole tensor; a column plane that is not the transposed row plane travels separately. A sender sends them as
  // they are, without quantising again: as the same planes, or dequantised by the receiver. All its ranks must have the
  // amaxes, and the scales of formats with one scale, of the whole tensor: else the send fails (kMismatch) and names
  // two ranks.
  PlaneSet planes = {};
  FusedPart fused = {};  // of a receiver
  // Of a sender without `planes`: a copy of its elements, which is sent wherever that gives the same bytes as
  // quantising them on their way: they travel in its format, as a whole (not sliced or fused), this rank's part begins
  // and ends between its blocks, and it is current when a send begins. Staged, it is copied with them if `wire` is its
  // format. Agent daemons do not use it.
  std::shared_ptr<const QuantizedCopy> quantized = nullptr;
};

// What the sending side offers, before a receiver decides what to take.
struct ManifestEntry {
  std::string name = {};
  DType dtype = DType::kF32;
  Shape shape = {};
  Layout layout = {};
  TensorSource source = {};                   // of a receiver's
  std::optional<Format> wire = std::nullopt;  // asked for, where it can be quantised
  PlaneSet planes = {};                       // quantised already: taken, or offered, as they are
  FusedPart fused = {};                       // likewise
};

// Progress of a transfer, under way or ended.
struct Progress {
  int64_t bytes_done = 0;  // pulled by this rank (receiver) or from it (sender)
  int64_t bytes_total = 0;
  double seconds = 0;  // since data began to flow
  double gigabytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes_done) * 1e-9 / seconds : 0; }
};

struct BatchStats {
  int64_t tensors = 0;            // in this rank's batch
  int64_t skipped = 0;            // names that only the sender has
  int64_t routes = 0;             // of this rank
  int64_t bytes_moved = 0;        // whole batch, all ranks, one transfer; as planned, each tied tensor counted
  int64_t bytes_lower_bound = 0;  // the same
  int64_t rank_bytes = 0;         // this rank's share
  int64_t transfers = 0;          // versions that were sent or taken; one that is staged counts at its commit
  int64_t sessions = 0;           // how often the batch was matched with another job and planned; 1 at first
  int64_t snapshot_bytes = 0;     // of a staged batch: memory of its copies, whatever the number of jobs
  double register_seconds = 0;
  // Quantised data of one transfer; 0 if there is none. This rank's share, to the byte: sent from here (each piece
  // once, whatever the number of receivers; also what was quantised before) or pulled (receiver).
  int64_t quantized_elements = 0;
  int64_t quantized_bytes = 0;         // codes, scales and amaxes
  int64_t quantized_source_bytes = 0;  // the same elements in the sender's dtypes; in f32 if it has none
  // Part of bytes_moved, hence as planned: scales of blocks that routes cut count once, and amaxes do not count.
  int64_t quantized_elements_moved = 0;
  int64_t quantized_bytes_moved = 0;
  int64_t amax_exchanges = 0;  // of a sender: exchanges in which all ranks of the job have agreed
  // Work that a steady-state transfer must not do, counted since registration.
  int64_t store_requests = 0;
  int64_t plans = 0;
  int64_t allocations = 0;  // of staging, scratch and streams
  // Of all transfers: regions that travelled as deltas from or to this rank, the bytes read for them, and their bytes
  // in full. A staged sender counts a version once its receivers have read it, which may be after send().
  int64_t delta_routes = 0;
  int64_t delta_bytes = 0;
  int64_t delta_full_bytes = 0;
  // It does not allocate from the heap either, once a few transfers have grown the buffers that are kept between them:
  // tests/multiproc/heap_test.cc counts the calls of operator new.

  // Bytes in relation to bf16, 2 bytes per element; 0 if there are none. Of this rank's quantised tensors, and of the
  // whole batch, whose other tensors travel as they are.
  double quantized_ratio() const;
  double batch_ratio() const;
};

// Another job of a batch, as this rank knows it.
struct BatchPeer {
  std::string job = {};
  bool attached = false;  // all its ranks are there and have registered the batch
  int world = 0;          // its ranks; 0 before it was attached first
  // The newest version that all of its ranks have taken, as far as they read from this one; of a receiver's peer, the
  // newest that it has offered.
  int64_t version = 0;
  // Why it is not attached, though it was or tried to be, or why it has not taken the version that was sent last.
  Status error = {};
};

// The jobs that a sender has left without its last version.
struct Untaken {
  int64_t version = 0;                 // 0: there is no such job
  std::vector<std::string> jobs = {};  // that were attached and might have taken it
};

// Layout-independent digest of one tensor's logical contents: docs/formats/digest.md.
struct TensorDigest {
  std::string name = {};
  uint64_t d0 = 0;
  uint64_t d1 = 0;
  int64_t elements = 0;
  std::string to_string() const;  // 32 hex digits
};

namespace bus {
class BusClient;
class PairClient;
class BatchClient;
class OperationClient;
}  // namespace bus

// A send or recv under way. Dropping it never blocks; the operation goes on.
class Handle {
 public:
  Handle(Handle&&) noexcept;
  Handle& operator=(Handle&&) noexcept;
  ~Handle();

  // Blocks until the operation ends or its own deadline passes; returns the version. Throws the operation's error.
  // May be called again: the outcome stays.
  int64_t wait();
  // Waits at most `timeout`, or until a stop is requested, from any thread. True once the operation has ended,
  // successfully or not. Never throws the operation's error.
  bool wait_for(Timeout timeout, std::stop_token stop = {});
  bool done() const;
  // Ends it with kCancelled unless it has ended. A send that a receiver has begun to take, and a recv that has begun to
  // write, cannot be cancelled: false. (Peers see a cancellation, not a lost process.)
  bool cancel();
  // Of a send: withdraws the version, even after a staged send has ended. True if no receiver had begun to take it:
  // then none ever will. False otherwise, or if a newer version has replaced it. If the receivers are about to choose,
  // it waits for them, at most 10 s. If all ranks of the side call it, all get the same answer.
  bool withdraw();
  Progress progress() const;
  // 0 until a recv has chosen one. That of a send by default may still grow until a receiver begins to take it.
  int64_t version() const;

 private:
  friend class Batch;
  explicit Handle(std::shared_ptr<bus::OperationClient> operation);
  std::shared_ptr<bus::OperationClient> operation_;
};

// A set of tensors that are transferred as one.
class Batch {
 public:
  Batch(Batch&&) noexcept;
  Batch& operator=(Batch&&) noexcept;
  ~Batch();  // close(), or close(0) while an exception unwinds the stack

  // Sender. Offers the registered memory as `version`; it must grow, unless that send failed; at most kMaxVersion. The
  // default is the newest one + 1, so all ranks of the side must make the same calls. A rank that has come back goes on
  // from what the others offer. If others have given up the call that a rank makes by default and offer a newer
  // version, it fails at once with kDeadlineExceeded, and the next call gets that number. In place, it ends when every
  // attached receiving rank has taken what it reads from this rank; until then the memory must not change. Staged, it
  // ends when the memory is copied. Collective over the side. With PairOptions::peers, in place, it succeeds once one
  // job has the version and no other job reads it or is waited for: one that is attached, is not lost, and begins
  // within BatchOptions::grace. peers() tells who has it, and why another job has not. If no job has taken it, it fails
  // with the first job's error, or with kDeadlineExceeded if none was attached. Staged, there is one copy for all jobs;
  // the send ends when it is made, even if no job is there, and a job that comes takes the newest. (Quantised tensors
  // and Partial terms are prepared for each job that is attached; a job that comes later gets the next version.)
  Handle send(std::optional<int64_t> version = {}, Timeout timeout = kTransferTimeout);
  // Receiver. Takes the newest complete version that is newer than the held one and at least `min_version`, into the
  // registered memory. Collective over the side: all ranks take the same one. The timeout covers the wait for a
  // version; once data flows, it ends after BusOptions::stall without progress.
  Handle recv(std::optional<int64_t> min_version = {}, Timeout timeout = kTransferTimeout);
  // Staged receiver: the first half of recv(). Ends once all ranks have decided to take the version; the registered
  // memory is as before until commit().
  Handle stage(std::optional<int64_t> min_version = {}, Timeout timeout = kTransferTimeout);
  // The second half: writes what is staged into the registered memory and returns its version. Local; blocks as long as
  // the copy takes. kInvalidArgument if nothing is staged.
  int64_t commit();

  // The registered tensors have moved: the same ones, in the same order, with other addresses or strides. Only this
  // rank calls it, while it has no operation under way. If the peers read the tensors in place, they register with this
  // rank again; sends and recvs that wait do not notice. Throws kInvalidArgument if the tensors differ in anything
  // else, or an operation is under way; kUnimplemented if they cannot be moved, so that only a new registration helps:
  // received in place, sent staged with Partial terms, registered with a daemon.
  void relocate(std::span<const TensorSpec> tensors);

  // The version held (receiver: last received; sender: last sent); 0 before the first.
  int64_t version() const;
  // Receiver: the newest complete version on offer, 0 if none; waits for no peer. A daemon is asked through its queue.
  int64_t newest() const;
  // Receiver: blocks until a version of at least `version` is on offer; returns it.
  int64_t wait_version(int64_t version, Timeout timeout = kTransferTimeout);
  // The other jobs: first those that the pair names, then those that have come besides.
  std::vector<BatchPeer> peers() const;
  // Sender: blocks until `jobs` other jobs are attached or, with a version, until that many have taken it or a newer
  // one. kDeadlineExceeded names those that are missing.
  void wait_peers(int jobs, int64_t version = 0, Timeout timeout = kRendezvousTimeout);
  // Receiver: whether a transfer has begun but not succeeded, so that tensors may mix two versions.
  bool torn() const;
  // Staged receiver: whether the store could not be reached when a version was decided. The version held stays, no
  // newer one is taken, and the next recv() or stage() settles the decision first, or fails with kUnavailable.
  bool undecided() const;
  BatchStats stats() const;
  // Digests of the last transfer in the present session, of this rank's cells only. The sum over ranks (a replicated
  // cell once) is the tensor's digest; with sampled digests, that of the blocks the version has chosen.
  std::vector<TensorDigest> digests() const;
  // Detaches: frees what both sides keep for this batch. Later calls of the peer fail with kPeerLost, "closed the
  // batch", and what other threads wait for in it ends with kCancelled. Idempotent; waits for a transfer that reads or
  // writes the registered memory.
  // A sender first waits until every attached job has taken the version that was sent last, staged, or that is being
  // sent, in place; at most `linger` (default: BatchOptions::linger). It does not wait for a job that closes the batch
  // or is lost. Bus::interrupt() ends the wait; no send can begin meanwhile. What is not taken by then is dropped,
  // which is logged, as a warning unless `linger` is 0, and returned.
  Untaken close(std::optional<Timeout> linger = {});

 private:
  friend class Pair;
  friend class Bus;
  explicit Batch(std::shared_ptr<bus::BatchClient> impl);
  std::shared_ptr<bus::BatchClient> impl_;
};

// Two jobs joined under a name.
class Pair {
 public:
  Pair(Pair&&) noexcept;
  Pair& operator=(Pair&&) noexcept;
  ~Pair();

  int peer_world() const;  // ranks of the other job when pair() returned; 0 with PairOptions::peers
  // A number for the processes that hold the ranks of this job, as this rank has joined them. It is equal on all ranks
  // that know the same processes; a rank that is started again gets another one.
  uint64_t membership() const;

  // Sender: registers `tensors` under `batch_id`; blocks until all ranks of both jobs have registered it and are
  // connected (with PairOptions::peers: until this rank can send), at most `timeout`.
  Batch offer(const std::string& batch_id, std::span<const TensorSpec> tensors, Timeout timeout = kRendezvousTimeout,
              const BatchOptions& options = {});
  // Receiver: the same. Its tensors may be a subset of those offered; a name that is not offered is an error.
  Batch accept(const std::string& batch_id, std::span<const TensorSpec> tensors, Timeout timeout = kRendezvousTimeout,
               const BatchOptions& options = {});
  // Receiver: the tensors that the sending side offers under `batch_id`, in its order, once all its ranks have
  // registered. Ends with kCancelled once `stop` is requested, as all_gather() does.
  std::vector<ManifestEntry> manifest(const std::string& batch_id, Timeout timeout = kRendezvousTimeout,
                                      std::stop_token stop = {});
  // The `value` of every rank of this job, by rank: for facts that all ranks must know to register `batch_id` (such as
  // the shapes of their local tensors). Collective over the side, before offer() or accept(), or not at all;
  // blocks until all ranks have called it. At most kMaxGathered bytes each. A rank that is started again reads what the
  // others gave. A batch that is registered has notes: "BATCH:NOTE" as `batch_id`, at any time, gathers other values at
  // each call.
  std::vector<std::string> all_gather(const std::string& batch_id, const std::string& value,
                                      Timeout timeout = kRendezvousTimeout, std::stop_token stop = {});
  // Tells the ranks of both jobs that this rank does not register `batch_id`, and `why`: their calls about it end with
  // that, as they do where offer() or accept() throws, until this rank registers it after all. For what a caller
  // refuses before it comes to register. No-op while the batch is registered here. REQUIRES: !why.ok()
  void give_up(const std::string& batch_id, const Status& why);

 private:
  friend class Bus;
  explicit Pair(std::shared_ptr<bus::PairClient> impl);
  std::shared_ptr<bus::PairClient> impl_;
};

// The part of a batch over several pairs that belongs to one of them.
struct BatchPart {
  const Pair* pair = nullptr;
  std::span<const TensorSpec> tensors = {};
};

// A process on the bus: its name, its store and the threads that move its data (an embedded agent).
class Bus {
 public:
  // Connects to the store and claims (job, rank). Throws kAlreadyExists, with both pids, if another living process has
  // it, and kUnavailable if no store answers within BusOptions::timeout.
  // A process may make several for one (store, namespace, job, rank): they share the agent, the connection to the store
  // and the claim, which are released when the last one is destroyed with all its pairs and batches. Names of pairs and
  // batches are common to them: a batch of one pair is registered once. Throws kInvalidArgument if `world` or `threads`
  // differs from theirs. With an agent daemon a process has one Bus for a rank, and a second one throws kAlreadyExists.
  explicit Bus(BusOptions options);
  Bus(Bus&&) noexcept;
  Bus& operator=(Bus&&) noexcept;
  ~Bus();

  // False once its agent daemon has been lost: all calls of this bus, and of its pairs and batches, fail with
  // kPeerLost; make a new one. Always true with an embedded agent.
  bool alive() const;

  // Ends all present waits for other ranks with kCancelled: pair(), offer(), accept(), manifest(), all_gather(),
  // wait_version(); and that of Batch::close(), which then closes the batch. Later calls are not affected. Ranks that
  // wait for this one in a registration learn that it gave up; all may register the batch again. Thread-safe, never
  // blocks.
  void interrupt();

  // Blocks until all ranks of both jobs are there. Logs every 10 s which are missing.
  Pair pair(const PairOptions& options);

  // A batch over several pairs of this bus with one peer job, e.g. dense weights on one mesh and experts on another:
  // transferred as one. Tensors without a layout take that of their pair; in manifests, errors and digests a name is
  // "PAIR/NAME". Both jobs name the same pairs.
  Batch offer(const std::string& batch_id, std::span<const BatchPart> parts, Timeout timeout = kRendezvousTimeout,
              const BatchOptions& options = {});
  Batch accept(const std::string& batch_id, std::span<const BatchPart> parts, Timeout timeout = kRendezvousTimeout,
               const BatchOptions& options = {});

 private:
  Batch register_parts(const std::string& batch_id, std::span<const BatchPart> parts, bool sends, Timeout timeout,
                       const BatchOptions& options);
  std::shared_ptr<bus::BusClient> impl_;
};

}  // namespace tessera
