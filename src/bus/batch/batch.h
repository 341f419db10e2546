// What both sides of a batch share: the current operation, and the sessions that carry it out. SenderBatch and
// ReceiverBatch live on the agent's loop; the public methods are called from user threads.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fork_guard.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "base/trace.h"
#include "bus/batch/client.h"
#include "bus/batch/figures.h"
#include "bus/batch/operation.h"
#include "bus/session/meeting.h"
#include "bus/session/session.h"
#include "bus/session/snapshots.h"
#include "exec/run_factory.h"
#include "peer/agent.h"
#include "peer/interruption.h"

namespace tessera::bus {

inline constexpr const char* kStageName = "stage";
inline constexpr const char* kCommitName = "commit";  // an operation; in other operations, a phase

// What is registered, and the settings for it. `keep_alive` holds the bus and the pair.
struct BatchSetup {
  std::shared_ptr<void> keep_alive;
  Agent* agent = nullptr;
  Rendezvous* rendezvous = nullptr;
  BatchExchanges* exchanges = nullptr;
  Store* store = nullptr;
  Interruption* interruption = nullptr;  // the bus's
  Timeout stall = kTransferTimeout;
  DigestMode digest = {};
  std::string pair;
  std::vector<std::string> named;  // the other jobs, as the pair names them
  bool several = false;            // they are PairOptions::peers, and nobody waits for them
  std::string id;
  Layout layout;  // for tensors without one
  BatchOptions options;
  std::shared_ptr<const std::vector<TensorSpec>> tensors;
  std::shared_ptr<RunFactory> runs;  // what moves them
};

class BatchImpl : public BatchClient,
                  public MeetingOwner,
                  public Inspected,
                  public std::enable_shared_from_this<BatchImpl> {
 public:
  ~BatchImpl() override = default;

  // Registers with the job of `view`: blocks until both jobs are attached. Call it once; call close() if it throws.
  virtual void open(const PairView& view, const CallLimits& limits);
  std::shared_ptr<OperationClient> send(std::optional<int64_t> version, Timeout timeout) override;
  std::shared_ptr<OperationClient> recv(std::optional<int64_t> min_version, Timeout timeout) override;
  std::shared_ptr<OperationClient> stage(std::optional<int64_t> min_version, Timeout timeout) override;
  int64_t commit() override;
  void relocate(std::span<const TensorSpec> tensors) override;
  int64_t newest() const override { return 0; }
  std::vector<BatchPeer> peers() const override;
  void wait_peers(int jobs, int64_t version, Timeout timeout) override;
  int64_t wait_version(int64_t version, Timeout timeout) override;
  bool torn() const override { return false; }
  bool undecided() const override { return false; }
  int64_t version() const override { return version_.load(); }
  BatchStats stats() const override { return figures_.stats(); }
  std::vector<TensorDigest> digests() const override { return figures_.digests(); }
  // For operations, from any thread. Ends that one early if nobody has begun to read or write for it; returns whether
  // it did.
  bool cancel(uint64_t operation);
  virtual bool withdraw(int64_t version);  // likewise, even if its send has ended
  Progress sample() const;                 // of the current operation
  BatchReport report() const override;
  Untaken close(std::optional<Timeout> linger) override;
  // Like close(0), and tells the other ranks `why`, unless it is ok: then the batch is simply over.
  void part(const Status& why);
  bool in_own_process() const override { return process_.here(); }

 protected:
  explicit BatchImpl(BatchSetup setup);

  // --- on any thread ---
  virtual bool sends() const = 0;
  bool staged() const { return setup_.options.mode == Mode::kStaged; }
  BatchOffer own_offer() const override;
  SessionSetup session_setup(const PairView& view, Agreement agreement);  // plans
  std::string describe() const;                                           // "batch policy of pair weights"
  void require_version(int64_t version) const;                            // throws kInvalidArgument above kMaxVersion
  LogScope log_scope() const { return tessera::log_scope(identity(), setup_.pair, setup_.id); }
  const Identity& identity() const { return setup_.agent->identity(); }
  EventLoop& loop() const { return setup_.agent->loop(); }

  // --- on the loop's thread ---
  // Ends the current operation with `status`: now, or once nothing accesses the user's memory any more.
  virtual void fail_operation(const Status& status) = 0;
  // The current operation's deadline has come.
  virtual void on_deadline() = 0;
  // Ends the current operation early if nobody has begun to read or write for it; returns whether it did.
  virtual bool cancel_operation() = 0;
  virtual Progress sample_sessions() const = 0;
  virtual void close_sessions() = 0;
  // The tensors that peers read have moved: all sessions are over, and the jobs register again.
  virtual void renew_sessions() = 0;
  bool outdated(const Session& session) const { return session.setup().relocation != relocation_; }
  Status parting_from(const Session& session) const { return session.broken() ? session.broken_status() : parting_; }
  virtual std::vector<const Session*> sessions() const = 0;
  virtual std::vector<std::string> waits_for() const = 0;  // "inference/1 to take version 7"
  virtual void check_peers() = 0;  // Session::check_peers() of the peers that the operation waits for
  virtual void on_copied() {}      // called by the snapshots
  // On the thread of close(), first: returns once every job that is attached has what was sent last, or after `linger`
  // those that have not.
  virtual Untaken await_takers(Timeout /*linger*/) { return {}; }
  // On the thread of close(), before the sessions close: returns once nobody reads Tessera's own memory.
  virtual void await_readers() {}
  // Nothing of this rank uses the snapshots any more. On the loop's thread.
  virtual void drop_snapshots() { snapshots_.reset(); }
  // On the thread of close(), once everything is over.
  virtual void on_closed() {}
  virtual void on_meetings_stopped() {}

  // Adds what is known of a job besides whether it is attached. On the loop's thread.
  virtual void describe_peer(BatchPeer& peer) const { peer.version = newest(); }

  // Registers with a job that has come, too.
  Meeting& add_meeting(PairView view, bool parts);
  Meeting* meeting_with(const std::string& job);
  // Drops a session that is broken and idle, and registers with its job again.
  void retire(std::shared_ptr<Session> session);
  void forget(std::shared_ptr<Session> session);                       // likewise, without registering again
  void count_session(const Session& session, const RankShare& share);  // for a new session: its figures start at zero

  // The current operation, if any. begin_operation() throws if there is one, or if the batch is closed.
  std::shared_ptr<Operation> begin_operation(const char* what, Timeout timeout);
  // Starts a phase: a span within the operation's. `phase` is a literal; null ends the last phase.
  void enter(const char* phase);
  void set_deadline(Deadline deadline);  // for the operation
  void watch_deadline();
  void watch_peers();
  void end_operation(const Status& status);

  void observe_end(int64_t version, const Status& status, const Progress& progress);
  TransferSide side() const { return sends() ? TransferSide::kSend : TransferSide::kReceive; }

  BatchSetup setup_;                                // once it is open, its tensors are guarded by mutex_
  std::shared_ptr<const Manifest> manifest_;        // from open() on
  std::unique_ptr<Snapshots> snapshots_;            // staged
  std::vector<std::unique_ptr<Meeting>> meetings_;  // by job, in order of arrival; grows on the loop's thread
  std::shared_ptr<Operation> operation_;            // the current one
  // The current operation's state; some of it outlives the operation.
  struct Present {
    explicit Present(std::string traced) : subject(std::move(traced)) {}
    const std::string subject;  // "weights/policy", in traces
    const uint64_t track = Trace::new_track();
    std::shared_ptr<Operation> ended;  // the last one: reused once its handles have gone
    uint64_t number = 0;
    const char* name = "";
    const char* phase = nullptr;
    TimePoint start{};
    TimePoint data_start{};  // the clock's epoch before any data flows
    Deadline deadline = Deadline::at({});
    // Not reset when the deadline moves or the operation ends: when it fires, it checks. So an operation seldom sets a
    // timer.
    EventLoop::TimerId timer = 0;
    TimePoint timer_due{};
    EventLoop::TimerId peers_timer = 0;  // likewise
  };
  Present present_;
  bool closing_ = false;  // no operation begins any more
  bool closed_ = false;
  std::atomic<bool> told_no_delta_{false};
  uint64_t relocation_ = 0;  // counts moves of the tensors; written on the loop's thread, under mutex_
  Status parting_;           // why the batch parts; ok: normally
  std::atomic<int64_t> version_{0};
  Figures figures_;
  Metrics& metrics_ = Metrics::process();
  std::optional<Metrics::Batch> series_;  // from open() to close()
  const bool reaches_all_;  // whether this process can access all registered memory: RunFactory::reaches()
  const ForkGuard process_;

  bool can_delta() const;
  void note_delta(const Agreement& agreement);
  void require_pinned(const PairView& view, const Match& match);
  void require_movable(const Match& match, std::span<const LocalTensor> tensors) const;

  mutable Mutex mutex_;
  struct Pinned {
    size_t world = 0;                                          // of the other job
    std::vector<std::pair<std::string, std::string>> layouts;  // that job's, by tensor
    bool operator==(const Pinned&) const = default;
  };
  std::map<std::string, Pinned> pinned_ GUARDED_BY(mutex_);  // by job, as first registered; if options.pinned
  bool ended_ GUARDED_BY(mutex_) = false;                    // closed_, for threads that wait
  StoppableCondVar changed_;
};

}  // namespace tessera::bus
