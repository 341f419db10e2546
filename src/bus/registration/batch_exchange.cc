// The registration of a batch: what each rank offers, what all agree on, and what becomes of it.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <map>
#include <optional>

#include "base/fail.h"
#include "base/log.h"
#include "bus/registration/rendezvous.h"

namespace tessera::bus {
namespace {

// What was agreed on, by whom: sender's members first.
std::string session_of(const std::string& pair, const std::string& batch, const Manifest& sender,
                       const Manifest& receiver, std::span<const Registration> senders,
                       std::span<const Registration> receivers) {
  ByteWriter out;
  out.put_string(pair);
  out.put_string(batch);
  out.put_string(sender.hash());
  out.put_string(receiver.hash());
  for (const std::span<const Registration> side : {senders, receivers}) {
    out.put(static_cast<uint32_t>(side.size()));
    for (const Registration& of : side) of.write(out);
  }
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(out.view().data(), out.size()));
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
}

}  // namespace

Rendezvous::History Rendezvous::History::next() const {
  History next = *this;
  for (const auto& [speaker, registration] : read) next.past[speaker] = std::max(next.past[speaker], registration);
  next.read.clear();
  next.over = false;
  ++next.attempt;
  return next;
}

std::string Rendezvous::meeting(const PairView& view, const std::string& batch) const {
  return meeting_prefix(identity_.name_space, view.name, batch, identity_.job, view.peer_job);
}

Rendezvous::History& Rendezvous::history_of(const PairView& view, const std::string& batch) {
  return histories_[meeting(view, batch)];
}

void Rendezvous::begin(const PairView& view, const std::string& batch) {
  const std::lock_guard lock(mutex_);
  History& history = history_of(view, batch);
  if (history.over) history = history.next();
  history.heard = false;
}

Rendezvous::History Rendezvous::begun(const PairView& view, const std::string& batch) {
  begin(view, batch);
  const std::lock_guard lock(mutex_);
  return history_of(view, batch);
}

uint64_t Rendezvous::Awaited::speaker(size_t rank) const {
  return speaker_of(ranks[rank].incarnation, job, static_cast<Rank>(rank));
}

bool Rendezvous::Awaited::is_fresh(size_t rank, const std::string& key, const StoreView& items) const {
  const auto it = items.find(key);
  if (it == items.end()) return false;
  const Registration of = record_registration(key, it->second.value);
  if (of.incarnation != ranks[rank].incarnation) return false;  // an earlier process'
  const auto past = history.past.find(speaker(rank));
  return past == history.past.end() || of.attempt > past->second;
}

// The ranks of which there is no fresh record.
std::vector<Rank> Rendezvous::Awaited::missing(const std::function<std::string(Rank)>& key,
                                               const StoreView& items) const {
  std::vector<Rank> absent;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (!is_fresh(rank, key(static_cast<Rank>(rank)), items)) absent.push_back(static_cast<Rank>(rank));
  return absent;
}

StoreView Rendezvous::await_side(const Awaited& side, std::optional<Awaited> other, const CallLimits& limits) {
  const std::string records = meeting(side.view, side.batch);
  const std::string manifest = manifest_key(records, side.job);
  const auto missing_ranks = [&](const StoreView& items) {
    return side.missing([&](Rank rank) { return batch_key(records, side.job, rank); }, items);
  };
  const auto complete = [&](const StoreView& items) {
    throw_if_failed(side, items);
    if (other) throw_if_failed(*other, items);
    if (other && (is_asked_to_renew(side, items) || is_asked_to_renew(*other, items))) return true;
    return side.is_fresh(0, manifest, items) && missing_ranks(items).empty();
  };
  const auto missing = [&](const StoreView& items) {
    const std::vector<Rank> absent = missing_ranks(items);
    return absent.empty() ? fmt::format("the manifest of {}", rank_name(side.job, 0)) : rank_list(side.job, absent);
  };
  StopDetectors stop_detectors;
  const auto check = [&](const StoreView& items) {
    const std::vector<Rank> absent = missing_ranks(items);
    throw_if_gone(side, absent, limits.deadline);
    throw_if_stopped(side, absent, stop_detectors);
  };
  return wait(records, complete,
              {.what = fmt::format("pair {}, batch {}", side.view.name, side.batch),
               .until = " to register",
               .missing = missing,
               .check = check},
              limits);
}

void Rendezvous::remember(const Awaited& side, const StoreView& items) {
  const std::string records = meeting(side.view, side.batch);
  const std::lock_guard lock(mutex_);
  History& history = history_of(side.view, side.batch);
  for (size_t rank = 0; rank < side.ranks.size(); ++rank) {
    const std::string key = batch_key(records, side.job, static_cast<Rank>(rank));
    history.read[side.speaker(rank)] = record_registration(key, items.at(key).value).attempt;
  }
}

