// The part of Server that continues from a previous server: it waits for its clients and takes what they publish again.
#include <poll.h>

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "store/limits.h"
#include "store/server/server.h"

namespace tessera::store {

void Server::await(const std::vector<Member>& members) {
  for (const Member& member : members) {
    if (liveness_of(member.incarnation) == Liveness::kDead) continue;
    UniqueFd pidfd = open_pidfd(member.incarnation);
    if (pidfd) loop_.add_fd(pidfd.get(), EPOLLIN, [this, client = member.client](uint32_t) { stop_awaiting(client); });
    awaited_[member.client] = {.member = member, .pidfd = std::move(pidfd)};
  }
  if (!awaited_.empty()) begin_gathering();
}

void Server::stop_awaiting(uint64_t client) {
  const auto found = awaited_.find(client);
  if (found == awaited_.end()) return;
  if (found->second.pidfd) loop_.remove_fd(found->second.pidfd.get());
  awaited_.erase(found);
  if (awaited_.empty()) loop_.post([this] { end_gathering(); });  // not while a session's frames are handled
}

void Server::begin_gathering() {
  gathering_ = true;
  gather_timer_ = loop_.add_timer_after(options_.republication, [this] { end_gathering(); });
}

void Server::end_gathering() {
  if (!std::exchange(gathering_, false)) return;
  loop_.cancel_timer(gather_timer_);
  while (!awaited_.empty()) stop_awaiting(awaited_.begin()->first);
  log_event(LogLevel::info, "store.gathered", {{"store", address_}},
            "{}: answers from revision {} on, {} keys were published again", address_, state_.revision(),
            state_.find_prefix("").size());
  std::vector<uint64_t> holding;
  for (const auto& [id, session] : sessions_)
    if (session->held) holding.push_back(id);
  for (const uint64_t id : holding) {
    Session& session = *sessions_.at(id);
    try {
      const Frame frame = std::move(*session.held);
      session.held.reset();
      take(session, frame);
      pump(session);
      update_events(session);
    } catch (...) {
      drop(id, status_of_current_exception());
    }
  }
}

void Server::continue_from(int64_t revision) {
  revision = std::min(revision, kMaxContinued);
  if (revision > state_.revision()) state_.raise_revision(revision);
}

void Server::restore(const Frame& frame) {
  if (frame.type == raw(StoreMessage::kRepublishLeases)) {
    for (const LeaseTerm& term : decode<LeaseTermList>(frame.payload).terms)
      state_.grant(term.lease, term.ttl, loop_.clock().now());
    arm_expiry();
  } else {
    for (const KeyValue& kv : decode<KeyList>(frame.payload).keys) {
      continue_from(kv.mod_revision);
      try {
        state_.restore(kv, gathering_);
      } catch (const Error& error) {  // its lease has gone, or the store is full
        log_event(LogLevel::info, "store.key_refused", {{"store", address_}}, "{}: '{}' is not taken back: {}",
                  address_, kv.key, error.what());
      }
    }
  }
}

void Server::report_members() {
  if (options_.on_members) options_.on_members(members([](const Session&) { return true; }));
}

std::vector<Member> Server::connected_members() const {
  return members([](const Session& session) {
    pollfd poll_fd{.fd = session.fd.get(), .events = POLLRDHUP, .revents = 0};
    return ::poll(&poll_fd, 1, 0) == 0;
  });
}

std::vector<Member> Server::members(bool (*counts)(const Session&)) const {
  std::vector<Member> members;
  for (const auto& [id, session] : sessions_)
    if (session->hello && !awaited_.contains(session->hello->client) && counts(*session))
      members.push_back({.client = session->hello->client, .incarnation = session->hello->incarnation});
  for (const auto& [client, awaited] : awaited_) members.push_back(awaited.member);
  return members;
}

}  // namespace tessera::store
