#include "collective/service.h"

#include <poll.h>

#include <algorithm>

#include "base/fail.h"

namespace tessera::collective {
namespace {

constexpr size_t kMaxStrangers = 64;
constexpr Duration kRetry = std::chrono::milliseconds(10);
// A process that dies closes its sockets a little before its pidfd tells: so long the death may take to show.
constexpr Duration kDeathShows = std::chrono::milliseconds(600);
constexpr FrameLimits kLimits{.payload_bytes = kMaxServiceBytes, .fds = kMaxServiceFds};

template <typename Message>
Message message_of(const Frame& frame, std::string_view from) {
  return read_message<Message>(frame.payload, from);
}

}  // namespace

Service::Link::Link(UniqueFd socket)
    : fd(std::move(socket)), reader(kServiceMagic, kLimits), writer(kServiceMagic, kServiceVersion, 1 << 20) {}

Service::Service(int rank, int size, Arenas& arenas)
    : rank_(rank),
      size_(size),
      arenas_(arenas),
      dir_(RuntimeDir::open(RuntimeDir::default_root(), fmt::format("rank {} of a group", rank))),
      socket_(dir_->path("group")),
      peers_(static_cast<size_t>(size)),
      loop_("tessera-group") {
  listener_.emplace(loop_, listen_unix(socket_));
}

Service::~Service() {
  stop();
}

void Service::stop() {
  loop_.stop();
}

void Service::start(std::vector<Bootstrap> ranks, RankPages own, std::function<void(const Status&)> failed) {
  ranks_ = std::move(ranks);
  failed_ = std::move(failed);
  {
    const MutexLock lock(mutex_);
    pages_ = std::move(own);
    pages_.pages.resize(static_cast<size_t>(size_));
  }
  loop_.post([this] { begin(); });
  loop_.start();
}

std::string Service::name(int rank) const {
  return fmt::format("rank {} (pid {})", rank, ranks_[static_cast<size_t>(rank)].process.pid);
}

void Service::begin() {
  listener_->start([this](UniqueFd socket) { add_link(std::make_shared<Link>(std::move(socket))); },
                   [](const Error&) {});  // it is accepted again later; at the deadline, the caller says who is missing
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_) watch(rank);
  for (int rank = rank_ + 1; rank < size_; ++rank) connect(rank);
  check_connected();
}

void Service::watch(int rank) {
  const Incarnation& process = ranks_[static_cast<size_t>(rank)].process;
  Peer& peer = peers_[static_cast<size_t>(rank)];
  peer.pidfd = open_pidfd(process);
  if (peer.pidfd) {
    loop_.add_fd(peer.pidfd.get(), EPOLLIN, [this, rank](uint32_t) { died(rank); });
  } else if (liveness_of(process) == Liveness::kDead) {
    died(rank);
  }
}

// Its socket has been there since before the bootstrap, so that it is only busy, or gone: what the pidfd tells.
void Service::connect(int rank) {
  try {
    auto link =
        std::make_shared<Link>(start_connect(SocketAddress::unix_path(ranks_[static_cast<size_t>(rank)].socket)));
    link->called = rank;
    hello(*link, rank);
    add_link(link);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnavailable && error.code() != ErrorCode::kPeerLost)
      return fail({error.code(), error.what()});
    loop_.add_timer_after(kRetry, [this, rank] { connect(rank); });
  }
}

void Service::add_link(const std::shared_ptr<Link>& link) {
  require_same_user(link->fd.get());
  if (strangers_.size() >= kMaxStrangers)
    tessera::fail(ErrorCode::kResourceExhausted, "{} connections have not said hello"_message, strangers_.size());
  strangers_.push_back(link);
  loop_.add_fd(link->fd.get(), EPOLLIN, [this, link](uint32_t events) { on_events(link, events); });
}

void Service::hello(Link& link, int rank) {
  std::vector<UniqueFd> fds;
  {
    const MutexLock lock(mutex_);
    fds.push_back(duplicate_fd(pages_.pages[static_cast<size_t>(rank_)]->fd()));
    if (rank_ == 0) fds.push_back(duplicate_fd(pages_.bells->fd()));
  }
  send(link,
       GroupHello{.rank = static_cast<uint32_t>(rank_),
                  .key = ranks_[static_cast<size_t>(rank_)].key,
                  .callee = ranks_[static_cast<size_t>(rank)].key},
       std::move(fds));
}

template <typename Message>
void Service::send(Link& link, const Message& message, std::vector<UniqueFd> fds) {
  link.writer.push(static_cast<uint16_t>(Message::kType), message_bytes(message), std::move(fds));
  link.writer.flush(link.fd.get());  // what is left goes when the socket is writable
}