Rendezvous::Side Rendezvous::judge_side(const PairView& view, const std::string& batch, const std::string& job,
                                        size_t world, bool sends, const StoreView& items) const {
  const std::string records = meeting(view, batch);
  const std::string manifest = manifest_key(records, job);
  Side side;
  std::vector<ManifestDiff> diffs;
  for (size_t rank = 0; rank < world; ++rank) {
    const std::string key = batch_key(records, job, static_cast<Rank>(rank));
    BatchRecord record = BatchRecord::read(key, items.at(key).value);
    if (record.sends != sends)
      fail(ErrorCode::kMismatch, "pair {}, batch {}: {} {} it, which job {} does: one side offers, the other accepts",
           view.name, batch, rank_name(job, static_cast<Rank>(rank)), record.sends ? "offers" : "accepts",
           job == identity_.job ? view.peer_job : identity_.job);
    side.digest = side.digest && record.digest;
    side.delta = side.delta && record.delta;
    side.versions.push_back(record.version);
    side.newest = std::max(side.newest, record.newest);
    side.members.push_back(std::move(record.of));
    diffs.push_back(std::move(record.diff));
  }
  side.manifest = merge(job, ManifestRecord::read(manifest, items.at(manifest).value).manifest, diffs);
  return side;
}

void Rendezvous::ask_to_renew(const Awaited& own_side, const Awaited& peers, const CallLimits& limits) {
  if (own_side.history.past.empty()) return;
  const std::string records = meeting(own_side.view, own_side.batch);
  const StoreView items = ask(limits, [&](Duration timeout) { return store_.range(records, timeout); }).items;
  RenewalRecord record{.of = {own_.incarnation, own_side.history.attempt}, .stale = {}};
  for (const Awaited* side : {&own_side, &peers}) {
    for (size_t rank = 0; rank < side->ranks.size(); ++rank) {
      const std::string key = batch_key(records, side->job, static_cast<Rank>(rank));
      const auto it = items.find(key);
      if (it == items.end() || side->is_fresh(rank, key, items)) continue;
      const Registration of = record_registration(key, it->second.value);
      if (of.incarnation == side->ranks[rank].incarnation)
        record.stale.push_back({.speaker = side->speaker(rank), .attempt = of.attempt});
    }
  }
  if (record.stale.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    history_of(own_side.view, own_side.batch).asked = true;
  }
  ask(limits, [&](Duration timeout) {
    return store_.put(renewal_key(records, identity_.job, identity_.rank), record.write(), {.lease = lease_}, timeout);
  });
}

bool Rendezvous::is_asked_to_renew(const Awaited& by, const StoreView& items) const {
  const uint64_t self = speaker_of(own_.incarnation, identity_.job, identity_.rank);
  const std::string prefix = renewal_prefix(meeting(by.view, by.batch), by.job);
  for (auto it = items.lower_bound(prefix); it != items.end() && it->first.starts_with(prefix); ++it) {
    const RenewalRecord record = RenewalRecord::read(it->first, it->second.value);
    const auto asked = std::ranges::find(record.stale, self, &Seen::speaker);
    if (asked != record.stale.end() && asked->attempt == by.history.attempt) return true;
  }
  return false;
}

void Rendezvous::forget_asking(const PairView& view, const std::string& batch, Duration timeout) {
  {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(history_of(view, batch).asked, false)) return;
  }
  store_.erase(renewal_key(meeting(view, batch), identity_.job, identity_.rank), timeout);
}

Agreement Rendezvous::exchange(const PairView& view, const std::string& batch, const Offer& own,
                               const CallLimits& limits) {
  while (true) {
    if (std::optional<Agreement> agreement = try_exchange(view, batch, own, limits)) return *std::move(agreement);
    const std::lock_guard lock(mutex_);
    ++history_of(view, batch).attempt;  // what it has read stands
  }
}

