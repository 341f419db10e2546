#include "peer/session_table.h"

#include <utility>
#include <vector>

#include "base/fail.h"
#include "base/log.h"
#include "base/metrics.h"

namespace tessera {
namespace {

constexpr Duration kEarlyTimeout = seconds(300);  // the other side may still be registering

}  // namespace

void log_refusal(const std::string& caller, const Status& why) {
  log_limited_event(LogLevel::warn, "connection.refused", {{"peer", caller}}, "{}", why.message());
  Metrics::process().connections_refused.add();
}

void SessionTable::open(const std::string& session, Acceptor* acceptor) {
  TESSERA_CHECK(sessions_.emplace(session, acceptor).second);
  std::vector<uint64_t> early;
  for (const auto& [id, waiting] : waiting_)
    if (waiting.caller.attach.session == session) early.push_back(id);
  for (const uint64_t id : early) {
    const auto it = waiting_.find(id);
    if (it == waiting_.end()) continue;
    Caller caller = std::move(it->second.caller);
    drop(id);
    hand_over(std::move(caller), *acceptor);
  }
}

void SessionTable::close(const std::string& session, const Acceptor* acceptor) {
  const auto it = sessions_.find(session);
  if (it != sessions_.end() && it->second == acceptor) sessions_.erase(it);
}

void SessionTable::take(Caller caller) {
  const auto it = sessions_.find(caller.attach.session);
  if (it != sessions_.end()) return hand_over(std::move(caller), *it->second);
  if (waiting_.size() < kMaxWaiting) return keep(std::move(caller));
  const Status why = failed(ErrorCode::kResourceExhausted, "{} wait already"_message, waiting_.size());
  log_refusal(caller.link->name(), why);
  caller.link->reject(why);
}

void SessionTable::keep(Caller caller) {
  const uint64_t id = next_id_++;
  Link& link = *caller.link;
  link.set_handlers(
      [this, id](Frame& frame) {
        if (frame.type != kCode<Detach> && frame.type != kCode<Broken>)
          fail(ErrorCode::kMismatch, "unexpected message {}"_message, frame.type);
        drop(id);  // it gave up before this rank was ready
      },
      [this, id](const Status&) { drop(id); });
  Early& early = waiting_.emplace(id, Early{.caller = std::move(caller)}).first->second;
  early.timer = loop_.add_timer_after(kEarlyTimeout, [this, id] {
    const Caller late = std::move(waiting_.at(id).caller);
    drop(id);
    const Status why =
        failed(ErrorCode::kDeadlineExceeded, "{} has not read these registrations of batch {} of pair {}"_message,
               identity_.name(), late.attach.batch, late.attach.pair);
    log_refusal(late.link->name(), why);
    late.link->reject(why);
  });
}

void SessionTable::hand_over(Caller caller, Acceptor& acceptor) {
  const std::shared_ptr<Link> link = caller.link;
  try {
    link->set_limits({.payload_bytes = kMaxMessageBytes, .fds = 0});
    acceptor.accept(std::move(caller));
  } catch (const std::exception&) {
    const Status status = status_of_current_exception();
    log_refusal(link->name(), status);
    link->reject(status);
  }
}

void SessionTable::drop(uint64_t id) {
  const auto it = waiting_.find(id);
  if (it == waiting_.end()) return;
  loop_.cancel_timer(it->second.timer);
  const std::shared_ptr<Link> link = std::move(it->second.caller.link);  // closes, unless somebody has taken it
  waiting_.erase(it);
}

void SessionTable::clear() {
  while (!waiting_.empty()) drop(waiting_.begin()->first);
}

}  // namespace tessera