void Service::on_events(const std::shared_ptr<Link>& link, uint32_t events) {
  try {
    if ((events & EPOLLOUT) != 0) link->writer.flush(link->fd.get());
    receive(link);
    if (link->fd) loop_.set_events(link->fd.get(), link->writer.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT);
  } catch (const Error& error) {
    const int rank = std::max(link->rank, link->called);
    drop(link);
    if (rank < 0) return;  // a stranger
    if (error.code() == ErrorCode::kPeerLost) return ended(rank);
    fail(failed(error.code(), "{}: {}"_message, name(rank), error.what()));
  }
}

void Service::receive(const std::shared_ptr<Link>& link) {
  const bool open = link->reader.fill(link->fd.get());
  while (auto frame = link->reader.next()) take(*link, std::move(*frame));
  if (open) return;
  const int rank = std::max(link->rank, link->called);
  drop(link);
  if (rank >= 0) ended(rank);
}

void Service::drop(const std::shared_ptr<Link>& link) {
  loop_.remove_fd(link->fd.get());
  std::erase(strangers_, link);
  if (link->rank >= 0) peers_[static_cast<size_t>(link->rank)].link.reset();
  link->fd.reset();
}

void Service::take(Link& link, Frame frame) {
  const auto type = static_cast<ServiceType>(frame.type);
  if (frame.version != kServiceVersion)
    tessera::fail(ErrorCode::kMismatch, "a frame of version {}, not {}"_message, frame.version, kServiceVersion);
  if (link.rank < 0 || type == ServiceType::kHello) return take_hello(link, std::move(frame));
  switch (type) {
    case ServiceType::kAskArena:
      return take_question(link, frame);
    case ServiceType::kArena:
      return take_arena(link, std::move(frame));
    default:
      tessera::fail(ErrorCode::kInvalidArgument, "unknown frame type {}"_message, frame.type);
  }
}

void Service::take_hello(Link& link, Frame frame) {
  if (link.rank >= 0 || static_cast<ServiceType>(frame.type) != ServiceType::kHello)
    tessera::fail(ErrorCode::kInvalidArgument, "frame type {} out of turn"_message, frame.type);
  const auto hello = message_of<GroupHello>(frame, "hello of a rank");
  const bool known = hello.rank < ranks_.size() && static_cast<int>(hello.rank) != rank_ &&
                     hello.key == ranks_[hello.rank].key && hello.callee == ranks_[static_cast<size_t>(rank_)].key;
  if (!known || peers_[hello.rank].link != nullptr || frame.fds.size() != (hello.rank == 0 ? 2U : 1U))
    tessera::fail(ErrorCode::kMismatch, "a hello that no rank of this group sends"_message);
  link.rank = static_cast<int>(hello.rank);
  const auto self = std::ranges::find_if(strangers_, [&](const auto& other) { return other.get() == &link; });
  Peer& peer = peers_[hello.rank];
  peer.link = *self;
  strangers_.erase(self);
  const Bootstrap& who = ranks_[hello.rank];
  auto page = SharedPages::open(std::move(frame.fds[0]), Page::bytes_for(who.slots), SharedPages::Writers::kMaker,
                                name(link.rank));
  Page::open(page->data(), page->bytes(), who.rank, who.size, who.slots, name(link.rank));
  std::shared_ptr<SharedPages> bells;
  if (hello.rank == 0)
    bells = SharedPages::open(std::move(frame.fds[1]), Bells::bytes_for(size_), SharedPages::Writers::kAll,
                              name(link.rank));
  {
    const MutexLock lock(mutex_);
    pages_.pages[hello.rank] = std::move(page);
    if (bells != nullptr) pages_.bells = std::move(bells);
  }
  if (link.rank < rank_) this->hello(link, link.rank);
  check_connected();
}

void Service::take_question(Link& link, const Frame& frame) {
  const auto question = message_of<AskArena>(frame, "question");
  const std::shared_ptr<SharedArena> arena = arenas_.shown(question.arena);
  if (arena == nullptr) return send(link, ArenaAnswer{.arena = question.arena, .bytes = 0});
  std::vector<UniqueFd> fds;
  fds.push_back(duplicate_fd(arena->fd_for_peer()));
  send(link, ArenaAnswer{.arena = question.arena, .bytes = arena->bytes()}, std::move(fds));
}

