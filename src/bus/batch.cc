#include "bus/batch.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "tessera/store.h"

namespace tessera::bus {
namespace {

constexpr Duration kReminder = seconds(10);

}  // namespace

BatchImpl::BatchImpl(BatchSetup setup) : setup_(std::move(setup)), created_(Clock::steady().now()) {}

std::shared_ptr<Operation> BatchImpl::send(std::optional<int64_t>, Timeout) {
  fail(ErrorCode::kInvalidArgument, "{}: {} accepts it, so it can recv, not send", describe(), identity().name());
}

std::shared_ptr<Operation> BatchImpl::recv(std::optional<int64_t>, Timeout) {
  fail(ErrorCode::kInvalidArgument, "{}: {} offers it, so it can send, not recv", describe(), identity().name());
}

int64_t BatchImpl::wait_version(int64_t, Timeout) {
  fail(ErrorCode::kInvalidArgument, "{}: {} offers it; versions are waited for where they are received", describe(),
       identity().name());
}

std::string BatchImpl::describe() const {
  return fmt::format("batch {} of pair {}", setup_.id, setup_.view.name);
}

Attach BatchImpl::attach_message(Attach::Purpose purpose) const {
  return {.pair = setup_.view.name, .batch = setup_.id, .purpose = purpose, .match_hash = setup_.agreement.match_hash};
}

void BatchImpl::check_caller(const Caller& caller, const std::string& job, const std::vector<RankRecord>& ranks) const {
  const Hello& hello = caller.hello;
  const std::string who = rank_name(hello.job, hello.rank);
  if (hello.job != job || hello.rank < 0 || static_cast<size_t>(hello.rank) >= ranks.size())
    fail(ErrorCode::kMismatch, "{}: {} is not of job {} with its {} ranks", describe(), who, job, ranks.size());
  if (ranks[static_cast<size_t>(hello.rank)].incarnation != hello.incarnation)
    fail(ErrorCode::kMismatch, "{}: {} is not the process that joined the pair", describe(), who);
  if (caller.attach.match_hash != setup_.agreement.match_hash)
    fail(ErrorCode::kMismatch, "{}: {} has read other registrations than {}", describe(), who, identity().name());
}

void BatchImpl::attach(Deadline deadline) {
  try {
    setup_.agent->run_on_loop([this] {
      connect();
      watch_members();
      setup_.agent->register_batch(setup_.view.name, setup_.id, this);
      readiness_changed();
    });
    for (const Call& call : calls_) {
      try {
        setup_.agent->call(call.record.address, call.name, deadline, call.on_link);
      } catch (const Error& error) {
        const bool gone = error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kNotFound;
        throw Error(gone ? ErrorCode::kPeerLost : error.code(),
                    fmt::format("{}: {} cannot reach {}: {}", describe(), identity().name(), call.name, error.what()));
      }
    }
    std::unique_lock lock(mutex_);
    const auto ready = [&] { return attached_ || !lost_.ok(); };
    while (!changed_.wait_for(lock, setup_.stop, std::min(deadline.left(), kReminder), ready)) {
      const std::string waiting =
          fmt::format("{}: {} waits to be attached to {}", describe(), identity().name(), fmt::join(unready_, ", "));
      if (setup_.stop.stop_requested()) fail(ErrorCode::kCancelled, "{}: interrupted", waiting);
      if (deadline.passed()) fail(ErrorCode::kDeadlineExceeded, "{}: the deadline has passed", waiting);
      log().warn("{}", waiting);
    }
    if (!attached_) lost_.throw_if_error();  // else as if it had come later: a version may be there to be taken
  } catch (...) {
    close();
    throw;
  }
  setup_.agent->run_on_loop([this] { unwatch_members(); });
  allocations_at_start_ = allocations_.load();
  plans_at_start_ = setup_.agent->plans();
  store_requests_at_start_ = setup_.store->requests();
  register_seconds_ += to_seconds(Clock::steady().now() - created_);
}

void BatchImpl::watch_members() {
  const auto watch = [&](const std::string& job, const std::vector<RankRecord>& ranks) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      UniqueFd fd = open_pidfd(ranks[rank].incarnation);
      const std::string name = rank_name(job, static_cast<Rank>(rank));
      if (!fd) {
        if (liveness_of(ranks[rank].incarnation) == Liveness::kDead)
          break_batch(failed(ErrorCode::kPeerLost, "the process of {} has ended", name));
        continue;
      }
      loop().add_fd(fd.get(), EPOLLIN, [this, name, raw = fd.get()](uint32_t) {
        loop().remove_fd(raw);
        break_batch(failed(ErrorCode::kPeerLost, "the process of {} has ended", name));
      });
      member_pidfds_.push_back(std::move(fd));
    }
  };
  watch(identity().job, setup_.view.own);
  watch(setup_.view.peer_job, setup_.view.peer);
}

void BatchImpl::unwatch_members() {
  for (const UniqueFd& fd : member_pidfds_) loop().remove_fd(fd.get());
  member_pidfds_.clear();
}

void BatchImpl::readiness_changed() {
  const std::vector<std::string> waiting = unready();
  const std::lock_guard lock(mutex_);
  attached_ = waiting.empty();
  unready_ = waiting;
  changed_.notify_all();
}

