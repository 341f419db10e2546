#define XXH_INLINE_ALL
#include "bus/registration/batch_exchange.h"

#include <xxhash.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/fail.h"
#include "base/log.h"
#include "bus/registration/digest_choice.h"

namespace tessera::bus {
namespace {

// Names what was agreed on, and by whom: the sender's members first.
std::string session_of(const std::string& pair, const std::string& batch, const std::string& sender_hash,
                       const std::string& receiver_hash, std::span<const Registration> senders,
                       std::span<const Registration> receivers) {
  ByteWriter out;
  out.put_string(pair);
  out.put_string(batch);
  out.put_string(sender_hash);
  out.put_string(receiver_hash);
  for (const std::span<const Registration> side : {senders, receivers}) {
    out.put(static_cast<uint32_t>(side.size()));
    for (const Registration& of : side) write_fields(of, out);
  }
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(out.view().data(), out.size()));
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
}

}  // namespace

BatchExchange::BatchExchange(Rendezvous& rendezvous, std::string pair, std::string peer_job, std::string batch)
    : rendezvous_(rendezvous),
      store_(rendezvous.store()),
      pair_(std::move(pair)),
      peer_job_(std::move(peer_job)),
      batch_(std::move(batch)),
      records_(meeting_prefix(identity().name_space, pair_, batch_, identity().job, peer_job_)) {}

BatchExchange& BatchExchanges::of(const PairView& view, const std::string& batch) {
  const Identity& self = rendezvous_.identity();
  const std::string meeting = meeting_prefix(self.name_space, view.name, batch, self.job, view.peer_job);
  const MutexLock lock(mutex_);
  return by_meeting_.try_emplace(meeting, rendezvous_, view.name, view.peer_job, batch).first->second;
}

uint64_t BatchExchange::speaker() const {
  return speaker_of(rendezvous_.own().incarnation, identity().job, identity().rank);
}

std::string BatchExchange::describe() const {
  return fmt::format("pair {}, batch {}", pair_, batch_);
}

// --- attempts ------------------------------------------------------------------------------------

BatchExchange::History BatchExchange::History::next() const {
  History next = *this;
  for (const auto& [speaker, registration] : read) next.past[speaker] = std::max(next.past[speaker], registration);
  next.read.clear();
  next.over = false;
  ++next.attempt;
  return next;
}

void BatchExchange::begin() {
  const MutexLock lock(mutex_);
  if (history_.over) {
    history_ = history_.next();
    began_ = Clock::steady().now();
  }
  history_.failed = false;
  history_.gone = false;
}

BatchExchange::History BatchExchange::begun() {
  begin();
  const MutexLock lock(mutex_);
  return history_;
}

BatchExchange::Attempt::Attempt(const BatchExchange& exchange, const PairView& view, History begun,
                                const CallLimits& call_limits)
    : history(std::move(begun)),
      of{exchange.rendezvous_.own().incarnation, history.attempt},
      own{.job = exchange.identity().job, .ranks = view.own, .history = history},
      peers{.job = exchange.peer_job_, .ranks = view.peer, .history = history},
      limits(call_limits) {}

uint64_t BatchExchange::Awaited::speaker(size_t rank) const {
  return speaker_of(ranks[rank].incarnation, job, static_cast<Rank>(rank));
}

bool BatchExchange::Awaited::is_fresh(size_t rank, const std::string& key, const StoreView& items) const {
  const auto it = items.find(key);
  if (it == items.end()) return false;
  const Registration of = record_registration(key, it->second.value);
  if (of.incarnation != ranks[rank].incarnation) return false;  // from an earlier process
  const auto past = history.past.find(speaker(rank));
  return past == history.past.end() || of.attempt > past->second;
}

// The ranks without a fresh record.
std::vector<Rank> BatchExchange::Awaited::missing(const std::function<std::string(Rank)>& key,
                                                  const StoreView& items) const {
  std::vector<Rank> absent;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (!is_fresh(rank, key(static_cast<Rank>(rank)), items)) absent.push_back(static_cast<Rank>(rank));
  return absent;
}