std::optional<Agreement> Rendezvous::try_exchange(const PairView& view, const std::string& batch, const Offer& own,
                                                  const CallLimits& limits) {
  const std::string records = meeting(view, batch);
  const std::string manifest = manifest_key(records, identity_.job);
  const History history = begun(view, batch);
  const Registration of{own_.incarnation, history.attempt};
  const Awaited own_side{.view = view, .batch = batch, .job = identity_.job, .ranks = view.own, .history = history};
  const Awaited peers{.view = view, .batch = batch, .job = view.peer_job, .ranks = view.peer, .history = history};
  BatchRecord record{.of = of,
                     .sends = own.sends,
                     .digest = own.digest,
                     .delta = own.delta,
                     .version = own.version,
                     .newest = own.newest,
                     .hash = own.manifest->hash(),
                     .diff = {}};
  const auto outdated = [&](const StoreView& items) {
    return is_asked_to_renew(own_side, items) || is_asked_to_renew(peers, items);
  };
  ask_to_renew(own_side, peers, limits);
  if (identity_.rank == 0) {
    ask(limits, [&](Duration timeout) {
      return store_.put(manifest, ManifestRecord{.of = of, .manifest = *own.manifest}.write(), {.lease = lease_},
                        timeout);
    });
  } else {
    const auto published = [&](const StoreView& items) {
      throw_if_failed(own_side, items);
      return outdated(items) || own_side.is_fresh(0, manifest, items);
    };
    const auto missing = [&](const StoreView&) { return rank_name(identity_.job, 0); };
    StopDetectors stop_detectors;
    const auto check = [&](const StoreView&) {
      throw_if_gone(own_side, {0}, limits.deadline);
      throw_if_stopped(own_side, {0}, stop_detectors);
    };
    const StoreView items = wait(records, published,
                                 {.what = fmt::format("pair {}, batch {}", view.name, batch),
                                  .until = " to register",
                                  .missing = missing,
                                  .check = check},
                                 limits);
    if (outdated(items)) return std::nullopt;
    const Manifest rank0 = ManifestRecord::read(manifest, items.at(manifest).value).manifest;
    if (rank0.hash() != record.hash) record.diff = ManifestDiff::between(rank0, *own.manifest);
  }
  ask(limits, [&](Duration timeout) {
    return store_.put(batch_key(records, identity_.job, identity_.rank), record.write(), {.lease = lease_}, timeout);
  });

  // Own ranks that disagree need not wait for the other side to be told. It hears of it by the failure that they report
  // or, where it is still joining, leave for.
  const StoreView own_items = await_side(own_side, peers, limits);
  if (outdated(own_items)) return std::nullopt;
  remember(own_side, own_items);
  const Side mine = judge_side(view, batch, identity_.job, view.own.size(), own.sends, own_items);
  const StoreView peer_items = await_side(peers, own_side, limits);
  if (outdated(peer_items)) return std::nullopt;
  remember(peers, peer_items);
  const Side theirs = judge_side(view, batch, view.peer_job, view.peer.size(), !own.sends, peer_items);
  const Side& sender = own.sends ? mine : theirs;
  const Side& receiver = own.sends ? theirs : mine;
  Agreement agreement{
      .match = match(sender.manifest, own.sends ? identity_.job : view.peer_job, receiver.manifest,
                     own.sends ? view.peer_job : identity_.job),
      .session = session_of(view.name, batch, sender.manifest, receiver.manifest, sender.members, receiver.members),
      .digest = mine.digest && theirs.digest,
      .delta = mine.delta && theirs.delta,
      .sent_version = std::ranges::max(sender.versions),
      .newest_version = sender.newest,
      .floor = 0,
      .members = mine.members,
  };
  agreement.members.insert(agreement.members.end(), theirs.members.begin(), theirs.members.end());
  // Versions of senders that were all started anew are not to be compared with what is held from those before.
  if (agreement.sent_version > 0) agreement.floor = std::ranges::min(receiver.versions);
  // All of this side are here anew, and know what was decided on what they had staged before.
  if (!own.sends && identity_.rank == 0)
    ask(limits,
        [&](Duration timeout) { return store_.erase_prefix(decision_prefix(records, identity_.job), timeout); });
  // All others are here anew: whoever an earlier failure of this rank's spoke to has heard it.
  ask(limits,
      [&](Duration timeout) { return store_.erase(failure_key(records, identity_.job, identity_.rank), timeout); });
  ask(limits, [&](Duration timeout) { return forget_asking(view, batch, timeout); });
  return agreement;
}