void BatchImpl::fail_attach(const Status& status) {
  const std::lock_guard lock(mutex_);
  if (attached_ || !lost_.ok()) return;
  lost_ =
      Status(status.code(), fmt::format("{}: {} was attaching: {}", describe(), identity().name(), status.message()));
  changed_.notify_all();
}

std::shared_ptr<Operation> BatchImpl::begin_operation(const char* what, Timeout timeout, bool although_broken) {
  if (closed_) fail(ErrorCode::kCancelled, "{}: {} has closed it", describe(), identity().name());
  if (operation_)
    fail(ErrorCode::kInvalidArgument, "{}: a {} of {} is still under way: wait for its handle first", describe(),
         operation_name_, identity().name());
  if (!although_broken) broken_status().throw_if_error();
  if (ended_ && ended_.use_count() == 1) {
    operation_ = std::move(ended_);
    operation_->restart(shared_from_this(), ++operation_number_);
  } else {
    operation_ = std::make_shared<Operation>(shared_from_this(), ++operation_number_);
  }
  operation_name_ = what;
  operation_start_ = Clock::steady().now();
  data_start_ = TimePoint{};
  set_deadline(Deadline::after(timeout));
  return operation_;
}

void BatchImpl::set_deadline(Deadline deadline) {
  deadline_ = deadline;
  if (timer_ != 0 && timer_due_ <= deadline.when()) return;
  loop().cancel_timer(timer_);
  timer_due_ = deadline.when();
  timer_ = loop().add_timer(timer_due_, [this] { watch_deadline(); });
}

void BatchImpl::watch_deadline() {
  timer_ = 0;
  if (!operation_) return;
  if (deadline_.passed())
    on_deadline();
  else
    set_deadline(deadline_);
}

bool BatchImpl::cancel(uint64_t operation) {
  bool cancelled = false;
  setup_.agent->run_on_loop([&] { cancelled = operation_ && operation_number_ == operation && cancel_operation(); });
  return cancelled;
}

void BatchImpl::end_operation(const Status& status) {
  if (!operation_) return;
  ended_ = std::move(operation_);
  if (status.ok()) ++transfers_;
  const std::shared_ptr<Operation> operation = ended_;  // finish() may let the batch go
  operation->finish(status, sample());
}

void BatchImpl::break_batch(const Status& status) {
  if (closed_) return;
  if (broken_.ok()) {
    broken_ = status;
    log().info("{}: {}: {}", identity().name(), describe(), status.message());
  }
  if (!may_go_on()) fail_attach(status);
  on_broken(status);  // each time: what a second loss takes away may be what the operation still needs
}

Status BatchImpl::broken_status() const {
  return broken_.ok() ? Status() : Status(broken_.code(), fmt::format("{}: {}", describe(), broken_.message()));
}

double BatchImpl::seconds_of_data() const {
  const TimePoint start = data_start_.load();
  return start == TimePoint{} ? 0 : to_seconds(Clock::steady().now() - start);
}

BatchStats BatchImpl::stats() const {
  const PlanStats& plan = setup_.routes.stats;
  return {.tensors = static_cast<int64_t>(setup_.agreement.match.tensors.size()),
          .skipped = setup_.agreement.match.skipped,
          .routes = plan.routes,
          .bytes_moved = plan.bytes_moved,
          .bytes_lower_bound = plan.bytes_lower_bound,
          .rank_bytes = rank_bytes_.load(),
          .transfers = transfers_.load(),
          .register_seconds = register_seconds_,
          .store_requests = static_cast<int64_t>(setup_.store->requests() - store_requests_at_start_),
          .plans = setup_.agent->plans() - plans_at_start_,
          .allocations = allocations_.load() - allocations_at_start_};
}

std::vector<TensorDigest> BatchImpl::digests() const {
  const std::lock_guard lock(mutex_);
  std::vector<TensorDigest> named;
  for (size_t i = 0; i < digests_.size(); ++i)
    named.push_back({.name = setup_.tensors[i].name,
                     .d0 = digests_[i].d[0],
                     .d1 = digests_[i].d[1],
                     .elements = static_cast<int64_t>(digests_[i].elements)});
  return named;
}

void BatchImpl::close() {
  std::shared_ptr<Operation> pending;
  setup_.agent->run_on_loop([&] {
    if (closed_) return;
    closed_ = true;
    setup_.agent->unregister_batch(setup_.view.name, setup_.id, this);
    pending = operation_;
    if (operation_)
      fail_operation(failed(ErrorCode::kCancelled, "{}: {} has closed it", describe(), identity().name()));
  });
  // The operation ends once nothing touches the registered memory any more; the batch itself bounds that time.
  if (pending) pending->wait_for(std::chrono::hours(1));
  setup_.agent->run_on_loop([&] {
    loop().cancel_timer(timer_);
    unwatch_members();
    detach_all(broken_);
  });
  try {
    setup_.rendezvous->withdraw(setup_.view, setup_.id);
  } catch (const Error& error) {
    log().info("{}: its records stay in the store until the lease ends: {}", describe(), error.what());
  }
}

}  // namespace tessera::bus