std::vector<Rank> BatchExchange::Awaited::unregistered(const std::string& records, const StoreView& items) const {
  return missing([&](Rank rank) { return batch_key(records, job, rank); }, items);
}

std::vector<Rank> BatchExchange::Awaited::late(std::vector<Rank> absent, const std::string& records,
                                               const StoreView& items) const {
  std::vector<Rank> silent;
  std::ranges::copy_if(absent, std::back_inserter(silent), [&](Rank rank) {
    return !is_fresh(static_cast<size_t>(rank), gathered_key(records, job, rank), items);
  });
  return silent.empty() ? absent : silent;
}

std::vector<PeerWatch::Peer> BatchExchange::Awaited::peers() const {
  std::vector<PeerWatch::Peer> peers;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    peers.push_back({.name = rank_name(job, static_cast<Rank>(rank)),
                     .process = ranks[rank].incarnation,
                     .worker = ranks[rank].worker});
  return peers;
}

// --- what a side registers -----------------------------------------------------------------------

StoreView BatchExchange::await_ranks(const Awaited& side, const Awaited* other, const Store::Predicate& complete,
                                     const std::function<std::vector<Rank>(const StoreView&)>& absent,
                                     const std::function<std::string(const StoreView&)>& missing,
                                     const CallLimits& limits) {
  Alarm alarm;
  std::optional<PeerWatch> processes, others;
  std::unique_ptr<Watch> failures;
  const auto ring = [&alarm] { alarm.ring(); };
  const auto look = [&](const StoreView& items) {
    if (!processes) processes.emplace(rendezvous_.loop(), side.peers(), ring);
    if (other && !others) others.emplace(rendezvous_.loop(), other->peers(), ring);
    std::vector<Missing> all{{side, absent(items)}};
    throw_if_stopped(*processes, all.front().ranks);
    if (other) all.push_back({*other, other->unregistered(records_, items)});
    return throw_if_gone(all, limits.deadline, failures, ring);
  };
  const auto awaited = [&](const StoreView& items) {
    return std::vector{AwaitedRanks{
        .pair = pair_, .batch = batch_, .job = side.job, .ranks = side.late(absent(items), records_, items)}};
  };
  return rendezvous_.wait(records_, complete,
                          {.what = describe(),
                           .until = " to register",
                           .missing = missing,
                           .awaited = awaited,
                           .look = look,
                           .alarm = &alarm},
                          limits);
}

StoreView BatchExchange::await_side(const Awaited& side, const Awaited* other, const CallLimits& limits) {
  const std::string manifest = manifest_key(records_, side.job);
  const auto absent = [&](const StoreView& items) { return side.unregistered(records_, items); };
  size_t first = 0;  // those before were fresh: so only a few are checked for each new record
  const auto complete = [&](const StoreView& items) {
    throw_if_failed(side, items);
    if (other) throw_if_failed(*other, items);
    if (other && (is_asked_to_renew(side, items) || is_asked_to_renew(*other, items))) return true;
    while (first < side.ranks.size() &&
           side.is_fresh(first, batch_key(records_, side.job, static_cast<Rank>(first)), items))
      ++first;
    return first == side.ranks.size() && side.is_fresh(0, manifest, items) && absent(items).empty();
  };
  const auto missing = [&](const StoreView& items) {
    const std::vector<Rank> ranks = side.late(absent(items), records_, items);
    return ranks.empty() ? fmt::format("the manifest of {}", rank_name(side.job, 0)) : rank_list(side.job, ranks);
  };
  return await_ranks(side, other, complete, absent, missing, limits);
}

void BatchExchange::remember(const Awaited& side, const StoreView& items) {
  const MutexLock lock(mutex_);
  for (size_t rank = 0; rank < side.ranks.size(); ++rank) {
    const std::string key = batch_key(records_, side.job, static_cast<Rank>(rank));
    history_.read[side.speaker(rank)] = record_registration(key, items.at(key).value).attempt;
  }
}

