// A runtime behind its lock: the parts, and the order in which calls use them.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/fork_guard.h"
#include "base/mutex.h"
#include "device/condition.h"
#include "etp/capture/captured_part.h"
#include "etp/consumption.h"
#include "etp/context.h"
#include "etp/gather_memory.h"
#include "etp/gradients/gradient_pool.h"
#include "etp/gradients/gradients.h"
#include "etp/gradients/replicated.h"
#include "etp/publication.h"
#include "etp/schedule_log.h"

namespace tessera::etp {

// Of options: kAuto is decided, the checks of a build are on or off.
RuntimeOptions resolved(RuntimeOptions options, int ranks);

class RuntimeImpl {
 public:
  RuntimeImpl(ShardGroup group, RuntimeOptions options);
  ~RuntimeImpl();

  // Holds the lock during a call; waits of the call end with what `while_waiting` throws and, where there is one, with
  // what another rank has refused. `call`: its name, if it cannot be made while a capture is recorded; it then throws
  // Error(kInvalidArgument).
  class SCOPED_CAPABILITY Call {
   public:
    explicit Call(RuntimeImpl& runtime, const char* call = nullptr) ACQUIRE(runtime.mutex_);
    ~Call() RELEASE() { lock_.unlock(); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    [[maybe_unused]] bool checked_;  // before the lock, which a thread of the parent may have held
    MutexLock lock_;
    std::optional<device::WaitHook> hook_;
  };

  // False in a forked child, where nothing may be touched.
  bool in_own_process() const { return process_.here(); }
  bool require_own_process() const;

  // Weights: runtime.cc
  WeightId add(const WeightSpec& spec) REQUIRES(mutex_);
  void add_experts(std::span<const WeightId> experts, bool stacked) REQUIRES(mutex_);
  std::vector<WeightId> add_stack(const WeightSpec& spec, int count) REQUIRES(mutex_);
  void start() REQUIRES(mutex_);
  void set_master(WeightId weight, const void* rows, DType dtype) REQUIRES(mutex_);
  void read_rows(WeightId weight, void* to, DType dtype) const REQUIRES(mutex_);
  void set_gradient(WeightId weight, void* rows, DType dtype, bool empty) REQUIRES(mutex_);
  void* gradient(WeightId weight) REQUIRES(mutex_);
  void zero_gradients() REQUIRES(mutex_);
  std::shared_ptr<const QuantizedCopy> quantized_copy(std::span<const WeightId> weights) const REQUIRES(mutex_);
  void set_frozen(WeightId weight, bool frozen) REQUIRES(mutex_);
  void classify(const std::set<std::string>& scope, bool overlap) REQUIRES(mutex_);
  void remove(std::span<const WeightId> weights) REQUIRES(mutex_);

  // A step: step.cc
  void acquire(std::span<const WeightId> weights, Phase phase, const Use& use, std::span<FullWeight> out)
      REQUIRES(mutex_);
  GradientBuffer gradient_buffer(WeightId weight, int micro_batch) REQUIRES(mutex_);
  void produce(std::span<GradientBuffer> gradients, bool own_round) REQUIRES(mutex_);
  std::vector<Added> drain() REQUIRES(mutex_);
  bool abandon(bool lost) REQUIRES(mutex_);
  // Ends the interval on all ranks. `meeting`: what the others are waited for, as a predicate. Returns what each tells.
  std::vector<IntervalEnd> meet(bool abandoned, bool lost, const std::string& meeting, const Deadline& deadline)
      REQUIRES(mutex_);
  void drain(const std::string& meeting, const Deadline& deadline) REQUIRES(mutex_);
  void align(std::span<const IntervalEnd> ends) REQUIRES(mutex_);
  // Throws kDataLoss, and fails the group, if a rank's count cannot be true.
  void require_near(int rank, uint64_t theirs, uint64_t own) const REQUIRES(mutex_);
  void begin_update(std::span<const WeightId> weights, const UpdateOptions& options) REQUIRES(mutex_);
  void end_update() REQUIRES(mutex_);
  std::vector<std::string> begin_write(std::span<const WeightId> weights, std::string told,
                                       const UpdateOptions& options, bool begins) REQUIRES(mutex_);
  void end_write() REQUIRES(mutex_);
  void next_step() REQUIRES(mutex_);
  void publish(std::span<const WeightId> weights, const float* noop) REQUIRES(mutex_);

