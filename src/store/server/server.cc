#include "store/server/server.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "base/metrics.h"
#include "base/socket.h"
#include "store/limits.h"
#include "store/token_source.h"

namespace tessera::store {
namespace {

// A client with more unread answers than this is not served until it has read them.
constexpr size_t kMaxQueuedAnswers = size_t{1} << 20;
// (ServerOptions limits the events.)

}  // namespace

Server::Session::Session(uint64_t number, UniqueFd connection)
    : id(number),
      fd(std::move(connection)),
      reader(kMagic, {.payload_bytes = kMaxHelloBytes}),
      writer(kMagic, kHelloVersion, kNoQueueLimit) {}

bool Server::Session::takes_requests() const {
  return !held && !ended && queued_answers() <= kMaxQueuedAnswers;
}

std::string Server::Session::name() const {
  return hello ? fmt::format("{} of release {}", hello->incarnation.to_string(), hello->release)
               : std::string("a client that has not said who it is");
}

Server::Server(UniqueFd listener, std::string address, ServerOptions options)
    : address_(std::move(address)),
      options_(std::move(options)),
      listener_(loop_, std::move(listener)),
      state_(options_.limits, [this](std::span<const Event> events) { publish(events); }),
      service_(state_, *options_.clock),
      loop_("tessera-store", *options_.clock) {
  if (!options_.data_dir.empty()) {
    file_.emplace(options_.data_dir);
    file_->load(state_, options_.clock->now());
    state_.set_keeper([this](const Change& change) { file_->keep(change); });
    arm_expiry();
  }
  if (options_.revision_floor > 0) state_.raise_revision(options_.revision_floor);
  await(options_.awaited);
  listener_.start(
      [this](UniqueFd fd) {
        if (options_.same_user_only) require_same_user(fd.get());
        add_session(std::move(fd));
      },
      [this](const Error& why) { refuse(why); });
  loop_.start();
}

Server::~Server() {
  stop();
}

void Server::refuse(const Error& why) {
  if (why.code() == ErrorCode::kResourceExhausted && !greeting_.empty()) {
    drop_greeting(why.what());
    return listener_.resume();
  }
  Metrics::process().connections_refused.add();
  log_limited_event(LogLevel::warn, "connection.refused", {{"store", address_}},
                    "{}: a connection is refused: {}"_message, address_, why.what());
}

void Server::add_session(UniqueFd fd) {
  const uint64_t id = next_session_++;
  const int raw_fd = fd.get();
  Session& session = *(sessions_[id] = std::make_unique<Session>(id, std::move(fd)));
  loop_.add_fd(raw_fd, EPOLLIN, [this, id](uint32_t events) { on_ready(id, events); });
  session.greeting_timer = loop_.add_timer_after(options_.greeting, [this, id] {
    drop(id, failed(ErrorCode::kDeadlineExceeded, "no hello and no proof came within {:.3g} s"_message,
                    to_seconds(options_.greeting)));
  });
  greeting_.insert(id);
  if (greeting_.size() > options_.max_greeting) drop_greeting("too many others have not said hello either");
}

void Server::drop_greeting(std::string_view why) {
  drop(*greeting_.begin(), Status(ErrorCode::kResourceExhausted, std::string(why)));
}

void Server::on_ready(uint64_t id, uint32_t events) {
  Session& session = *sessions_.at(id);
  try {
    if ((events & EPOLLOUT) != 0) advance(session);
    if (!sessions_.contains(id)) return;
    const bool hung_up = (events & (EPOLLHUP | EPOLLERR)) != 0;
    if (!session.takes_requests()) {
      if (hung_up) drop(id, {});
      return;
    }
    if ((events & EPOLLIN) == 0 && !hung_up) return;
    const bool open = session.reader.fill(session.fd.get());
    pump(session);
    if (!open) drop(id, {});
  } catch (...) {
    drop(id, status_of_current_exception());
  }
}

// Sends as much as the socket takes, and serves requests that waited for that. The session may be gone afterwards.
void Server::advance(Session& session) {
  if (session.writer.flush(session.fd.get()) && session.ended) return drop(session.id, {});
  pump(session);
  update_events(session);
}

void Server::pump(Session& session) {
  while (session.takes_requests()) {
    std::optional<Frame> frame = session.reader.next();
    if (!frame) return;
    const bool asks = frame->type == raw(StoreMessage::kRequest) || frame->type == raw(StoreMessage::kWatch);
    if (gathering_ && asks && session.hello) {
      session.held = std::move(*frame);
      update_events(session);
      return;
    }
    take(session, *frame);
  }
}

void Server::take(Session& session, const Frame& frame) {
  const size_t events = session.queued_events();
  handle(session, frame);
  session.answer_bytes = session.writer.queued_bytes() - events;
}

void Server::handle(Session& session, const Frame& frame) {
  const auto type = static_cast<StoreMessage>(frame.type);
  if (!session.hello) {
    if (type == StoreMessage::kHello && !session.greeting) return on_hello(session, frame);
    if (type == StoreMessage::kProof && session.greeting) return on_proof(session, frame);
    fail(ErrorCode::kInvalidArgument, "a message of type {} came before the hello"_message, frame.type);
  }
  if (frame.version < kMinVersion || frame.version > kMaxVersion)
    fail(ErrorCode::kInvalidArgument, "a message of protocol {} after {} was agreed on"_message, frame.version,
         kMaxVersion);
  switch (type) {
    case StoreMessage::kRequest:
      send(session.id, StoreMessage::kReply, service_.answer(decode<Request>(frame.payload)));
      return arm_expiry();
    case StoreMessage::kWatch:
      return on_watch(session, frame);
    case StoreMessage::kUnwatch:
      session.watches.erase(decode<WatchEnd>(frame.payload).watch);
      return;
    case StoreMessage::kKeepAlive:
      return on_keep_alive(session, frame);
    case StoreMessage::kRepublishLeases:
    case StoreMessage::kRepublishKeys:
      return restore(frame);
    case StoreMessage::kRepublishDone:
      return stop_awaiting(session.hello->client);
    default:
      fail(ErrorCode::kInvalidArgument, "a message of unknown type {}"_message, frame.type);
  }
}

void Server::on_hello(Session& session, const Frame& frame) {
  const StoreHello hello = decode<StoreHello>(frame.payload);
  if (!hello.speaks_ours()) {
    const Status refusal =
        failed(ErrorCode::kMismatch,
               "the client (release {}) speaks store protocol {} to {}, the store (release {}) {} to "
               "{}: run releases that share one"_message,
               hello.release, hello.min_version, hello.max_version, release(), kMinVersion, kMaxVersion);
    return refuse(session, refusal);
  }
  const uint16_t version = std::min(hello.max_version, kMaxVersion);
  if (!options_.token) return welcome(session, hello, std::nullopt);
  const Handshake handshake{.version = version, .client = hello.nonce, .server = random_nonce()};
  session.greeting = {.hello = hello, .handshake = handshake};
  send(session.id, StoreMessage::kChallenge,
       message_bytes(Challenge{.version = version, .release = std::string(release()), .nonce = handshake.server}));
}

void Server::on_proof(Session& session, const Frame& frame) {
  const Greeting greeting = *session.greeting;
  if (!options_.token->proves(Side::kClient, greeting.handshake, decode<ProofAnswer>(frame.payload).proof))
    return refuse(session, failed(ErrorCode::kPermissionDenied, "a client at {} does not know the token"_message,
                                  peer_url(session.fd.get())));
  welcome(session, greeting.hello, options_.token->prove(Side::kServer, greeting.handshake));
}

void Server::refuse(Session& session, const Status& why) {
  Metrics::process().connections_refused.add();
  log_limited_event(LogLevel::warn, "connection.refused", {{"store", address_}, {"peer", session.name()}}, "{}: {}",
                    address_, why.message());
  send(session.id, StoreMessage::kRefused, message_bytes(ReplyHead{.status = why}));
  session.ended = true;
}

void Server::welcome(Session& session, const StoreHello& hello, std::optional<Proof> proof) {
  const bool returns = hello.last_instance != 0 && hello.last_instance != instance_;
  if (returns && !gathering_ && state_.revision() == 0) begin_gathering();  // after a restart: others will return
  continue_from(hello.last_revision);
  session.hello = hello;
  session.greeting.reset();
  greeting_.erase(session.id);
  loop_.cancel_timer(session.greeting_timer);
  session.reader.set_limits({.payload_bytes = kMaxRequestBytes});
  const uint16_t version = std::min(hello.max_version, kMaxVersion);
  send(session.id, StoreMessage::kWelcome,
       message_bytes(
           StoreWelcome{.version = version, .release = std::string(release()), .instance = instance_, .proof = proof}));
  session.writer.set_version(version);
  report_members();
}

void Server::on_watch(Session& session, const Frame& frame) {
  WatchStart start = decode<WatchStart>(frame.payload);
  if (start.from <= state_.compacted()) {
    const Compacted answer{.watch = start.watch, .revision = state_.compacted()};
    return send(session.id, StoreMessage::kCompacted, message_bytes(answer));
  }
  if (session.watches.size() >= kMaxKeys)
    fail(ErrorCode::kResourceExhausted, "{} watches on one connection"_message, session.watches.size());
  send_events(session.id, start.watch, state_.events_from(start.from, start.prefix));
  session.watches[start.watch] = std::move(start.prefix);
}

void Server::on_keep_alive(Session& session, const Frame& frame) {
  LeaseList lost;
  for (const LeaseId lease : decode<LeaseList>(frame.payload).leases)
    if (!state_.keep_alive(lease, loop_.clock().now())) lost.leases.push_back(lease);
  if (!lost.leases.empty()) send(session.id, StoreMessage::kLeasesLost, message_bytes(lost));
}

void Server::send(uint64_t id, StoreMessage type, std::span<const std::byte> payload) {
  Session& session = *sessions_.at(id);
  session.writer.push(raw(type), payload);
  if (!std::exchange(session.flush_due, true)) due_.push_back(id);
  if (!std::exchange(flush_posted_, true)) loop_.post([this] { flush_due(); });
}

void Server::flush_due() {
  flush_posted_ = false;
  for (const uint64_t id : std::exchange(due_, {})) {
    const auto found = sessions_.find(id);
    if (found == sessions_.end()) continue;
    Session& session = *found->second;
    session.flush_due = false;
    try {
      advance(session);
    } catch (...) {
      drop(id, status_of_current_exception());
    }
  }
}

void Server::publish(std::span<const Event> events) {
  for (auto& [id, session] : sessions_) {
    for (const auto& [watch, prefix] : session->watches) {
      std::vector<Event> seen;
      std::ranges::copy_if(events, std::back_inserter(seen),
                           [&](const Event& event) { return event.kv->key.starts_with(prefix); });
      if (session->queued_events() <= options_.max_queued_bytes) {
        send_events(id, watch, std::move(seen));
      } else {
        const Status why = failed(ErrorCode::kResourceExhausted,
                                  "{} bytes of events wait for a peer that does not read; at most {} may"_message,
                                  session->queued_events(), options_.max_queued_bytes);
        session->watches.clear();
        loop_.post([this, slow = id, why] { drop(slow, why); });  // not here: its own request may be in progress
        break;
      }
    }
  }
}

void Server::send_events(uint64_t session, uint64_t watch, std::vector<Event> events) {
  if (events.empty()) return;
  send(session, StoreMessage::kEvents, message_bytes(WatchEventsOf<Event>{watch, std::move(events)}));
}

void Server::drop(uint64_t id, const Status& why) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  const std::unique_ptr<Session> session = std::move(found->second);
  sessions_.erase(found);
  greeting_.erase(id);
  loop_.cancel_timer(session->greeting_timer);
  loop_.remove_fd(session->fd.get());
  if (!why.ok() && why.code() != ErrorCode::kPeerLost)
    log_limited_event(LogLevel::warn, "connection.closed", {{"store", address_}, {"peer", session->name()}},
                      "{}: closed the connection to {}: {}"_message, address_, session->name(), why.message());
  if (session->hello) report_members();
}

void Server::update_events(const Session& session) {
  const uint32_t in = session.takes_requests() ? uint32_t{EPOLLIN} : 0U;
  loop_.set_events(session.fd.get(), in | (session.writer.empty() ? 0U : uint32_t{EPOLLOUT}));
}

void Server::arm_expiry() {
  const auto due = state_.next_expiry();
  if (!due || (expiry_timer_ != 0 && expiry_due_ <= *due)) return;
  loop_.cancel_timer(expiry_timer_);
  expiry_due_ = *due;
  expiry_timer_ = loop_.add_timer(*due, [this] {
    expiry_timer_ = 0;
    state_.expire(loop_.clock().now());
    arm_expiry();
  });
}

}  // namespace tessera::store