std::unique_ptr<Watch> Rendezvous::watch(const PairView& view, const std::string& batch, const Agreement& agreement,
                                         const std::function<void(const std::string& rank)>& changed,
                                         const std::function<void(const Status& why)>& gave_up) {
  const std::string records = meeting(view, batch);
  const Registration& own = agreement.members[static_cast<size_t>(identity_.rank)];
  const Seen self{.speaker = speaker_of(own.incarnation, identity_.job, identity_.rank), .attempt = own.attempt};
  struct Member {
    std::string name;
    Registration of;
  };
  std::map<std::string, Member> members;   // by key
  std::map<std::string, Member> failures;  // that they may report; likewise
  std::map<std::string, Member> renewals;  // that they may ask for; likewise
  for (size_t i = 0; i < agreement.members.size(); ++i) {
    const bool is_own = i < view.own.size();
    const auto rank = static_cast<Rank>(is_own ? i : i - view.own.size());
    const std::string& job = is_own ? identity_.job : view.peer_job;
    const Member member{rank_name(job, rank), agreement.members[i]};
    members.emplace(batch_key(records, job, rank), member);
    if (member.of == own) continue;
    failures.emplace(failure_key(records, job, rank), member);
    renewals.emplace(renewal_key(records, job, rank), member);
  }
  const auto look = [=, this](const std::string& key, const KeyValue& item) {
    const auto it = members.find(key);
    const auto failure = failures.find(key);
    const auto renewal = renewals.find(key);
    try {
      if (renewal != renewals.end()) {
        const RenewalRecord record = RenewalRecord::read(key, item.value);
        if (std::ranges::count(record.stale, self) != 0) changed(renewal->second.name);
      }
      if (it != members.end() && record_registration(key, item.value) != it->second.of) changed(it->second.name);
      if (failure == failures.end()) return;
      const FailureRecord record = FailureRecord::read(key, item.value);
      if (record.of.incarnation != failure->second.of.incarnation || std::ranges::count(record.seen, self) == 0) return;
      gave_up(hear(view, batch, failure->second.name, record, item.mod_revision));
    } catch (const Error& error) {
      log_event(LogLevel::warn, "record.refused", {}, "{}", error.what());
    }
  };
  // The members' records were not all read at one time: what has changed since then is in no event to come.
  const StoreRange now = store_.range(records, kStoreTimeout);
  for (const auto& [key, item] : now.items) look(key, item);
  return store_.watch(records, now.revision + 1, [look, members, changed](const WatchUpdate& update) {
    if (update.type == WatchUpdate::Type::kCompacted)
      for (const auto& [key, member] : members) changed(member.name);
    for (const StoreEvent& event : update.events)
      if (event.type == StoreEvent::Type::kPut) look(event.kv.key, event.kv);
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

Manifest Rendezvous::peer_manifest(const PairView& view, const std::string& batch, const CallLimits& limits) {
  const History history = begun(view, batch);
  const StoreView items = await_side(
      {.view = view, .batch = batch, .job = view.peer_job, .ranks = view.peer, .history = history}, {}, limits);
  return judge_side(view, batch, view.peer_job, view.peer.size(), true, items).manifest;
}

std::vector<std::string> Rendezvous::all_gather(const PairView& view, const std::string& batch,
                                                const std::string& value, const CallLimits& limits) {
  const std::string records = meeting(view, batch);
  const History history = begun(view, batch);
  const Awaited own_side{.view = view, .batch = batch, .job = identity_.job, .ranks = view.own, .history = history};
  const auto key = [&](Rank rank) { return said_key(records, identity_.job, rank); };
  {
    const std::lock_guard lock(mutex_);
    history_of(view, batch).said = true;
  }
  const std::string record = SaidRecord{.of = {own_.incarnation, history.attempt}, .value = value}.write();
  ask(limits, [&](Duration timeout) { return store_.put(key(identity_.rank), record, {.lease = lease_}, timeout); });
  const auto complete = [&](const StoreView& items) {
    throw_if_failed(own_side, items);
    return own_side.missing(key, items).empty();
  };
  StopDetectors stop_detectors;
  const auto check = [&](const StoreView& items) {
    const std::vector<Rank> absent = own_side.missing(key, items);
    throw_if_gone(own_side, absent, limits.deadline);
    throw_if_stopped(own_side, absent, stop_detectors);
  };
  const StoreView items =
      wait(records, complete,
           {.what = fmt::format("pair {}, batch {}", view.name, batch),
            .until = " to register",
            .missing = [&](const StoreView& seen) { return rank_list(identity_.job, own_side.missing(key, seen)); },
            .check = check},
           limits);
  std::vector<std::string> values;
  const std::lock_guard lock(mutex_);
  History& read = history_of(view, batch);
  for (size_t rank = 0; rank < view.own.size(); ++rank) {
    const std::string from = key(static_cast<Rank>(rank));
    SaidRecord said = SaidRecord::read(from, items.at(from).value);
    read.read[own_side.speaker(rank)] = said.of.attempt;
    values.push_back(std::move(said.value));
  }
  return values;
}

void Rendezvous::unsay(const PairView& view, const std::string& batch) {
  {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(history_of(view, batch).said, false)) return;
  }
  store_.erase(said_key(meeting(view, batch), identity_.job, identity_.rank), seconds(1));
}

void Rendezvous::withdraw(const PairView& view, const std::string& batch) {
  {
    const std::lock_guard lock(mutex_);
    history_of(view, batch).over = true;
  }
  const std::string records = meeting(view, batch);
  forget_asking(view, batch, seconds(1));
  store_.erase(batch_key(records, identity_.job, identity_.rank), seconds(1));
  if (identity_.rank == 0) store_.erase(manifest_key(records, identity_.job), seconds(1));
}

}  // namespace tessera::bus