BatchExchange::Published BatchExchange::read_manifest(const std::string& key, const std::string& value,
                                                      const Published& known) {
  Published read{.hash = record_manifest_hash(key, value), .manifest = known.manifest};
  if (read.hash != known.hash)
    read.manifest = std::make_shared<const Manifest>(read_record<ManifestRecord>(key, value).manifest);
  return read;
}

void BatchExchange::fail_direction(const std::string& rank, bool is_own, bool sends) const {
  const std::string_view verb = sends ? "sends" : "receives";
  if (is_own)
    fail(ErrorCode::kMismatch,
         "pair {}, batch {}: {} {} it and {} does not: all ranks of a job send, or all receive"_message, pair_, batch_,
         rank, verb, rank_name(identity().job, identity().rank));
  fail(
      ErrorCode::kMismatch,
      "pair {}, batch {}: both jobs {} it, {} and {}: one job sends (send), the other receives (recv); for both ways use two batches"_message,
      pair_, batch_, sends ? "send" : "receive", rank_name(identity().job, identity().rank), rank);
}

BatchExchange::Side BatchExchange::judge_side(const Awaited& awaited, bool sends, const StoreView& items,
                                              const Published& known) const {
  const std::string& job = awaited.job;
  const std::string manifest = manifest_key(records_, job);
  Side side;
  std::vector<ManifestDiff> diffs;
  for (size_t rank = 0; rank < awaited.ranks.size(); ++rank) {
    const std::string key = batch_key(records_, job, static_cast<Rank>(rank));
    BatchRecord record = read_record<BatchRecord>(key, items.at(key).value);
    if (record.sends != sends)
      fail_direction(rank_name(job, static_cast<Rank>(rank)), job == identity().job, record.sends);
    side.digest = weaker(side.digest, record.digest);
    side.delta = side.delta && record.delta;
    side.versions.push_back(record.version);
    side.newest = std::max(side.newest, record.newest);
    side.members.push_back(std::move(record.of));
    diffs.push_back(std::move(record.diff));
  }
  const Published rank0 = read_manifest(manifest, items.at(manifest).value, known);
  side.manifest = merge(job, rank0.manifest, diffs);
  side.hash = side.manifest == rank0.manifest ? rank0.hash : side.manifest->hash();
  return side;
}

// --- renewals ------------------------------------------------------------------------------------

void BatchExchange::ask_to_renew(const Attempt& attempt) {
  if (attempt.history.past.empty()) return;
  const StoreView items = ask(attempt.limits, [&](Duration timeout) { return store_.range(records_, timeout); }).items;
  RenewalRecord record{.of = attempt.of, .stale = {}};
  for (const Awaited* side : {&attempt.own, &attempt.peers}) {
    for (size_t rank = 0; rank < side->ranks.size(); ++rank) {
      const std::string key = batch_key(records_, side->job, static_cast<Rank>(rank));
      const auto it = items.find(key);
      if (it == items.end() || side->is_fresh(rank, key, items)) continue;
      const Registration of = record_registration(key, it->second.value);
      if (of.incarnation == side->ranks[rank].incarnation)
        record.stale.push_back({.speaker = side->speaker(rank), .attempt = of.attempt});
    }
  }
  if (record.stale.empty()) return;
  {
    const MutexLock lock(mutex_);
    history_.asked = true;
  }
  ask(attempt.limits, [&](Duration timeout) {
    return store_.put(renewal_key(records_, identity().job, identity().rank), write_record(record),
                      {.lease = rendezvous_.lease()}, timeout);
  });
}

bool BatchExchange::is_asked_to_renew(const Awaited& by, const StoreView& items) const {
  const uint64_t self = speaker();
  const std::string prefix = renewal_prefix(records_, by.job);
  for (auto it = items.lower_bound(prefix); it != items.end() && it->first.starts_with(prefix); ++it) {
    const RenewalRecord record = read_record<RenewalRecord>(it->first, it->second.value);
    const auto asked = std::ranges::find(record.stale, self, &Seen::speaker);
    if (asked != record.stale.end() && asked->attempt == by.history.attempt) return true;
  }
  return false;
}

