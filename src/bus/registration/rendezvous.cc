#include "bus/registration/rendezvous.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "base/fail.h"
#include "base/log.h"
#include "base/runtime_dir.h"
#include "bus/registration/pair_records.h"
#include "store/prefix_follower.h"

namespace tessera::bus {
namespace {

constexpr Duration kLeaseTtl = seconds(10);
constexpr Duration kReminder = seconds(10);
constexpr Duration kLookPeriod = seconds(60);  // in the background
constexpr Duration kDividedFor = seconds(10);  // until ranks that join different jobs are taken for a mistake
constexpr Duration kHintTimeout = seconds(0.5);
constexpr Duration kTellPeriod = seconds(0.1);  // of the status text of a wait that many ranks end

// The status text of a wait that many ranks end one by one: at most kTellPeriod old.
class WaitText {
 public:
  WaitText(WaitList& waits, std::function<std::string()> text) : entry_(waits), text_(std::move(text)) {}

  void tell() {
    entry_.set(text_());
    outdated_ = false;
    next_ = Deadline::after(kTellPeriod);
  }
  // True: it has just become outdated, and due() says when to tell it.
  bool changed() {
    const bool was = std::exchange(outdated_, true);
    if (next_.passed()) tell();
    return outdated_ && !was;
  }
  bool outdated() const { return outdated_; }
  Duration due() const { return outdated_ ? next_.left() : Duration::max(); }

 private:
  WaitList::Entry entry_;
  const std::function<std::string()> text_;
  bool outdated_ = false;
  Deadline next_ = Deadline::at({});
};

// The processes of a view, by the keys of their records.
class Members {
 public:
  Members(const Identity& self, const PairView& view) {
    const auto add = [&](const std::string& job, const std::vector<RankRecord>& ranks, bool is_peer) {
      for (size_t rank = 0; rank < ranks.size(); ++rank)
        members_.emplace(pair_key(self.name_space, view.name, job, static_cast<Rank>(rank)),
                         Member{ranks[rank].incarnation, is_peer});
    };
    add(self.job, view.own, false);
    add(view.peer_job, view.peer, true);
  }

  // Whether a record is of one of their ranks, and of another process.
  bool differ(const std::string& key, const std::string& value) const {
    const auto it = members_.find(key);
    try {
      return it != members_.end() && read_record<PairRecord>(key, value).rank.incarnation != it->second.incarnation;
    } catch (const Error& error) {
      log_event(LogLevel::warn, "record.refused", {}, "{}", error.what());
      return false;
    }
  }
  bool has_peer(const std::string& key) const {
    const auto it = members_.find(key);
    return it != members_.end() && it->second.is_peer;
  }
  std::vector<std::string> keys() const {
    std::vector<std::string> keys;
    for (const auto& [key, member] : members_) keys.push_back(key);
    return keys;
  }