void Service::take_arena(Link& link, Frame frame) {
  const auto answer = message_of<ArenaAnswer>(frame, "answer");
  bool taken = false;
  if (answer.bytes == 0) {
    taken = arenas_.refuse(link.rank, answer.arena);
  } else if (frame.fds.size() == 1) {
    auto mapped = std::make_unique<MappedArena>(std::move(frame.fds[0]), answer.bytes, name(link.rank));
    if (mapped->data() == nullptr)
      tessera::fail(ErrorCode::kInvalidArgument, "its arena {} could shrink"_message, answer.arena);
    taken = arenas_.take(link.rank, answer.arena, std::move(mapped));
  }
  if (!taken) tessera::fail(ErrorCode::kInvalidArgument, "it sent arena {} unasked"_message, answer.arena);
  wake();
}

void Service::ask(int rank, uint32_t arena) {
  loop_.post([this, rank, arena] {
    const std::shared_ptr<Link> link = peers_[static_cast<size_t>(rank)].link;
    if (link == nullptr) return ended(rank);
    try {
      send(*link, AskArena{.arena = arena});
    } catch (const Error& error) {
      drop(link);
      ended(rank);
    }
  });
}

// Whether the rank said why it would go.
bool Service::excused(int rank) const {
  std::shared_ptr<SharedPages> pages;
  {
    const MutexLock lock(mutex_);
    pages = pages_.pages[static_cast<size_t>(rank)];
  }
  if (pages == nullptr) return false;
  const Bootstrap& who = ranks_[static_cast<size_t>(rank)];
  const Page page = Page::open(pages->data(), pages->bytes(), who.rank, who.size, who.slots, name(rank));
  const RankState state = page.state();
  if (state == RankState::kFailed) failed_(page.failure(name(rank)));
  return state >= RankState::kLeft;
}

void Service::died(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.pidfd) loop_.remove_fd(peer.pidfd.get());
  peer.pidfd.reset();
  if (!excused(rank)) fail(failed(ErrorCode::kPeerLost, "{}"_message, fmt::join(lost_with(rank), ", ")));
  wake();
}

// While the group forms, a rank that ends because of another one's death has nothing to excuse it, and may be seen
// first: all that are gone are named.
std::vector<std::string> Service::lost_with(int rank) const {
  std::vector<std::string> lost{fmt::format("{} has died", name(rank))};
  for (int other = 0; other < size_; ++other)
    if (other != rank && other != rank_ && is_dead(other) && !excused(other))
      lost.push_back(fmt::format("{} has died", name(other)));
  return lost;
}

bool Service::is_dead(int rank) const {
  const Peer& peer = peers_[static_cast<size_t>(rank)];
  if (!peer.pidfd) return liveness_of(ranks_[static_cast<size_t>(rank)].process) == Liveness::kDead;
  pollfd ended{.fd = peer.pidfd.get(), .events = POLLIN, .revents = 0};
  return ::poll(&ended, 1, 0) > 0;
}

void Service::ended(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.ended || excused(rank)) return wake();
  peer.ended = true;
  loop_.add_timer_after(kDeathShows, [this, rank] {
    if (!excused(rank))
      fail(failed(ErrorCode::kPeerLost, "{} has closed its connection without leaving the group"_message, name(rank)));
  });
}

void Service::fail(const Status& status) {
  failed_(status);
  wake();
}

void Service::check_connected() {
  {
    const MutexLock lock(mutex_);
    connected_ =
        pages_.bells != nullptr && std::ranges::all_of(pages_.pages, [](const auto& page) { return page != nullptr; });
    if (!connected_) return;
  }
  listener_->stop();
  for (const auto& stranger : std::vector(strangers_)) drop(stranger);
  dir_.reset();
  wake();
}

bool Service::connected() const {
  const MutexLock lock(mutex_);
  return connected_;
}

RankPages Service::pages() const {
  const MutexLock lock(mutex_);
  return pages_;
}

std::string Service::explain() const {
  const MutexLock lock(mutex_);
  std::vector<std::string> missing;
  for (int rank = 0; rank < size_; ++rank) {
    if (pages_.pages[static_cast<size_t>(rank)] != nullptr) continue;
    const bool stopped = is_stopped(ranks_[static_cast<size_t>(rank)].process);
    missing.push_back(fmt::format("{} {}", name(rank), stopped ? "is stopped" : "has not connected"));
  }
  return fmt::format("{}", fmt::join(missing, ", "));
}

void Service::sleep_until(const std::function<bool()>& ready, const Deadline& deadline) const {
  for (;;) {
    uint64_t changes = 0;
    {
      const MutexLock lock(mutex_);
      changes = changes_;
    }
    if (ready()) return;
    const MutexLock lock(mutex_);
    while (changes_ == changes)
      if (!changed_.wait_until(mutex_, deadline)) return;
  }
}

void Service::wake() {
  const MutexLock lock(mutex_);
  ++changes_;
  changed_.notify_all();
}

}  // namespace tessera::collective