bool BatchExchange::is_outdated(const Attempt& attempt, const StoreView& items) const {
  return is_asked_to_renew(attempt.own, items) || is_asked_to_renew(attempt.peers, items);
}

void BatchExchange::forget_asking(Duration timeout) {
  {
    const MutexLock lock(mutex_);
    if (!std::exchange(history_.asked, false)) return;
  }
  store_.erase(renewal_key(records_, identity().job, identity().rank), timeout);
}

// --- the exchange --------------------------------------------------------------------------------

Agreement BatchExchange::exchange(const PairView& view, const BatchOffer& own, const CallLimits& limits) {
  while (true) {
    std::optional<Agreement> agreement = try_exchange(view, own, limits);
    const MutexLock lock(mutex_);
    if (agreement) {
      agreement->began = began_;
      return *std::move(agreement);
    }
    ++history_.attempt;  // records read so far stay valid
  }
}

std::optional<Agreement> BatchExchange::try_exchange(const PairView& view, const BatchOffer& own,
                                                     const CallLimits& limits) {
  const Attempt attempt(*this, view, begun(), limits);
  ask_to_renew(attempt);
  const std::optional<Published> rank0 = publish(attempt, own);
  if (!rank0) return std::nullopt;

  // Own ranks that disagree need not wait until the other side is told. It learns of it from the failure that they
  // report or, if it is still joining, leave in the store.
  const StoreView own_items = await_side(attempt.own, &attempt.peers, limits);
  if (is_outdated(attempt, own_items)) return std::nullopt;
  remember(attempt.own, own_items);
  const Side mine = judge_side(attempt.own, own.sends, own_items, *rank0);
  const StoreView peer_items = await_side(attempt.peers, &attempt.own, limits);
  if (is_outdated(attempt, peer_items)) return std::nullopt;
  remember(attempt.peers, peer_items);
  const Side theirs = judge_side(attempt.peers, !own.sends, peer_items);
  Agreement agreement = agree(own.sends, mine, theirs);
  forget_earlier(attempt, own.sends);
  return agreement;
}

std::optional<BatchExchange::Published> BatchExchange::publish(const Attempt& attempt, const BatchOffer& own) {
  BatchRecord record{.of = attempt.of,
                     .sends = own.sends,
                     .digest = own.digest,
                     .delta = own.delta,
                     .version = own.version,
                     .newest = own.newest,
                     .hash = {},
                     .diff = {}};
  const LeaseId lease = rendezvous_.lease();
  std::optional<Published> rank0;
  if (identity().rank == 0) {
    const std::string key = manifest_key(records_, identity().job);
    const std::string value = write_manifest(attempt.of, *own.manifest);
    record.hash = record_manifest_hash(key, value);
    rank0 = {.hash = record.hash, .manifest = own.manifest};
    ask(attempt.limits, [&](Duration timeout) { return store_.put(key, value, {.lease = lease}, timeout); });
  } else {
    record.hash = own.manifest->hash();
    rank0 = await_manifest(attempt, {.hash = record.hash, .manifest = own.manifest});
    if (!rank0) return std::nullopt;
    if (rank0->manifest != own.manifest) record.diff = ManifestDiff::between(*rank0->manifest, *own.manifest);
  }
  ask(attempt.limits, [&](Duration timeout) {
    return store_.put(batch_key(records_, identity().job, identity().rank), write_record(record), {.lease = lease},
                      timeout);
  });
  return rank0;
}

std::optional<BatchExchange::Published> BatchExchange::await_manifest(const Attempt& attempt, const Published& own) {
  const std::string key = manifest_key(records_, identity().job);
  const auto published = [&](const StoreView& items) {
    throw_if_failed(attempt, items);
    return is_outdated(attempt, items) || attempt.own.is_fresh(0, key, items);
  };
  const StoreView items = await_ranks(
      attempt.own, &attempt.peers, published,
      [&](const StoreView& seen) { return attempt.own.unregistered(records_, seen); },
      [this](const StoreView&) { return rank_name(identity().job, 0); }, attempt.limits);
  if (is_outdated(attempt, items)) return std::nullopt;
  return read_manifest(key, items.at(key).value, own);
}