 private:
  struct Member {
    Incarnation incarnation;
    bool is_peer = false;
  };
  std::map<std::string, Member> members_;
};

}  // namespace

Rendezvous::Rendezvous(Store& store, Identity identity, RankRecord own, WaitList& waits, EventLoop& loop)
    : store_(store), waits_(waits), loop_(loop), identity_(std::move(identity)), own_(std::move(own)) {}

Rendezvous::~Rendezvous() {
  if (lease_ == kNoLease) return;
  try {
    store_.revoke_lease(lease_, seconds(1));
  } catch (const Error& error) {
    log_event(LogLevel::info, "rank.keys_left", {{"job", identity_.job}, {"rank", identity_.rank}},
              "{}: the store keeps this rank's keys until their lease ends: {}", identity_.name(), error.what());
  }
}

StoreView Rendezvous::wait(const std::string& prefix, const Store::Predicate& complete, const Waited& waited,
                           const CallLimits& limits) {
  const auto& [deadline, stop, background, parts] = limits;
  std::string last_hint;
  const auto hint = [&](const StoreView& view) {
    if (!waited.awaited) return std::string();
    std::string text = wait_hint(store_, identity_, waited.awaited(view), kHintTimeout);
    if (!text.empty()) return "; " + (last_hint = std::move(text));
    if (!last_hint.empty()) return fmt::format("; seen earlier: {}", last_hint);
    return waited.place.empty() ? std::string() : "; " + waited.place;
  };
  const TimePoint start = Clock::steady().now();
  Deadline reminder = Deadline::after(kReminder);
  // Jobs that miss each other were often started together: by this rank's deadline they may have left.
  Deadline early = background ? Deadline::at(TimePoint::max()) : Deadline::after(deadline.left() / 4 * 3);
  Deadline look = waited.look && !background ? Deadline::after(kSilence) : Deadline::at(TimePoint::max());
  Alarm own_alarm;
  Alarm& alarm = waited.alarm != nullptr ? *waited.alarm : own_alarm;
  const std::stop_callback on_stop(stop, [&alarm] { alarm.ring(); });
  store::PrefixFollower follower(store_, prefix);
  std::exception_ptr judged;  // what `complete` threw, whatever its code: kept apart from the store's errors
  WaitText text_of_wait(
      waits_, [&] { return fmt::format("{}{} ({})", waited.missing(follower.view()), waited.until, waited.what); });
  bool ended_by_text = false;  // it is to wait again, no longer than until the text is due
  const auto judge = [&](const StoreView& view) {
    try {
      if (complete(view)) return true;
      return ended_by_text = !background && text_of_wait.changed();
    } catch (...) {
      judged = std::current_exception();
      return true;
    }
  };
  std::stop_token rung = alarm.arm();
  while (true) {
    std::string outage;
    const Duration due =
        std::min({deadline.left(), early.left(), look.left(), background ? kLookPeriod : reminder.left()});
    try {
      follower.wait(judge, std::min(due, text_of_wait.due()), stop.stop_requested() ? stop : rung);
      if (judged) std::rethrow_exception(judged);
      if (std::exchange(ended_by_text, false)) continue;
      return follower.take();
    } catch (const Error& error) {
      if (judged) throw;
      const bool woken = error.code() == ErrorCode::kCancelled && (stop.stop_requested() || rung.stop_requested());
      const bool away = error.code() == ErrorCode::kUnavailable;  // a store may come back
      const bool late = error.code() == ErrorCode::kDeadlineExceeded;
      if (!late && !woken && !away) throw;
      if (away) outage = fmt::format(" ({})", error.what());
      if (away || (late && !text_of_wait.outdated())) follower.list_again();  // to notice that a store has gone
    }
    const bool rang = rung.stop_requested();
    rung = alarm.arm();  // events from now on are handled in the next round
    text_of_wait.tell();
    const TimePoint now = Clock::steady().now();
    const std::string text =
        fmt::format("{}: {} has waited {:.0f} s, missing: {}{}"_message, waited.what, identity_.name(),
                    to_seconds(now - start), waited.missing(follower.view()), outage);
    if (stop.stop_requested()) throw Error(ErrorCode::kCancelled, fmt::format("{}: interrupted"_message, text));
    if (deadline.passed())
      throw Error(ErrorCode::kDeadlineExceeded, outage.empty() ? text + hint(follower.view()) : text);
    if (waited.look && !background && (rang || look.passed()))
      look = outage.empty() && waited.look(follower.view()) ? Deadline::at(TimePoint::max())
                                                            : Deadline::after(kStorePiece);
    if (early.passed()) {
      early = Deadline::at(TimePoint::max());
      if (outage.empty()) hint(follower.view());
    }
    if (!reminder.passed()) continue;
    reminder = background ? Deadline::at(TimePoint::max()) : Deadline::after(kReminder);
    const bool asks = identity_.rank == 0 && outage.empty();  // the store is spared the same question of each rank
    log_event(LogLevel::warn, "ranks.awaited",
              {{"job", identity_.job}, {"rank", identity_.rank}, {"seconds", to_seconds(now - start)}}, "{}{}", text,
              asks ? hint(follower.view()) : "");
  }
}

void Rendezvous::claim(const CallLimits& limits) {
  lease_ = ask(limits, [&](Duration timeout) { return store_.grant_lease(kLeaseTtl, timeout); });
  const std::string key = rank_key(identity_.name_space, identity_.job, identity_.rank);
  const std::string value = write_record(own_);
  SwapResult swap =
      ask(limits, [&](Duration timeout) { return store_.put_if_absent(key, value, {.lease = lease_}, timeout); });
  while (!swap.stored) {
    const RankRecord holder = read_record<RankRecord>(key, swap.current.value);
    if (holder.incarnation == own_.incarnation && holder.address == own_.address) return;  // our own, sent twice
    const Liveness liveness = liveness_of(holder.incarnation);
    if (liveness == Liveness::kAlive)
      fail(ErrorCode::kAlreadyExists,
           "duplicate rank: {} is {} already, and this is {}: give each process its own rank"_message, identity_.name(),
           holder.incarnation.to_string(), own_.incarnation.to_string());
    if (liveness == Liveness::kUnknowable && !holder.incarnation.is_superseded_by(own_.incarnation)) {
      log_event(LogLevel::warn, "rank.held", {{"job", identity_.job}, {"rank", identity_.rank}},
                "{} is held by a process that cannot be seen from here ({}): waiting for its lease to end"_message,
                identity_.name(), holder.incarnation.to_string());
      wait(
          key, [&](const StoreView& view) { return !view.contains(key); },
          {.what = "claiming the rank",
           .until = "",
           .missing = [&](const StoreView&) { return fmt::format("the end of the lease of {}", identity_.name()); },
           .awaited = nullptr,
           .look = nullptr},
          limits);
      swap.current.mod_revision = 0;
    }
    swap = ask(limits, [&](Duration timeout) {
      return store_.compare_and_set(key, swap.current.mod_revision, value, {.lease = lease_}, timeout);
    });
  }
}

int64_t Rendezvous::publish_pair(const std::string& pair, const std::vector<std::string>& jobs,
                                 const CallLimits& limits) {
  ask(limits, [&](Duration timeout) {
    return store_.erase(pair_failure_prefix(identity_.name_space, pair) + rank_name(identity_.job, identity_.rank),
                        timeout);
  });
  const auto all_jobs = [&](std::span<const std::string> more) {
    std::vector<std::string> all;
    const MutexLock lock(mutex_);
    for (const std::string& job : more) joined_[pair].try_emplace(job);
    for (const auto& [job, joined] : joined_[pair]) all.push_back(job);
    return all;
  };
  int64_t revision = 0;
  std::vector<std::string> told;
  // Another thread may have joined it with other jobs in the meantime.
  for (std::vector<std::string> all = all_jobs(jobs); told != all; all = all_jobs({})) {
    revision = ask(limits, [&](Duration timeout) {
      return store_.put(pair_key(identity_.name_space, pair, identity_.job, identity_.rank),
                        write_record(PairRecord{.rank = own_, .peers = all}), {.lease = lease_}, timeout);
    });
    told = std::move(all);
  }
  const MutexLock lock(mutex_);
  for (const std::string& job : jobs) joined_[pair][job].revision = revision;
  return revision;
}

// Two users, or two values of TESSERA_RUNTIME_DIR, have two stores "auto".
std::string Rendezvous::place() const {
  return fmt::format("looked in namespace {} of store {}{}", identity_.name_space, store_.url(),
                     store_.url() == "auto" ? fmt::format(", folder {}", RuntimeDir::default_root()) : "");
}

PairView Rendezvous::join(const std::string& pair, const std::string& peer_job, const CallLimits& limits) {
  const int64_t revision = publish_pair(pair, {peer_job}, limits);
  return await_pair(pair, peer_job, revision, revision, limits);
}

PairView Rendezvous::join(const std::string& pair, const std::vector<std::string>& jobs, const CallLimits& limits) {
  const int64_t revision = publish_pair(pair, jobs, limits);
  PairView view = await_pair(pair, {}, revision, revision, limits);
  view.peer_job = jobs.front();
  view.jobs = jobs;
  return view;
}

PairView Rendezvous::rejoin(const PairView& view, const CallLimits& limits) {
  const StoreRange now = ask(limits, [&](Duration timeout) {
    return store_.range(pair_failure_prefix(identity_.name_space, view.name), timeout);
  });
  const std::string peer_job = view.jobs.empty() ? view.peer_job : std::string();
  PairView present = await_pair(view.name, peer_job, view.revision, now.revision, limits);
  present.peer_job = view.peer_job;
  present.jobs = view.jobs;
  return present;
}

bool Rendezvous::is_outdated(const PairView& view, const CallLimits& limits) {
  const std::string prefix = pair_prefix(identity_.name_space, view.name);
  const Members members(identity_, view);
  const StoreView now = ask(limits, [&](Duration timeout) { return store_.range(prefix, timeout); }).items;
  return std::ranges::any_of(now, [&](const auto& item) { return members.differ(item.first, item.second.value); });
}

// Without a peer job: waits only for this job's ranks. Failures up to revision `failures_from` belong to an earlier
// attempt.
PairView Rendezvous::await_pair(const std::string& pair, const std::string& peer_job, int64_t revision,
                                int64_t failures_from, const CallLimits& limits) {
  const std::string prefix = pair_prefix(identity_.name_space, pair);
  const std::string failures = pair_failure_prefix(identity_.name_space, pair);
  PairRecords records(prefix, failures, speaker_of(own_.incarnation, identity_.job, identity_.rank), failures_from);
  std::vector<std::string> jobs = {identity_.job};
  if (!peer_job.empty()) jobs.push_back(peer_job);
  const auto complete = [&](const StoreView& view) {
    try {
      records.read(view);
      for (const std::string& job : jobs) {
        records.throw_if_failed(job);
        records.throw_if_divided(job, kDividedFor);
      }
      if (limits.parts && records.gone(peer_job)) fail(ErrorCode::kNotFound, "job {} has left it"_message, peer_job);
      const auto all_in = [&] {
        // Checks every job: ranks that disagree are told even if others are missing.
        return std::ranges::count_if(jobs, [&](const auto& job) { return records.complete(job); }) == std::ssize(jobs);
      };
      if (!all_in()) return false;
      records.look_for_dead();
      return all_in();
    } catch (const Error& error) {
      // Ranks whose records were read may not have read this rank's record yet, and it will soon be gone.
      if (!limits.background) {
        const bool others = names_others(pair, peer_job);  // it continues with them
        const auto is_told = [&](const std::string& job) { return !others || std::ranges::count(jobs, job) != 0; };
        publish_failure(failures + rank_name(identity_.job, identity_.rank),
                        {.of = {own_.incarnation, 0},
                         .status = Status(error.code(), error.what()),
                         .seen = records.seen(is_told),
                         .only_seen = others},
                        true);
      }
      throw Error(error.code(), fmt::format("pair {}: {}", pair, error.what()));
    }
  };
  const auto missing = [&](const StoreView&) {
    records.look_for_dead();
    std::string text;
    for (const std::string& job : jobs) {
      const std::string ranks = records.missing(job);
      if (!ranks.empty()) text += (text.empty() ? "" : ", ") + ranks;
    }
    return text;
  };
  const auto awaited = [&](const StoreView&) {
    std::vector<AwaitedRanks> all;
    for (const std::string& job : jobs) all.push_back({.pair = pair, .job = job});
    return all;
  };
  wait(prefix, complete,
       {.what = fmt::format("pair {}", pair),
        .until = " to join",
        .missing = missing,
        .awaited = awaited,
        .place = place(),
        .look = nullptr},
       limits);
  return {.name = pair,
          .peer_job = peer_job,
          .own = records.take(identity_.job),
          .peer = peer_job.empty() ? std::vector<RankRecord>() : records.take(peer_job),
          .revision = revision};
}

std::unique_ptr<Watch> Rendezvous::watch_pair(const PairView& view, bool parts, std::function<void()> changed) {
  const std::string prefix = pair_prefix(identity_.name_space, view.name);
  const Members members(identity_, view);
  const auto left = [members, parts](const std::string& key) { return parts && members.has_peer(key); };
  // No later event reports what has changed since the view was taken.
  const StoreRange now = store_.range(prefix, kStoreTimeout);
  bool differ =
      std::ranges::any_of(now.items, [&](const auto& item) { return members.differ(item.first, item.second.value); });
  for (const std::string& key : members.keys()) differ = differ || (!now.items.contains(key) && left(key));
  if (differ) changed();
  return store_.watch(
      prefix, now.revision + 1, [members, left, changed = std::move(changed)](const WatchUpdate& update) {
        if (update.type == WatchUpdate::Type::kCompacted) return changed();
        for (const StoreEvent& event : update.events)
          if (event.type == StoreEvent::Type::kPut ? members.differ(event.kv.key, event.kv.value) : left(event.kv.key))
            changed();
      });
}

std::unique_ptr<Watch> Rendezvous::watch_jobs(const std::string& pair, const std::string& batch,
                                              const std::function<void(const std::string& job)>& met) {
  const std::string prefix = batch_prefix(identity_.name_space, pair, batch);
  const auto look = [prefix, job = identity_.job, met](const std::string& key) {
    const std::string other = met_job(prefix, key, job);
    if (!other.empty() && key.find(fmt::format("/{}/rank/", other), prefix.size()) != std::string::npos) met(other);
  };
  const StoreRange now = store_.range(prefix, kStoreTimeout);
  for (const auto& [key, item] : now.items) look(key);
  return store_.watch(prefix, now.revision + 1, [look, met](const WatchUpdate& update) {
    if (update.type == WatchUpdate::Type::kCompacted) met({});
    for (const StoreEvent& event : update.events)
      if (event.type == StoreEvent::Type::kPut) look(event.kv.key);
  });
}

int64_t Rendezvous::publish_failure(const std::string& key, const FailureRecord& record, bool lasting) {
  return store_.put(key, write_record(record), {.lease = lasting ? kNoLease : lease_, .decision = lasting}, seconds(1));
}

void Rendezvous::keep(const PairView& view) {
  const MutexLock lock(mutex_);
  for (const std::string& job : view.named()) ++joined_[view.name][job].pairs;
}

void Rendezvous::drop(const PairView& view) {
  const MutexLock lock(mutex_);
  std::map<std::string, Joined>& jobs = joined_[view.name];
  for (const std::string& job : view.named())
    if (--jobs[job].pairs == 0) jobs.erase(job);
}

bool Rendezvous::names_others(const std::string& pair, const std::string& job) const {
  const MutexLock lock(mutex_);
  const auto jobs = joined_.find(pair);
  if (jobs == joined_.end()) return false;
  return std::ranges::any_of(jobs->second, [&](const auto& of) { return of.first != job && of.second.pairs > 0; });
}

bool Rendezvous::is_named(const std::string& pair, const std::string& job) const {
  const MutexLock lock(mutex_);
  const auto jobs = joined_.find(pair);
  if (jobs == joined_.end()) return false;
  const auto it = jobs->second.find(job);
  return it != jobs->second.end() && it->second.pairs > 0;
}

void Rendezvous::leave(const PairView& view, const Status& reason, bool lasting) {
  const std::string failures = pair_failure_prefix(identity_.name_space, view.name);
  const std::string own = pair_key(identity_.name_space, view.name, identity_.job, identity_.rank);
  const StoreView records = store_.range(pair_prefix(identity_.name_space, view.name), seconds(1)).items;
  std::set<std::string> left;  // the jobs that no other pair of this process names
  bool last = true;            // it has no other pair of this name
  {
    const MutexLock lock(mutex_);
    std::map<std::string, Joined>& joined = joined_[view.name];
    if (joined[view.peer_job].revision != view.revision) return;  // it has joined again since
    const std::vector<std::string> named = view.named();
    for (const auto& [job, of] : joined) {
      const int others = of.pairs - (std::ranges::find(named, job) != named.end() ? 1 : 0);
      if (others > 0)
        last = false;
      else
        left.insert(job);
    }
  }
  if (!records.contains(own)) return;
  const bool heard = std::ranges::any_of(
      records, [&](const auto& item) { return item.first != own && !item.first.starts_with(failures); });
  if (!heard) return;
  std::vector<Seen> seen;
  const auto is_told = [&](const std::string& job) { return last || left.contains(job); };
  const auto speak_to = [&](const std::string& job, const std::vector<RankRecord>& ranks) {
    for (size_t rank = 0; is_told(job) && rank < ranks.size(); ++rank)
      seen.push_back({.speaker = speaker_of(ranks[rank].incarnation, job, static_cast<Rank>(rank))});
  };
  speak_to(identity_.job, view.own);
  speak_to(view.peer_job, view.peer);
  if (!view.jobs.empty()) {  // those that have joined by now
    PairRecords come(pair_prefix(identity_.name_space, view.name), failures, 0, view.revision);
    come.read(records);
    const std::vector<Seen> there = come.seen(is_told);
    seen.insert(seen.end(), there.begin(), there.end());
  }
  if (seen.empty()) return;
  publish_failure(failures + rank_name(identity_.job, identity_.rank),
                  {.of = {own_.incarnation, 0}, .status = reason, .seen = std::move(seen), .only_seen = !last},
                  lasting);
}

std::string Rendezvous::decision_key(const PairView& view, const std::string& batch, const std::string& session,
                                     uint32_t epoch) const {
  return bus::decision_key(meeting_prefix(identity_.name_space, view.name, batch, identity_.job, view.peer_job),
                           identity_.job, session, epoch);
}

bool Rendezvous::decide(const std::string& key, bool commit, const std::string& before, Duration timeout) {
  const std::string verdict = commit ? "commit" : "abort";
  StoreTransaction transaction{.compares = {{.key = key, .mod_revision = 0}},
                               .operations = {{.type = StoreOperation::Type::kPut,
                                               .key = key,
                                               .value = verdict,
                                               .options = {.lease = kNoLease, .decision = true}}}};
  if (!before.empty()) transaction.operations.push_back({.type = StoreOperation::Type::kDelete, .key = before});
  try {
    const TransactionResult result = store_.transact(transaction, timeout);
    const auto it = result.current.find(key);
    if (it == result.current.end()) fail(ErrorCode::kUnavailable, "the store has no {}"_message, key);
    return it->second.value == "commit";
  } catch (const Error& error) {
    throw Error(ErrorCode::kUnavailable, error.what());
  }
}

void Rendezvous::forget_decision(const std::string& key) {
  store_.erase(key, seconds(1));
}

}  // namespace tessera::bus
