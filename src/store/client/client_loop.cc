// The half of Client that runs on its own thread.
#include <algorithm>

#include "base/message.h"
#include "base/metrics.h"
#include "store/client/client_calls.h"
#include "store/limits.h"

namespace tessera::store {

StoreHello Client::hello() const {
  return {.release = std::string(release()),
          .client = id_,
          .last_instance = instance_,
          .last_revision = last_revision_,
          .incarnation = Incarnation::self()};
}

void Client::submit(const std::shared_ptr<Call>& call) {
  if (const Status status = hopeless(); !status.ok()) return call->end(status);
  calls_[call->id] = call;
  if (link_->ready()) link_->send(StoreMessage::kRequest, call->request);
}

void Client::on_ready(const StoreWelcome& welcome) {
  if (instance_ != 0) Metrics::process().store_reconnects.add();
  if (instance_ != welcome.instance) {
    republish(memory_.republication());
    instance_ = welcome.instance;
  } else {
    keep_alive(memory_.leases());  // also tells which have expired in the meantime
  }
  link_->send(StoreMessage::kRepublishDone, {});
  for (const auto& [id, call] : calls_) link_->send(StoreMessage::kRequest, call->request);
  for (const auto& [id, watching] : watches_) start_watch(watching);
  set_link_status({});
}

void Client::on_down(const Status& why) {
  if (link_status().ok())
    log_event(LogLevel::info, "store.lost", {{"store", url_}}, "store {}: connection lost: {}", url_, why.message());
  set_link_status(why);
  std::erase_if(calls_, [](const auto& entry) { return entry.second->abandoned; });
  fail_if_hopeless();
}

void Client::fail_if_hopeless() {
  const Status status = hopeless();
  if (status.ok()) return;
  for (const auto& [id, call] : std::exchange(calls_, {})) call->end(status);
}

void Client::on_frame(StoreMessage type, ByteReader& in) {
  switch (type) {
    case StoreMessage::kReply:
      return on_reply(in);
    case StoreMessage::kEvents:
      return on_events(in);
    case StoreMessage::kCompacted:
      return on_compacted(in);
    case StoreMessage::kLeasesLost:
      return on_leases_lost(in);
    default:
      fail(ErrorCode::kInvalidArgument, "it sent a message of unknown type {}"_message, static_cast<int>(type));
  }
}

void Client::on_reply(ByteReader& in) {
  const auto found = calls_.find(in.get<uint64_t>());
  if (found == calls_.end()) fail(ErrorCode::kInvalidArgument, "it answers a request that was not made"_message);
  const std::shared_ptr<Call> call = found->second;
  calls_.erase(found);
  try {
    Status status;
    FieldReader fields(in);
    reply_status_field(fields, status);
    if (status.ok() && !(call->abandoned && call->grants)) call->on_reply(in);
    call->end(status);
  } catch (...) {
    call->end(status_of_current_exception());
    throw;
  }
}

void Client::on_events(ByteReader& in) {
  WatchEvents message = decode<WatchEvents>(in.rest());
  WatchUpdate update;
  const auto found = watches_.find(message.watch);
  for (StoreEvent& event : message.events) {
    note_revision(event.kv.mod_revision);
    if (event.type == StoreEvent::Type::kPut) memory_.seen(event.kv);
    if (event.type == StoreEvent::Type::kDelete) memory_.deleted(event.kv.key);
    if (found != watches_.end() && event.kv.mod_revision >= found->second->next)
      update.events.push_back(std::move(event));
  }
  if (update.events.empty()) return;
  update.revision = update.events.back().kv.mod_revision;
  const std::shared_ptr<Watching> watching = found->second;  // the callback may end it
  watching->next = update.revision + 1;
  watching->deliver(update);
}

void Client::on_compacted(ByteReader& in) {
  const Compacted message = decode<Compacted>(in.rest());
  const auto found = watches_.find(message.watch);
  note_revision(message.revision);
  if (found == watches_.end()) return;
  const std::shared_ptr<Watching> watching = found->second;
  watches_.erase(found);
  watching->deliver({.type = WatchUpdate::Type::kCompacted, .events = {}, .revision = message.revision});
}

void Client::on_leases_lost(ByteReader& in) {
  std::vector<LeaseId> lost = decode<LeaseList>(in.rest()).leases;
  std::erase_if(lost, [this](LeaseId lease) { return !memory_.has(lease); });
  if (lost.empty()) return;
  log_event(LogLevel::warn, "store.leases_lost", {{"store", url_}, {"leases", lost.size()}},
            "store {}: {} of this process' leases had expired (was it stopped?); its keys are published again"_message,
            url_, lost.size());
  republish(memory_.republication(lost));
}

void Client::republish(const Memory::Republication& republication) {
  for (const auto& leases : republication.leases) link_->send(StoreMessage::kRepublishLeases, leases);
  for (const auto& keys : republication.keys) link_->send(StoreMessage::kRepublishKeys, keys);
}

void Client::start_watch(const std::shared_ptr<Watching>& watching) {
  const WatchStart start{.watch = watching->id, .prefix = watching->prefix, .from = watching->next};
  link_->send(StoreMessage::kWatch, message_bytes(start));
}

void Client::renew(LeaseId lease) {
  renewals_[lease] = loop_->add_timer_after(memory_.ttl(lease) / 3, [this, lease] {
    if (!memory_.has(lease)) return;  // the client is being closed
    if (link_->ready()) keep_alive({lease});
    renew(lease);
  });
}

void Client::keep_alive(const std::vector<LeaseId>& leases) {
  for (size_t begin = 0; begin < leases.size(); begin += kMaxListedLeases) {
    const auto some = std::span(leases).subspan(begin, std::min<size_t>(kMaxListedLeases, leases.size() - begin));
    link_->send(StoreMessage::kKeepAlive, message_bytes(LeaseList{{some.begin(), some.end()}}));
  }
}

void Client::shut_down() {
  link_.reset();
  for (const auto& [id, call] : std::exchange(calls_, {}))
    call->end(Status(ErrorCode::kCancelled, "the client was closed"_message));
  for (const auto& [id, watching] : std::exchange(watches_, {}))
    watching->deliver({.type = WatchUpdate::Type::kClosed, .events = {}, .revision = 0});
}

}  // namespace tessera::store