Agreement BatchExchange::agree(bool sends, const Side& mine, const Side& theirs) const {
  const Side& sender = sends ? mine : theirs;
  const Side& receiver = sends ? theirs : mine;
  const std::string& own_job = identity().job;
  const DigestMode digest = weaker(mine.digest, theirs.digest);
  Agreement agreement{
      .match = match(*sender.manifest, sends ? own_job : peer_job_, *receiver.manifest, sends ? peer_job_ : own_job),
      .session = session_of(pair_, batch_, sender.hash, receiver.hash, sender.members, receiver.members),
      .digest = digest != DigestMode::kOff,
      .delta = mine.delta && theirs.delta,
      .sent_version = std::ranges::max(sender.versions),
      .newest_version = sender.newest,
      .members = mine.members,
  };
  agreement.sample = session_sample(digest, agreement.delta, agreement.session);
  agreement.members.insert(agreement.members.end(), theirs.members.begin(), theirs.members.end());
  // If all senders have started again, their versions are not compared with those from before.
  if (agreement.sent_version > 0) agreement.floor = std::ranges::min(receiver.versions);
  return agreement;
}

void BatchExchange::forget_earlier(const Attempt& attempt, bool sends) {
  // All of this side have registered again, and know the decision on what they had staged before.
  if (!sends && identity().rank == 0)
    ask(attempt.limits,
        [&](Duration timeout) { return store_.erase_prefix(decision_prefix(records_, identity().job), timeout); });
  // So have all others: every rank that an earlier failure of this rank was for has read it.
  ask(attempt.limits,
      [&](Duration timeout) { return store_.erase(failure_key(records_, identity().job, identity().rank), timeout); });
  ask(attempt.limits, [&](Duration timeout) { return forget_asking(timeout); });
}

BatchExchange::Members BatchExchange::members_of(const PairView& view, const Agreement& agreement) const {
  const Registration& own = agreement.members[static_cast<size_t>(identity().rank)];
  Members all{
      .self = {.speaker = speaker_of(own.incarnation, identity().job, identity().rank), .attempt = own.attempt}};
  for (size_t i = 0; i < agreement.members.size(); ++i) {
    const bool is_own = i < view.own.size();
    const auto rank = static_cast<Rank>(is_own ? i : i - view.own.size());
    const std::string& job = is_own ? identity().job : peer_job_;
    const Members::Member member{rank_name(job, rank), agreement.members[i]};
    all.records.emplace(batch_key(records_, job, rank), member);
    if (member.of == own) continue;
    all.failures.emplace(failure_key(records_, job, rank), member);
    all.renewals.emplace(renewal_key(records_, job, rank), member);
  }
  return all;
}

void BatchExchange::look(const Members& members, const std::string& key, const KeyValue& item, const OnChanged& changed,
                         const OnGivenUp& gave_up) {
  const auto it = members.records.find(key);
  const auto failure = members.failures.find(key);
  const auto renewal = members.renewals.find(key);
  try {
    if (renewal != members.renewals.end()) {
      const RenewalRecord record = read_record<RenewalRecord>(key, item.value);
      if (std::ranges::count(record.stale, members.self) != 0) changed(renewal->second.name);
    }
    if (it != members.records.end() && record_registration(key, item.value) != it->second.of) changed(it->second.name);
    if (failure == members.failures.end()) return;
    const FailureRecord record = read_record<FailureRecord>(key, item.value);
    if (record.of.incarnation != failure->second.of.incarnation || std::ranges::count(record.seen, members.self) == 0)
      return;
    if (is_others_deadline(parse_pair_key("", failure->second.name).job, record)) return;
    gave_up(fail_attempt(failure->second.name, record, item.mod_revision));
  } catch (const Error& error) {
    log_event(LogLevel::warn, "record.refused", {}, "{}", error.what());
  }
}

