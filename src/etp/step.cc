// The calls of a training step, in the order of its life: uses, gradients, drain, update.
#include <algorithm>
#include <array>
#include <exception>
#include <optional>
#include <utility>

#include "base/fail.h"
#include "base/fields.h"
#include "base/mutation.h"
#include "etp/runtime_impl.h"
#include "layout/text_reader.h"

namespace tessera::etp {
namespace {

using collective::Word;

std::string blob_of(const IntervalEnd& end) {
  ByteWriter out;
  FieldWriter writer(out);
  IntervalEnd::fields(writer, end);
  const auto bytes = out.view();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

IntervalEnd interval_end_of(const std::string& blob, const std::string& from) {
  ByteReader in(std::as_bytes(std::span(blob)), from);
  FieldReader reader(in);
  IntervalEnd end;
  IntervalEnd::fields(reader, end);
  in.finish();
  return end;
}

// While it lives, what ends waits of this thread is kept, for a while. Ranks that have closed an interval tell each
// other of it at once; one that left then, as others came through, would be in another interval than they.
class LateInterrupt {
 public:
  LateInterrupt() : hook_(&LateInterrupt::woken, this) {}
  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  static constexpr Duration kPatience = std::chrono::seconds(1);

  static void woken(void* self) {
    auto& kept = *static_cast<LateInterrupt*>(self);
    if (kept.error_ != nullptr) {
      if (kept.until_->passed()) kept.rethrow();
      return;
    }
    try {
      kept.hook_.outer_woken();
    } catch (...) {
      kept.error_ = std::current_exception();
      kept.until_ = Deadline::after(kPatience);
    }
  }

  std::exception_ptr error_;
  std::optional<Deadline> until_;
  const device::WaitHook hook_;
};

}  // namespace

void RuntimeImpl::publish_at_first_use(std::span<Parameter* const> weights, const Use& use) {
  const bool stale = std::ranges::any_of(weights, [](const Parameter* p) { return p->publication.stale; });
  if (!stale) return;
  if (!use.first_micro_batch)
    fail(ErrorCode::kInvalidArgument,
         "{} was updated and is not published: use it with first_micro_batch first, or publish() it"_message,
         tessera::quoted(weights.front()->name()));
  context_.compute->synchronize(context_.group.deadline());
  publisher_.publish(weights, use.noop, Publisher::Together::kNo);
}

void RuntimeImpl::acquire(std::span<const WeightId> weights, Phase phase, const Use& use, std::span<FullWeight> out) {
  std::array<Parameter*, 1> single{};
  std::vector<Parameter*> several;
  std::span<Parameter*> list = single;
  if (weights.size() != 1) {
    several.resize(weights.size());
    list = several;
  }
  for (size_t i = 0; i < weights.size(); ++i) list[i] = &context_.started(weights[i]);
  if (list.empty()) return;
  const Parameter& first = *list.front();
  if (in_update_)
    fail(ErrorCode::kInvalidArgument, "{} is used inside an update, while its rows may change"_message,
         tessera::quoted(first.name()));
  for (const Parameter* p : list)
    if (use.version && static_cast<uint64_t>(*use.version) != p->publication.version)
      fail(
          ErrorCode::kInvalidArgument,
          "{} has been updated between its forward, which used version {}, and its backward, which finds version {}: update after the backward"_message,
          tessera::quoted(p->name()), *use.version, p->publication.version);
  if (capturing_ != nullptr) return capture_use(list, phase, use, out);
  publish_at_first_use(list, use);
  consumptions_.acquire(list, phase, use, out);
  if (phase != Phase::kForward || !use.expects_backward) return;
  for (const Parameter* p : list)
    if (p->trained()) gradients_.announce(*p, use.micro_batch);
}

GradientBuffer RuntimeImpl::gradient_buffer(WeightId weight, int micro_batch) {
  if (capturing_ != nullptr) return gradients_.captured_buffer(context_.started(weight), micro_batch);
  return gradients_.buffer(context_.started(weight), micro_batch);
}

void RuntimeImpl::produce(std::span<GradientBuffer> gradients, bool own_round) {
  if (in_update_) fail(ErrorCode::kInvalidArgument, "a gradient is produced inside an update"_message);
  if (capturing_ != nullptr) return capture_gradients(gradients);
  gradients_.produce(gradients, own_round);
}

std::vector<IntervalEnd> RuntimeImpl::meet(bool abandoned, bool lost, const std::string& meeting,
                                           const Deadline& deadline) {
  ++context_.counters.drains;
  if (abandoned) replicated_.forget();
  gradients_.flush(!abandoned);
  gradients_.close_interval(meeting, deadline);
  replicated_.fold();
  IntervalEnd own = gradients_.interval_end(abandoned);
  own.lost = lost;
  if (abandoned) {
    own.updates = context_.updates;
    for (const auto& p : context_.parameters) own.versions.push_back(p->publication.version);
  }
  for (const Parameter* p : removed_) own.removed.push_back(p->weight.id);
  const LateInterrupt interrupt;
  const std::vector<std::string> blobs = context_.group.exchange("drain", blob_of(own));
  std::vector<IntervalEnd> ends;
  for (int q = 0; q < context_.ranks(); ++q)
    ends.push_back(interval_end_of(blobs[static_cast<size_t>(q)], context_.group.describe(q)));
  gradients_.end_interval(ends);
  free_removed(ends);
  interrupt.rethrow();
  return ends;
}

bool RuntimeImpl::abandon(bool lost) {
  const std::vector<IntervalEnd> ends = meet(true, lost, std::string(kEndsBackward), context_.group.deadline());
  align(ends);
  return std::ranges::any_of(ends, [](const IntervalEnd& end) { return end.lost || end.order != 0; });
}

std::vector<Added> RuntimeImpl::drain() {
  drain(std::string(kEndsBackward), context_.group.deadline());
  return gradients_.added();
}

void RuntimeImpl::drain(const std::string& meeting, const Deadline& deadline) {
  const std::vector<IntervalEnd> ends = meet(false, false, meeting, deadline);
  const auto failed = std::ranges::find(ends, true, &IntervalEnd::abandoned);
  if (failed != ends.end())
    fail(
        ErrorCode::kCancelled,
        "{} has abandoned its backward: gradients since the last drain are incomplete; zero them and repeat the step"_message,
        context_.group.describe(static_cast<int>(failed - ends.begin())));
}

void RuntimeImpl::require_near(int rank, uint64_t theirs, uint64_t own) const {
  constexpr uint64_t kMostAhead = uint64_t{1} << 16;
  if (theirs <= own + kMostAhead) return;
  const Status status =
      failed(ErrorCode::kDataLoss, "{} says that it has come to update {}, and this rank to {}"_message,
             context_.group.describe(rank), theirs, own);
  context_.group.fail(status);
  status.throw_if_error();
}

// An update that ended early on some ranks has been begun, or published, on others. Rows that were not written stay as
// they are, and have the others' version: whoever wrote part of a step answers for its values.
void RuntimeImpl::align(std::span<const IntervalEnd> ends) {
  uint64_t updates = context_.updates;
  for (size_t q = 0; q < ends.size(); ++q) {
    require_near(static_cast<int>(q), ends[q].updates, context_.updates);
    updates = std::max(updates, ends[q].updates);
  }
  if (updates > context_.updates) {
    context_.updates = updates;
    context_.group.set(Word::kRetired, collective::kWholeRank, updates);
  }
  std::vector<Parameter*> behind;
  for (size_t i = 0; i < context_.parameters.size(); ++i) {
    Publication& shown = context_.parameters[i]->publication;
    uint64_t version = shown.version;
    for (size_t q = 0; q < ends.size(); ++q) {
      if (i >= ends[q].versions.size()) continue;
      require_near(static_cast<int>(q), ends[q].versions[i], shown.version);
      version = std::max(version, ends[q].versions[i]);
    }
    if (version == shown.version) continue;
    shown.version = version - 1;
    behind.push_back(context_.parameters[i].get());
  }
  if (!behind.empty()) publisher_.show(behind);
  in_update_ = writing_ = false;
  updating_.clear();
}

void RuntimeImpl::begin_update(std::span<const WeightId> weights, const UpdateOptions& options) {
  if (in_update_) fail(ErrorCode::kInvalidArgument, "an update has begun and not ended"_message);
  std::vector<Parameter*> list = list_of(weights);
  for (const WeightId weight : weights) context_.started(weight);
  std::erase_if(list, [](const Parameter* p) { return p->weight.spec.planes_only; });
  const Deadline deadline = Deadline::after(options.timeout.value_or(context_.group.timeout()));
  const std::string meeting = "to come to " + options.what;
  drain(meeting, deadline);
  gradients_.keep(gradients_.added());
  consumptions_.begin_update();
  context_.compute->synchronize(context_.group.deadline());
  consumptions_.detach(list);
  ++context_.updates;
  context_.group.set(Word::kRetired, collective::kWholeRank, context_.updates);
  if (!mutated(Mutation::kRetireNotAwaited))
    context_.device.wait_host(
        *context_.group.all_at_least(Word::kRetired, collective::kWholeRank, context_.updates, meeting), deadline);
  for (int q = 0; q < context_.ranks(); ++q)
    if (context_.group.get(q, Word::kRetired, collective::kWholeRank) > context_.updates)
      context_.group.distrust(q, Word::kRetired, collective::kWholeRank,
                              fmt::format("rank {} begins update {}", context_.rank(), context_.updates));
  publisher_.check_unwritten();
  memory_->end_step();
  pool_->trim();
  if (context_.captures == 0) captured_pool_->trim();
  for (const Parameter* p : list)
    context_.note_host_read("update", *p, p->gradient.data,
                            static_cast<size_t>(bytes_of(p->gradient.dtype, p->weight.elements())));
  open(std::move(list));
  in_update_ = true;
}

void RuntimeImpl::open(std::vector<Parameter*> weights) {
  for (Parameter* p : weights) {
    p->publication.current->store(false);
    p->publication.digests.clear();
    context_.note_host_write("update", *p, p->shard->data(), p->shard->bytes());
  }
  updating_ = std::move(weights);
}

void RuntimeImpl::shut(bool later) {
  context_.compute->synchronize(context_.group.deadline());
  std::vector<Parameter*> now;
  for (Parameter* p : updating_) {
    context_.note_host_write("updated", *p, p->shard->data(), p->shard->bytes());
    if (later && options_.publish == PublishAt::kFirstUse && !p->weight.in_place && !p->weight.spec.planes_only)
      p->publication.stale = true;
    else
      now.push_back(p);
  }
  publish_with_masters(now);
}

void RuntimeImpl::end_update() {
  if (!in_update_ || writing_) fail(ErrorCode::kInvalidArgument, "end_update() without begin_update()"_message);
  shut(true);
  in_update_ = false;
  ++context_.counters.updates;
  agree_on_order();
  consumptions_.end_update();
}

std::vector<std::string> RuntimeImpl::begin_write(std::span<const WeightId> weights, std::string told,
                                                  const UpdateOptions& options, bool begins) {
  if (in_update_) fail(ErrorCode::kInvalidArgument, "an update has begun and not ended"_message);
  std::vector<Parameter*> list = list_of(weights);
  for (const WeightId weight : weights) context_.started(weight);
  std::erase_if(list, [](const Parameter* p) { return p->weight.spec.planes_only; });
  publisher_.check_unwritten();
  consumptions_.stop_reading();
  context_.compute->synchronize(context_.group.deadline());
  consumptions_.detach(list);
  // No rank sends its part before it has stopped reading: the answers say that all have.
  const TimePoint began = Clock::steady().now();
  std::vector<std::string> answers = context_.group.exchange(options.what, std::move(told), options.timeout);
  context_.counters.write_seconds += to_seconds(Clock::steady().now() - began);
  if (!begins || std::ranges::any_of(answers, [&](const std::string& each) { return each != answers.front(); }))
    return answers;
  // A rank that was interrupted while it waited for this one does not write.
  context_.group.hear_refusal();
  open(std::move(list));
  in_update_ = writing_ = true;
  return answers;
}

void RuntimeImpl::end_write() {
  if (!writing_) fail(ErrorCode::kInvalidArgument, "end_write() without begin_write()"_message);
  shut(false);
  in_update_ = writing_ = false;
  ++context_.counters.writes;
}

void RuntimeImpl::next_step() {
  if (in_update_) fail(ErrorCode::kInvalidArgument, "an update has begun and not ended"_message);
  consumptions_.begin_update();
  memory_->end_step();
  pool_->trim();
  agree_on_order();
  consumptions_.end_update();
}

void RuntimeImpl::publish(std::span<const WeightId> weights, const float* noop) {
  std::vector<Parameter*> stale;
  for (Parameter* p : list_of(weights))
    if (p->publication.stale) stale.push_back(p);
  context_.compute->synchronize(context_.group.deadline());
  publisher_.publish(stale, noop);
}

}  // namespace tessera::etp