  // Captures: capture.cc. end_capture() throws away what does not `stand`, and what it throws for.
  std::shared_ptr<CapturedPart> begin_capture() REQUIRES(mutex_);
  void end_capture(bool stands) REQUIRES(mutex_);
  void replay(CapturedPart& part, int micro_batch) REQUIRES(mutex_);
  void forget(CapturedPart& part) REQUIRES(mutex_);
  // Forgets it in a later call: this one may be made within one, on its thread.
  void drop(std::shared_ptr<CapturedPart> part) EXCLUDES(dropped_mutex_);
  void reallocate(CapturePool pool) REQUIRES(mutex_);

  // report.cc
  WeightStatus status(WeightId weight) const REQUIRES(mutex_);
  RuntimeReport report() const REQUIRES(mutex_);
  RuntimeForecast forecast() const REQUIRES(mutex_);
  std::string explain(int64_t step) const REQUIRES(mutex_);

  void close() REQUIRES(mutex_);
  // Throws Error(kInvalidArgument) once it is closed.
  void require_open() const REQUIRES(mutex_);

  const ForkGuard process_;
  Mutex mutex_;
  const ShardGroup group_;
  const RuntimeOptions options_;
  RuntimeContext context_ GUARDED_BY(mutex_);
  std::unique_ptr<ScheduleLog> schedule_log_ GUARDED_BY(mutex_);
  const std::shared_ptr<GatherMemory> memory_;
  const std::shared_ptr<GradientPool> pool_;
  const std::shared_ptr<GradientPool> captured_pool_;
  Publisher publisher_ GUARDED_BY(mutex_);
  Consumptions consumptions_ GUARDED_BY(mutex_);
  Gradients gradients_ GUARDED_BY(mutex_);
  ReplicatedGradients replicated_ GUARDED_BY(mutex_);
  std::shared_ptr<const void> reading_ GUARDED_BY(mutex_);

 private:
  void await_compute() REQUIRES(mutex_);
  void keep_published() REQUIRES(mutex_);
  // What all ranks have removed.
  void free_removed(std::span<const IntervalEnd> ends) REQUIRES(mutex_);
  void free(Parameter& parameter) REQUIRES(mutex_);
  // Throws Error(kResourceExhausted) unless the group has room for `count` weights more.
  void require_slots(const std::string& name, size_t count) const REQUIRES(mutex_);
  WeightId add(std::unique_ptr<Parameter> parameter) REQUIRES(mutex_);
  void agree_on_options() REQUIRES(mutex_);
  // Where the back end needs gathers and folds in one order: throws Error(kMismatch) on all ranks, with the first
  // difference, unless all plan the same. Collective.
  void agree_on_order() REQUIRES(mutex_);
  void capture_use(std::span<Parameter* const> weights, Phase phase, const Use& use, std::span<FullWeight> out)
      REQUIRES(mutex_);
  void capture_gradients(std::span<GradientBuffer> gradients) REQUIRES(mutex_);
  void replay_use(CapturedPart& part, size_t use) REQUIRES(mutex_);
  void forget_dropped() REQUIRES(mutex_);
  void publish_at_first_use(std::span<Parameter* const> weights, const Use& use) REQUIRES(mutex_);
  // Masters that are not kept are forgotten.
  void publish_with_masters(std::span<Parameter* const> weights) REQUIRES(mutex_);
  std::vector<Parameter*> list_of(std::span<const WeightId> weights) const REQUIRES(mutex_);

  // Their rows may be written from now on.
  void open(std::vector<Parameter*> weights) REQUIRES(mutex_);
  // They have been written. `later`: those that are published at their first use are.
  void shut(bool later) REQUIRES(mutex_);

  std::vector<Parameter*> updating_ GUARDED_BY(mutex_);
  std::vector<Parameter*> removed_ GUARDED_BY(mutex_);          // and not freed
  std::shared_ptr<CapturedPart> capturing_ GUARDED_BY(mutex_);  // null: nothing is recorded
  Mutex dropped_mutex_;
  std::vector<std::shared_ptr<CapturedPart>> dropped_ GUARDED_BY(dropped_mutex_);
  bool in_update_ GUARDED_BY(mutex_) = false;
  bool writing_ GUARDED_BY(mutex_) = false;  // in a write that is no update; in_update_, too
  bool closed_ GUARDED_BY(mutex_) = false;
  bool options_agreed_ GUARDED_BY(mutex_) = false;
};

}  // namespace tessera::etp
