#include "peer/connection_pool.h"

#include <algorithm>

#include "base/fail.h"
#include "base/socket.h"
#include "tessera/version.h"

namespace tessera {
namespace {

constexpr Duration kHelloTimeout = seconds(3);     // from a caller's connection to its first link
constexpr Duration kWelcomeTimeout = seconds(10);  // for a dialed peer, which may be slow
constexpr size_t kMaxUnknown = 256;                // callers that have not sent Hello

FrameLimits limits_for(Attach::Purpose purpose) {
  const bool pulls = purpose == Attach::Purpose::kPull || purpose == Attach::Purpose::kReduce;
  return {.payload_bytes = kMaxMessageBytes, .fds = static_cast<uint16_t>(pulls ? kMaxFdsPerMessage : 0)};
}

}  // namespace

// --- turns ---------------------------------------------------------------------------------------

DialTurns::Turn::Turn(DialTurns& turns, const Callee& callee, Deadline deadline)
    : turns_(turns), key_(callee.address, callee.incarnation.nonce) {
  const MutexLock lock(turns_.mutex_);
  const auto free = [&]() REQUIRES(turns_.mutex_) { return !turns_.taken_.contains(key_); };
  if (!turns_.changed_.wait_until(turns_.mutex_, deadline, free))
    fail(ErrorCode::kDeadlineExceeded, "connect to {}: no answer before the deadline"_message, callee.address);
  turns_.taken_.insert(key_);
}

DialTurns::Turn::~Turn() {
  const MutexLock lock(turns_.mutex_);
  turns_.taken_.erase(key_);
  turns_.changed_.notify_all();
}

// --- connections ---------------------------------------------------------------------------------

ConnectionPool::ConnectionPool(EventLoop& loop, const Identity& identity, const Incarnation& incarnation, Events events)
    : loop_(loop), identity_(identity), incarnation_(incarnation), events_(std::move(events)) {}

void ConnectionPool::close() {
  for (const auto& [id, peer] : std::exchange(peers_, {})) {
    loop_.cancel_timer(peer.timer);
    peer.connection->close();
  }
}

Hello ConnectionPool::hello() const {
  return {.protocol_min = kProtocolMin,
          .protocol_max = kProtocolMax,
          .release = kVersion,
          .name_space = identity_.name_space,
          .job = identity_.job,
          .rank = identity_.rank,
          .incarnation = incarnation_};
}

uint64_t ConnectionPool::add(UniqueFd socket, PeerConnection::Side side, std::string name) {
  const uint64_t id = next_id_++;
  Peer& peer = peers_[id];
  peer.dialed = side == PeerConnection::Side::kDialed;
  peer.connection = PeerConnection::adopt(loop_, std::move(socket), side, std::move(name));
  peer.connection->set_events(
      {.on_frame = [this, id](Frame& frame) { handle_frame(id, frame); },
       .on_attach = [this, id](std::shared_ptr<Link> link,
                               Attach attach) { handle_attach(id, std::move(link), std::move(attach)); },
       .on_idle = [this, id] { handle_idle(id); },
       .on_end = [this, id] { drop(id); }});
  return id;
}

void ConnectionPool::accept(UniqueFd socket) {
  const pid_t pid = require_same_user(socket.get());
  make_room();
  const uint64_t id = add(std::move(socket), PeerConnection::Side::kAccepted, fmt::format("a caller (pid {})", pid));
  peers_.at(id).pid = pid;
  end_after(id, kHelloTimeout, "Hello");
}

// An honest caller sends Hello at once. If too many callers have not sent it, the oldest of them is refused.
void ConnectionPool::make_room() {
  const auto unfinished = [](const auto& entry) { return !entry.second.dialed && entry.second.timer != 0; };
  const auto unknown = [&](const auto& entry) { return unfinished(entry) && !entry.second.connection->agreed(); };
  if (std::ranges::count_if(peers_, unfinished) >= static_cast<std::ptrdiff_t>(kMaxWaiting))
    fail(ErrorCode::kResourceExhausted, "{} wait already"_message, kMaxWaiting);
  if (std::ranges::count_if(peers_, unknown) >= static_cast<std::ptrdiff_t>(kMaxUnknown))
    refuse(std::ranges::find_if(peers_, unknown)->second,
           failed(ErrorCode::kResourceExhausted, "{} others have not said Hello either"_message, kMaxUnknown));
}

// Unless the timer is cancelled before. A late message may have been lost: kUnavailable lets the peer try again.
void ConnectionPool::end_after(uint64_t id, Duration limit, const char* awaited) {
  peers_.at(id).timer = loop_.add_timer_after(limit, [this, id, limit, awaited] {
    Peer& late = peers_.at(id);
    late.timer = 0;
    refuse(late, failed(ErrorCode::kUnavailable, "{}: no {} within {} s"_message, identity_.name(), awaited,
                        to_seconds(limit)));
  });
}

// An accepted connection is usable only once the other side has attached a link, which shows that it has got the
// Welcome: until then it may close the socket.
bool ConnectionPool::usable(const Peer& peer, const Callee& callee) const {
  if (!peer.connection->may_attach() || peer.left || peer.hello.incarnation != callee.incarnation) return false;
  const bool named = peer.dialed && !peer.connection->agreed();
  if ((named ? peer.callee : rank_name(peer.hello.job, peer.hello.rank)) != callee.name) return false;
  return peer.dialed || (peer.proven && peer.connection->peer_has_attached());
}

bool ConnectionPool::attach(const Callee& callee, const Attach& attach, const OnLink& on_link) {
  const auto found = std::ranges::find_if(peers_, [&](const auto& entry) { return usable(entry.second, callee); });
  if (found == peers_.end()) return false;
  open_link(found->second, callee, attach, on_link);
  return true;
}

void ConnectionPool::dial(UniqueFd socket, const Callee& callee, const Attach& attach, const OnLink& on_link) {
  const uint64_t id = add(std::move(socket), PeerConnection::Side::kDialed, callee.name);
  Peer& peer = peers_.at(id);
  peer.callee = callee.name;
  peer.hello.incarnation = callee.incarnation;
  end_after(id, kWelcomeTimeout, "Welcome");
  peer.connection->send(hello());
  open_link(peer, callee, attach, on_link);
}

void ConnectionPool::open_link(Peer& peer, const Callee& callee, const Attach& attach, const OnLink& on_link) {
  on_link(peer.connection->attach(callee.name, attach, limits_for(attach.purpose)));
}

// --- frames --------------------------------------------------------------------------------------

void ConnectionPool::handle_frame(uint64_t id, Frame& frame) {
  Peer& peer = peers_.at(id);
  PeerConnection& connection = *peer.connection;
  if (peer.dialed && !connection.agreed()) return handle_welcome(peer, frame);
  const bool greets = !peer.dialed && !connection.agreed();
  if (greets && frame.type == kCode<Hello>) {
    require_unchanged_hello(frame.version, frame.payload);
    return handle_hello(peer, parse<Hello>(frame.payload));
  }
  if (greets && frame.type == kCode<Inspect>) {
    (void)parse<Inspect>(frame.payload);
    return connection.send(events_.report());  // the other side closes the connection
  }
  if (greets) fail(ErrorCode::kMismatch, "message {} where Hello and then Attach were due"_message, frame.type);
  if (peer.dialed || frame.type != kCode<Goodbye>)
    fail(ErrorCode::kMismatch, "unexpected message {}"_message, frame.type);
  (void)parse<Goodbye>(frame.payload);
  if (connection.idle()) connection.close();  // otherwise our Attach is on its way, and another Goodbye will follow
}

void ConnectionPool::handle_hello(Peer& peer, const Hello& hello) {
  PeerConnection& connection = *peer.connection;
  if (!hello.speaks_ours())
    return refuse(peer,
                  failed(ErrorCode::kMismatch,
                         "no common protocol: {} (release {}) speaks {} to {}, {} (release {}) speaks {} to {}"_message,
                         connection.name(), hello.release, hello.protocol_min, hello.protocol_max, identity_.name(),
                         kVersion, kProtocolMin, kProtocolMax));
  const std::string caller = rank_name(hello.job, hello.rank);
  if (hello.name_space != identity_.name_space)
    return refuse(peer, failed(ErrorCode::kMismatch, "{} is of namespace {}, {} of {}"_message, caller,
                               hello.name_space, identity_.name(), identity_.name_space));
  peer.hello = hello;
  const Incarnation self = Incarnation::self();
  peer.proven = hello.incarnation.same_host(self) && hello.incarnation.pid_namespace == self.pid_namespace &&
                hello.incarnation.pid == peer.pid;
  connection.set_name(caller);
  const uint16_t protocol = std::min(hello.protocol_max, kProtocolMax);
  connection.agree_on(protocol);
  connection.send(Welcome{.protocol = protocol,
                          .release = kVersion,
                          .job = identity_.job,
                          .rank = identity_.rank,
                          .incarnation = incarnation_});
}

void ConnectionPool::handle_welcome(Peer& peer, const Frame& frame) {
  if (frame.type != kCode<Welcome>) fail(ErrorCode::kMismatch, "answered Hello with message {}"_message, frame.type);
  const Welcome welcome = parse<Welcome>(frame.payload);
  if (welcome.protocol < kProtocolMin || welcome.protocol > kProtocolMax)
    fail(ErrorCode::kMismatch, "answers (release {}) with protocol {}, and {} (release {}) speaks {} to {}"_message,
         welcome.release, welcome.protocol, identity_.name(), kVersion, kProtocolMin, kProtocolMax);
  const std::string name = rank_name(welcome.job, welcome.rank);
  if (name != peer.callee) fail(ErrorCode::kMismatch, "is {} now"_message, name);
  if (welcome.incarnation != peer.hello.incarnation)
    fail(ErrorCode::kMismatch, "is {} now"_message, welcome.incarnation.to_string());
  peer.hello = {.protocol_min = welcome.protocol,
                .protocol_max = welcome.protocol,
                .release = welcome.release,
                .name_space = identity_.name_space,
                .job = welcome.job,
                .rank = welcome.rank,
                .incarnation = welcome.incarnation};
  loop_.cancel_timer(std::exchange(peer.timer, 0));
  peer.connection->agree_on(welcome.protocol);
}

void ConnectionPool::handle_attach(uint64_t id, std::shared_ptr<Link> link, Attach attach) {
  Peer& peer = peers_.at(id);
  loop_.cancel_timer(std::exchange(peer.timer, 0));
  events_.on_caller({.link = std::move(link), .hello = peer.hello, .attach = std::move(attach)});
}

// --- the end -------------------------------------------------------------------------------------

// Only the side that has dialed ends the connection, so that no link that is being opened is lost.
void ConnectionPool::handle_idle(uint64_t id) {
  Peer& peer = peers_.at(id);
  if (!peer.dialed) return;
  if (!peer.connection->agreed()) return peer.connection->close();
  peer.left = true;
  peer.connection->send(Goodbye{});
}

void ConnectionPool::refuse(Peer& peer, const Status& why) {
  log_refusal(peer.connection->name(), why);
  const std::shared_ptr<PeerConnection> connection = peer.connection;
  connection->reject(why);
}

void ConnectionPool::drop(uint64_t id) {
  const auto it = peers_.find(id);
  if (it == peers_.end()) return;
  loop_.cancel_timer(it->second.timer);
  peers_.erase(it);
}

}  // namespace tessera