std::unique_ptr<Watch> BatchExchange::watch(const PairView& view, const Agreement& agreement, const OnChanged& changed,
                                            const OnGivenUp& gave_up) {
  const Members members = members_of(view, agreement);
  // The members' records were not all read at one time: no later event tells what has changed in between.
  const StoreRange now = store_.range(records_, kStoreTimeout);
  for (const auto& [key, item] : now.items) look(members, key, item, changed, gave_up);
  return store_.watch(records_, now.revision + 1, [=, this](const WatchUpdate& update) {
    if (update.type == WatchUpdate::Type::kCompacted)
      for (const auto& [key, member] : members.records) changed(member.name);
    for (const StoreEvent& event : update.events)
      if (event.type == StoreEvent::Type::kPut) look(members, event.kv.key, event.kv, changed, gave_up);
  });
}

Status BatchExchange::given_up(const PairView& view, const Agreement& agreement) {
  Status why;
  const Members members = members_of(view, agreement);
  const auto hear = [&](const Status& heard) {
    if (why.ok()) why = heard;
  };
  try {
    for (const auto& [key, item] : store_.range(records_, kStorePiece).items)
      look(members, key, item, [](const std::string&) {}, hear);
  } catch (const Error& error) {
    log_event(LogLevel::info, "rank.unexplained", {{"pair", pair_}, {"batch", batch_}},
              "{}: it is unknown why a rank has gone: {}", describe(), error.what());
  }
  return why;
}

Manifest BatchExchange::peer_manifest(const PairView& view, const CallLimits& limits) {
  const Attempt attempt(*this, view, begun(), limits);
  return *judge_side(attempt.peers, true, await_side(attempt.peers, nullptr, limits)).manifest;
}

std::vector<std::string> BatchExchange::all_gather(const PairView& view, const std::string& value,
                                                   const CallLimits& limits) {
  const Attempt attempt(*this, view, begun(), limits);
  const Awaited& own = attempt.own;
  const auto key = [&](Rank rank) { return gathered_key(records_, own.job, rank); };
  {
    const MutexLock lock(mutex_);
    history_.gathered = true;
  }
  const std::string record = write_record(GatheredRecord{.of = attempt.of, .value = value});
  ask(limits, [&](Duration timeout) {
    return store_.put(key(identity().rank), record, {.lease = rendezvous_.lease()}, timeout);
  });
  const auto absent = [&](const StoreView& items) { return own.missing(key, items); };
  const auto complete = [&](const StoreView& items) {
    throw_if_failed(attempt, items);
    return absent(items).empty();
  };
  const StoreView items = await_ranks(
      own, &attempt.peers, complete, absent, [&](const StoreView& seen) { return rank_list(own.job, absent(seen)); },
      limits);
  std::vector<std::string> values;
  const MutexLock lock(mutex_);
  for (size_t rank = 0; rank < own.ranks.size(); ++rank) {
    const std::string from = key(static_cast<Rank>(rank));
    GatheredRecord gathered = read_record<GatheredRecord>(from, items.at(from).value);
    history_.read[own.speaker(rank)] = gathered.of.attempt;
    values.push_back(std::move(gathered.value));
  }
  return values;
}

void BatchExchange::retract() {
  {
    const MutexLock lock(mutex_);
    if (!std::exchange(history_.gathered, false)) return;
  }
  store_.erase(gathered_key(records_, identity().job, identity().rank), seconds(1));
}

void BatchExchange::withdraw() {
  {
    const MutexLock lock(mutex_);
    history_.over = true;
  }
  forget_asking(seconds(1));
  store_.erase(batch_key(records_, identity().job, identity().rank), seconds(1));
  if (identity().rank == 0) store_.erase(manifest_key(records_, identity().job), seconds(1));
}

}  // namespace tessera::bus
