#include "bus/batch/batch.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "tessera/store.h"

namespace tessera::bus {

BatchImpl::BatchImpl(BatchSetup setup)
    : setup_(std::move(setup)),
      present_(fmt::format("{}/{}", setup_.pair, setup_.id)),
      figures_(*setup_.agent, *setup_.store),
      reaches_all_(std::ranges::all_of(*setup_.tensors, [this](const TensorSpec& tensor) {
        return setup_.runs->reaches(static_cast<const std::byte*>(tensor.data));
      })) {}

std::shared_ptr<OperationClient> BatchImpl::send(std::optional<int64_t>, Timeout) {
  fail(ErrorCode::kInvalidArgument, "{}: {} accepts it, so it can recv, not send"_message, describe(),
       identity().name());
}

std::shared_ptr<OperationClient> BatchImpl::recv(std::optional<int64_t>, Timeout) {
  fail(ErrorCode::kInvalidArgument, "{}: {} offers it, so it can send, not recv"_message, describe(),
       identity().name());
}

std::shared_ptr<OperationClient> BatchImpl::stage(std::optional<int64_t>, Timeout) {
  fail(ErrorCode::kInvalidArgument, "{}: {} offers it, so it can send, not stage"_message, describe(),
       identity().name());
}

int64_t BatchImpl::commit() {
  fail(ErrorCode::kInvalidArgument, "{}: {} offers it, so it has nothing to commit"_message, describe(),
       identity().name());
}

void BatchImpl::relocate(std::span<const TensorSpec> tensors) {
  process_.require(identity().name());
  const bool terms = sends() && std::ranges::any_of(manifest_->entries, [](const ManifestEntry& entry) {
                       return entry.layout.has_partial();
                     });
  if (staged() ? terms : !sends())
    fail(ErrorCode::kUnimplemented, "{}: {} {}: its tensors cannot be moved: close it and register it again"_message,
         describe(), identity().name(), terms ? "offers terms of Partial tensors" : "accepts it in place");
  if (manifest_of(identity(), tensors, setup_.layout).hash() != manifest_->hash())
    fail(ErrorCode::kInvalidArgument,
         "{}: the moved tensors have other names, dtypes, shapes, layouts or wire formats than {} has registered: "
         "close it and "
         "register it again"_message,
         describe(), identity().name());
  setup_.agent->run_on_loop([&] {
    if (closed_) fail(ErrorCode::kCancelled, "{}: {} has closed it"_message, describe(), identity().name());
    if (operation_)
      fail(ErrorCode::kInvalidArgument, "{}: a {} of {} is still under way: wait for its handle first"_message,
           describe(), present_.name, identity().name());
    if (snapshots_) snapshots_->relocate(*manifest_, tensors);
    {
      const MutexLock lock(mutex_);
      setup_.tensors = std::make_shared<const std::vector<TensorSpec>>(tensors.begin(), tensors.end());
      ++relocation_;
    }
    const LogScope scope = log_scope();
    log_event(LogLevel::info, "batch.relocated", {});
    if (!snapshots_) renew_sessions();
  });
}

bool BatchImpl::withdraw(int64_t) {
  fail(ErrorCode::kInvalidArgument, "{}: {} accepts it, so it has nothing to withdraw"_message, describe(),
       identity().name());
}

void BatchImpl::wait_peers(int, int64_t, Timeout) {
  fail(ErrorCode::kInvalidArgument, "{}: {} accepts it, so its peer is there"_message, describe(), identity().name());
}

int64_t BatchImpl::wait_version(int64_t, Timeout) {
  fail(ErrorCode::kInvalidArgument, "{}: {} offers it; versions are waited for where they are received"_message,
       describe(), identity().name());
}

std::string BatchImpl::describe() const {
  return fmt::format("batch {} of pair {}", setup_.id, setup_.pair);
}

void BatchImpl::require_version(int64_t version) const {
  if (version > kMaxVersion)
    fail(ErrorCode::kInvalidArgument, "{}: a version is a whole number from 1 to {} (not {})"_message, describe(),
         kMaxVersion, version);
}

// --- registering ---------------------------------------------------------------------------------

void BatchImpl::open(const PairView& view, const CallLimits& limits) {
  setup_.agent->run_on_loop([&] {
    setup_.runs->open([this](const Status& status) {
      if (operation_) fail_operation(Status(status.code(), fmt::format("{}: {}", describe(), status.message())));
    });
  });
  manifest_ = std::make_shared<const Manifest>(manifest_of(identity(), *setup_.tensors, setup_.layout));
  for (const ManifestEntry& entry : manifest_->entries)
    if (sends() && !entry.planes.empty() && entry.layout.has_partial())
      fail(
          ErrorCode::kInvalidArgument,
          "{}: tensor {} is quantised already, to {}, and has terms of a sum (layout {}): offer terms of floats, which are quantised once they are reduced"_message,
          describe(), entry.name, to_string(*entry.wire), entry.layout.to_string());
  if (!sends())
    find_ties(registered_tensors(*manifest_, *setup_.tensors, identity().rank));  // refuse overlaps before others wait
  if (staged()) {
    snapshots_ = std::make_unique<Snapshots>(*setup_.agent, *setup_.runs, *manifest_, *setup_.tensors,
                                             sends() ? Snapshots::Use::kSend : Snapshots::Use::kReceive,
                                             sends() ? static_cast<uint32_t>(setup_.options.snapshots) : 1, limits,
                                             [this] { on_copied(); });
    figures_.count_allocation();
    figures_.count_snapshots(snapshots_->slots() * snapshots_->slot_bytes());
  }
  series_.emplace(metrics_, setup_.pair, setup_.id, side());
  std::vector<Meeting*> meetings;
  setup_.agent->run_on_loop([&] {
    if (view.jobs.empty()) meetings.push_back(&add_meeting(view, false));
    for (const std::string& job : view.jobs) meetings.push_back(&add_meeting(view.of(job), false));
    setup_.agent->add_inspected(this);
  });
  if (view.jobs.empty()) return meetings.front()->meet(limits);
  for (Meeting* meeting : meetings) meeting->meet_in_background();
}

BatchOffer BatchImpl::own_offer() const {
  const int64_t version = version_.load();
  return {.sends = sends(),
          .digest = setup_.digest,
          .delta = can_delta(),
          .version = version,
          .newest = version,
          .manifest = manifest_};
}

SessionSetup BatchImpl::session_setup(const PairView& view, Agreement agreement) {
  const auto own = static_cast<int>(view.own.size());
  const auto peer = static_cast<int>(view.peer.size());
  const Rank rank = identity().rank;
  note_delta(agreement);
  if (setup_.options.pinned) require_pinned(view, agreement.match);
  setup_.agent->count_plan();
  BatchRoutes routes = plan_batch(agreement.match, sends() ? own : peer, sends() ? peer : own, sends(), rank);
  std::shared_ptr<const std::vector<TensorSpec>> registered;
  uint64_t relocation = 0;
  {
    const MutexLock lock(mutex_);
    registered = setup_.tensors;
    relocation = relocation_;
  }
  const CopyIsCurrent current = [this, registered](size_t spec, uint32_t slot) {
    return snapshots_ ? snapshots_->is_current(spec, slot) : (*registered)[spec].quantized->current();
  };
  std::vector<LocalTensor> tensors =
      local_tensors(agreement.match, snapshots_ ? snapshots_->specs() : std::span(*registered), rank, sends(), current);
  std::vector<LocalTensor> terms;
  if (snapshots_) terms = local_tensors(agreement.match, *registered, rank, sends());
  require_movable(agreement.match, tensors);
  return {.agent = setup_.agent,
          .runs = setup_.runs.get(),
          .stall = setup_.stall,
          .batch = setup_.id,
          .relocation = relocation,
          .view = view,
          .agreement = std::move(agreement),
          .routes = std::move(routes),
          .tensors = std::move(tensors),
          .staged_terms = std::move(terms),
          .staged = staged(),
          .slots = snapshots_ && sends() ? snapshots_->slots() : 1,
          .slot_bytes = snapshots_ && sends() ? snapshots_->slot_bytes() : 0,
          .on_allocation = [this] { figures_.count_allocation(); },
          .on_moved =
              [this](int64_t bytes, const DeltaBytes& deltas) {
                figures_.count_moved(bytes, deltas);
                metrics_.bytes(side()).add(static_cast<uint64_t>(bytes));
              },
          .on_amaxes_agreed = [this] { figures_.count_amax_exchange(); }};
}

// In place, the tensors themselves are compared, and deltas are applied to them.
bool BatchImpl::can_delta() const {
  return setup_.options.delta && (staged() || reaches_all_);
}

void BatchImpl::note_delta(const Agreement& agreement) {
  if (!setup_.options.delta || agreement.delta || told_no_delta_.exchange(true)) return;
  const LogScope scope = log_scope();
  log_event(LogLevel::warn, "delta.off", {}, "every version travels in full: {}"_message,
            can_delta() ? "not all ranks of both jobs have asked for deltas"
                        : "its tensors lie in private memory behind an agent, in place");
}

// The only place that decides what cannot be done with memory that only another process can access. A staged batch
// quantises and decodes in Tessera's own memory; so does one with Partial tensors, in what they are reduced to.
void BatchImpl::require_movable(const Match& match, std::span<const LocalTensor> tensors) const {
  if (reaches_all_) return;
  for (size_t i = 0; i < match.tensors.size(); ++i) {
    const Match::Tensor& tensor = match.tensors[i];
    const bool read = !tensor.src.has_partial() && !tensors[i].empty() && !setup_.runs->reaches(tensors[i].data);
    const bool quantised = tensor.wire && !staged() && (read || !sends());
    if (!quantised && !(sends() && tensor.of)) continue;
    fail(
        ErrorCode::kUnimplemented,
        "{}: tensor {} is to be {} {}, which is not supported for tensors in private memory behind an agent: move them "
        "into shared memory, or do without the agent or the {}"_message,
        describe(), tensor.name, quantised ? "quantised to" : "filled with a slice of",
        quantised ? to_string(*tensor.wire) : std::string_view(tensor.source), quantised ? "wire format" : "slice");
  }
}

void BatchImpl::require_pinned(const PairView& view, const Match& match) {
  Pinned now{.world = view.peer.size(), .layouts = {}};
  for (const Match::Tensor& tensor : match.tensors) {
    const std::string layout = (sends() ? tensor.dst : tensor.src).to_string();
    now.layouts.emplace_back(
        tensor.name,
        tensor.wire ? fmt::format("{} and quantised to {}"_message, layout, to_string(*tensor.wire)) : layout);
  }
  const MutexLock lock(mutex_);
  const auto [it, first] = pinned_.try_emplace(view.peer_job, now);
  if (first || it->second == now) return;
  const Pinned& before = it->second;
  if (before.world != now.world)
    fail(ErrorCode::kMismatch, "{}: it is pinned, and job {} comes back with {} ranks, not {}"_message, describe(),
         view.peer_job, now.world, before.world);
  for (const auto& [name, layout] : now.layouts) {
    const auto known = std::ranges::find(before.layouts, name, &std::pair<std::string, std::string>::first);
    if (known == before.layouts.end() || known->second != layout)
      fail(ErrorCode::kMismatch, "{}: it is pinned, and job {} comes back with tensor {} laid out {}, not {}"_message,
           describe(), view.peer_job, name, layout, known == before.layouts.end() ? "absent" : known->second);
  }
  fail(ErrorCode::kMismatch, "{}: it is pinned, and job {} comes back with {} tensors, not {}"_message, describe(),
       view.peer_job, now.layouts.size(), before.layouts.size());
}

Meeting& BatchImpl::add_meeting(PairView view, bool parts) {
  meetings_.push_back(std::make_unique<Meeting>(*setup_.agent, *setup_.rendezvous,
                                                setup_.exchanges->of(view, setup_.id), *this, setup_.id,
                                                std::move(view), parts));
  return *meetings_.back();
}

Meeting* BatchImpl::meeting_with(const std::string& job) {
  const auto it = std::ranges::find_if(meetings_, [&](const auto& meeting) { return meeting->job() == job; });
  return it == meetings_.end() ? nullptr : it->get();
}

void BatchImpl::forget(std::shared_ptr<Session> session) {
  // Posted, since one of the session's own functions may be the caller.
  loop().post([session = std::move(session)] { session->close(session->parting()); });
}

void BatchImpl::retire(std::shared_ptr<Session> session) {
  Meeting* meeting = meeting_with(session->peer_job());
  forget(std::move(session));
  if (!closed_ && meeting != nullptr) meeting->meet_in_background();
}

void BatchImpl::count_session(const Session& session, const RankShare& share) {
  const SessionSetup& made = session.setup();
  const BatchStats stats = figures_.begin_session(made, share);
  const bool first = stats.sessions == 1;
  const double again = to_seconds(Clock::steady().now() - made.agreement.began);  // from when both jobs are there
  const LogScope scope = log_scope();
  log_event(LogLevel::info, first ? "batch.registered" : "batch.registered_again",
            {{"with", session.peer_job()}, {"bytes", share.bytes}, {"seconds", first ? stats.register_seconds : again}},
            "{} tensors, {} routes, {} ranks at the other side", stats.tensors, stats.routes, made.view.peer.size());
}

// --- operations ----------------------------------------------------------------------------------

std::shared_ptr<Operation> BatchImpl::begin_operation(const char* what, Timeout timeout) {
  if (closing_) fail(ErrorCode::kCancelled, "{}: {} has closed it"_message, describe(), identity().name());
  if (operation_)
    fail(ErrorCode::kInvalidArgument, "{}: a {} of {} is still under way: wait for its handle first"_message,
         describe(), present_.name, identity().name());
  if (present_.ended && present_.ended.use_count() == 1) {
    operation_ = std::move(present_.ended);
    operation_->restart(shared_from_this(), ++present_.number);
  } else {
    operation_ = std::make_shared<Operation>(shared_from_this(), ++present_.number);
  }
  present_.name = what;
  present_.start = Clock::steady().now();
  present_.data_start = {};
  Trace::begin(present_.name, present_.track, {.subject = present_.subject});
  set_deadline(Deadline::after(timeout));
  if (present_.peers_timer == 0) present_.peers_timer = loop().add_timer_after(kSilence, [this] { watch_peers(); });
  return operation_;
}

void BatchImpl::enter(const char* phase) {
  if (present_.phase != nullptr) Trace::end(present_.phase, present_.track);
  present_.phase = phase;
  if (present_.phase != nullptr && Trace::on())
    Trace::begin(present_.phase, present_.track, {.subject = present_.subject, .version = operation_->version()});
}

void BatchImpl::set_deadline(Deadline deadline) {
  present_.deadline = deadline;
  if (present_.timer != 0 && present_.timer_due <= deadline.when()) return;
  loop().cancel_timer(present_.timer);
  present_.timer_due = deadline.when();
  present_.timer = loop().add_timer(present_.timer_due, [this] { watch_deadline(); });
}

void BatchImpl::watch_deadline() {
  present_.timer = 0;
  if (!operation_) return;
  if (present_.deadline.passed())
    on_deadline();
  else
    set_deadline(present_.deadline);
}

void BatchImpl::watch_peers() {
  present_.peers_timer = 0;
  if (!operation_) return;
  present_.peers_timer = loop().add_timer_after(kStopPeriod, [this] { watch_peers(); });
  if (Clock::steady().now() - present_.start < kSilence) return;
  check_peers();
  setup_.runs->check();
}

bool BatchImpl::cancel(uint64_t operation) {
  bool cancelled = false;
  setup_.agent->run_on_loop([&] { cancelled = operation_ && present_.number == operation && cancel_operation(); });
  return cancelled;
}

void BatchImpl::end_operation(const Status& status) {
  if (!operation_) return;
  enter(nullptr);
  present_.ended = std::move(operation_);
  // A version that is staged counts once it is committed.
  if (status.ok() && std::string_view(present_.name) != kStageName) figures_.count_transfer();
  const std::shared_ptr<Operation> operation = present_.ended;  // finish() may release the batch
  const Progress progress = sample();
  observe_end(operation->version(), status, progress);
  operation->finish(status, progress);
}

void BatchImpl::observe_end(int64_t version, const Status& status, const Progress& progress) {
  const Duration took = Clock::steady().now() - present_.start;
  Trace::end(present_.name, present_.track,
             {.subject = present_.subject, .version = version, .bytes = progress.bytes_done});
  if (std::string_view(present_.name) != kCommitName) {
    metrics_.transfers(side(), outcome_of(status)).add();
    if (status.ok()) metrics_.seconds(side()).observe(took);
  }
  if (series_) series_->set_version(version_.load());
  if (!log().should_log(LogLevel::debug)) return;
  const LogScope scope = log_scope();
  if (!status.ok())
    log_event(LogLevel::debug, "transfer.failed", {{"operation", present_.name}, {"version", version}}, "{}",
              status.message());
  else
    log_event(LogLevel::debug, "transfer.done",
              {{"operation", present_.name},
               {"version", version},
               {"bytes", progress.bytes_done},
               {"seconds", to_seconds(took)}},
              "{:.3f} GB/s",
              progress.seconds > 0 ? static_cast<double>(progress.bytes_done) * 1e-9 / progress.seconds : 0);
}

Progress BatchImpl::sample() const {
  Progress progress;
  setup_.agent->run_on_loop([&] {
    progress = sample_sessions();
    progress.seconds = present_.data_start == TimePoint{} ? 0 : to_seconds(Clock::steady().now() - present_.data_start);
  });
  return progress;
}

// --- statistics ----------------------------------------------------------------------------------

BatchReport BatchImpl::report() const {
  BatchReport report{.pair = setup_.pair,
                     .id = setup_.id,
                     .sends = sends(),
                     .staged = staged(),
                     .torn = torn(),
                     .undecided = undecided(),
                     .version = version_.load(),
                     .newest = newest(),
                     .transfers = figures_.transfers(),
                     .bytes = figures_.bytes_moved()};
  const std::vector<const Session*> attached = sessions();
  for (const auto& meeting : meetings_) {
    const auto it = std::ranges::find(attached, meeting->job(), &Session::peer_job);
    const bool there = it != attached.end() && !(*it)->broken();
    report.peers.push_back({.job = meeting->job(),
                            .world = it == attached.end() ? 0 : static_cast<int32_t>((*it)->setup().view.peer.size()),
                            .attached = there});
  }
  if (!operation_) return report;
  const Progress progress = sample();
  report.operation = present_.name;
  report.phase = present_.phase == nullptr ? "" : present_.phase;
  report.operation_version = operation_->version();
  report.operation_microseconds = microseconds_since(present_.start);
  report.bytes_done = progress.bytes_done;
  report.bytes_total = progress.bytes_total;
  for (std::string& text : waits_for())
    report.waits.push_back({.text = std::move(text), .microseconds = report.operation_microseconds});
  return report;
}

std::vector<BatchPeer> BatchImpl::peers() const {
  process_.require(identity().name());
  std::vector<BatchPeer> peers;
  setup_.agent->run_on_loop([&] {
    const std::vector<const Session*> attached = sessions();
    for (const auto& meeting : meetings_) {
      BatchPeer& peer = peers.emplace_back(BatchPeer{.job = meeting->job()});
      const auto it = std::ranges::find(attached, meeting->job(), &Session::peer_job);
      if (it != attached.end()) {
        peer.attached = !(*it)->broken();
        peer.world = static_cast<int>((*it)->setup().view.peer.size());
        peer.error = (*it)->broken_status();
      }
      describe_peer(peer);
    }
  });
  return peers;
}

Untaken BatchImpl::close(std::optional<Timeout> linger) {
  const Untaken untaken = await_takers(linger.value_or(setup_.options.linger.value_or(Timeout(0))));
  part({});
  return untaken;
}

void BatchImpl::part(const Status& why) {
  std::shared_ptr<Operation> pending;
  bool was_closed = false;
  setup_.agent->run_on_loop([&] {
    closing_ = true;
    was_closed = std::exchange(closed_, true);
    pending = operation_;
    if (was_closed) return;
    parting_ = why;
    {
      const MutexLock lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    if (operation_)
      fail_operation(
          !why.ok() ? why
                    : failed(ErrorCode::kCancelled, "{}: {} has closed it"_message, describe(), identity().name()));
  });
  // The operation ends once nothing accesses the registered memory any more; the batch itself limits that time.
  if (pending) pending->wait_for(std::chrono::hours(1), {});
  if (was_closed) return;
  await_readers();
  setup_.agent->run_on_loop([&] {
    loop().cancel_timer(present_.timer);
    loop().cancel_timer(present_.peers_timer);
    setup_.runs->close();
    close_sessions();
  });
  for (const auto& meeting : meetings_) meeting->stop();
  on_meetings_stopped();
  setup_.agent->run_on_loop([&] {
    close_sessions();  // one that a meeting has made in the meantime
    setup_.agent->remove_inspected(this);
    drop_snapshots();
  });
  on_closed();
  series_.reset();
  const LogScope scope = log_scope();
  log_event(LogLevel::info, "batch.closed", {{"version", version_.load()}}, "{} transfers", figures_.transfers());
  for (const std::string& job : setup_.named) setup_.agent->release_batch(setup_.pair, setup_.id, job);
  for (const auto& meeting : meetings_) setup_.agent->release_batch(setup_.pair, setup_.id, meeting->job());
}

}  // namespace tessera::bus
