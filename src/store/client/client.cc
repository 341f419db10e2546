#include "store/client/client.h"

#include <unistd.h>

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "base/metrics.h"
#include "store/client/client_calls.h"
#include "store/limits.h"

namespace tessera::store {
namespace {

constexpr Duration kFarewellTime = std::chrono::seconds(1);
constexpr Duration kReminder = std::chrono::seconds(10);

// TransactionResult::current: the keys that were put, or those that prevented it.
StoreView current_keys(const StoreTransaction& transaction, const TransactReply& reply) {
  StoreView keys;
  for (const KeyValue& kv : reply.current) keys.emplace(kv.key, kv);
  if (!reply.succeeded) return keys;
  size_t put = 0;
  for (const StoreOperation& operation : transaction.operations) {
    if (operation.type == StoreOperation::Type::kDelete) continue;
    const PutMark mark = reply.marks.at(put++);
    keys[operation.key] = {.key = operation.key,
                           .value = operation.value,
                           .create_revision = mark.create_revision,
                           .mod_revision = reply.revision,
                           .version = mark.version,
                           .lease = operation.options.lease,
                           .decision = operation.options.decision};
  }
  return keys;
}

std::string describe(const StoreTransaction& transaction) {
  const auto& [compares, operations] = transaction;
  if (operations.empty()) return compares.empty() ? "empty transaction" : fmt::format("compare '{}'", compares[0].key);
  const bool put = operations.size() == 1 && operations[0].type == StoreOperation::Type::kPut;
  return fmt::format("{} '{}'", put ? "put" : "transaction on", operations[0].key);
}

}  // namespace

class Client::WatchHandle final : public Watch {
 public:
  WatchHandle(Client& client, std::shared_ptr<Watching> watching) : client_(client), watching_(std::move(watching)) {}
  ~WatchHandle() override { client_.end_watch(watching_); }

 private:
  Client& client_;
  std::shared_ptr<Watching> watching_;
};

Client::Client(std::string url, std::unique_ptr<Connector> connector, uint64_t id, std::stop_token stop)
    : url_(std::move(url)),
      id_(id),
      owner_(::getpid()),
      stop_(std::move(stop)),
      link_status_(ErrorCode::kUnavailable, "not connected yet"),
      loop_(std::make_unique<EventLoop>("tessera-kv")) {
  link_ = std::make_unique<StoreLink>(
      *loop_, std::move(connector),
      StoreLink::Callbacks{.hello = [this] { return hello(); },
                           .on_ready = [this](const StoreWelcome& welcome) { on_ready(welcome); },
                           .on_frame = [this](StoreMessage type, ByteReader& in) { on_frame(type, in); },
                           .on_down = [this](const Status& why) { on_down(why); }});
  loop_->post([this] { link_->connect(); });
  loop_->start();
  on_stop_.emplace(stop_, [this] {
    loop_->post([this] { fail_if_hopeless(); });
    const MutexLock lock(mutex_);
    link_changed_.notify_all();
  });
}

Client::~Client() {
  close();
  if (owner_ == ::getpid()) return;
  // A forked child has the parent's sockets but not its threads: touches neither.
  (void)loop_.release();
  (void)link_.release();
}

void Client::wait_connected(Timeout timeout) {
  const MutexLock lock(mutex_);
  const TimePoint start = Clock::steady().now();
  const Deadline deadline = Deadline::after(timeout);
  const auto settled = [&]() REQUIRES(mutex_) {
    return link_status_.ok() || lasting(link_status_.code()) || stop_.stop_requested() || deadline.passed();
  };
  while (!link_changed_.wait_until(mutex_, Deadline::after(std::min(deadline.left(), kReminder)), settled)) {
    const double waited = to_seconds(Clock::steady().now() - start);
    log_event(LogLevel::warn, "store.awaited", {{"store", url_}, {"seconds", waited}},
              "store {} has not answered for {:.0f} s: {}"_message, url_, waited, link_status_.message());
  }
  if (link_status_.ok()) return;
  if (!lasting(link_status_.code()) && stop_.stop_requested())
    fail(ErrorCode::kCancelled, "store {}: the wait for a connection was interrupted: {}"_message, url_,
         link_status_.message());
  if (lasting(link_status_.code())) fail(link_status_.code(), "store {}: {}"_message, url_, link_status_.message());
  fail(ErrorCode::kUnavailable, "store {} cannot be reached (waited {:.3g} s): {}"_message, url_, to_seconds(timeout),
       link_status_.message());
}

int64_t Client::put(std::string_view key, std::string_view value, PutOptions options, Timeout timeout) {
  StoreTransaction transaction;
  transaction.operations.push_back(
      {.type = StoreOperation::Type::kPut, .key = std::string(key), .value = std::string(value), .options = options});
  return transact(transaction, timeout).revision;
}

std::optional<KeyValue> Client::get(std::string_view key, Timeout timeout) {
  check_key(key);
  StoreRange found = read_range({.op = Op::kRange, .key = std::string(key)}, fmt::format("get '{}'", key), timeout);
  if (found.items.empty()) return std::nullopt;
  return std::move(found.items.begin()->second);
}

StoreRange Client::range(std::string_view prefix, Timeout timeout) {
  check_prefix(prefix);
  return read_range({.op = Op::kRange, .key = std::string(prefix), .prefix = true}, fmt::format("list '{}*'", prefix),
                    timeout);
}

StoreRange Client::read_range(Request request, std::string what, Timeout timeout) {
  return ask<StoreRange>(
      std::move(request), std::move(what),
      [this](ByteReader& in, StoreRange& range) {
        RangeReply reply = read_fields<RangeReply>(in);
        range.revision = reply.revision;
        note_revision(range.revision);
        for (KeyValue& kv : reply.keys) {
          memory_.seen(kv);
          std::string key = kv.key;
          range.items.emplace(std::move(key), std::move(kv));
        }
      },
      timeout);
}

int64_t Client::erase(std::string_view key, Timeout timeout) {
  check_key(key);
  return erase_keys(key, false, timeout);
}

int64_t Client::erase_prefix(std::string_view prefix, Timeout timeout) {
  check_prefix(prefix);
  return erase_keys(prefix, true, timeout);
}

int64_t Client::erase_keys(std::string_view key, bool prefix, Timeout timeout) {
  return ask<int64_t>(
      {.op = Op::kErase, .key = std::string(key), .prefix = prefix},
      fmt::format("erase '{}{}'", key, prefix ? "*" : ""),
      [this, key = std::string(key), prefix](ByteReader& in, int64_t& count) {
        count = read_fields<EraseReply>(in).count;
        memory_.erased(key, prefix);
      },
      timeout);
}

TransactionResult Client::transact(const StoreTransaction& transaction, Timeout timeout) {
  check_transaction(transaction);
  return ask<TransactionResult>(
      {.op = Op::kTransact, .token = random_id(), .transaction = transaction}, describe(transaction),
      [this, transaction](ByteReader& in, TransactionResult& result) {
        const TransactReply reply = read_fields<TransactReply>(in);
        note_revision(reply.revision);
        result = {
            .succeeded = reply.succeeded, .revision = reply.revision, .current = current_keys(transaction, reply)};
        if (reply.succeeded) memory_.done(transaction, result.current);
        for (const KeyValue& kv : reply.current) memory_.seen(kv);
      },
      timeout);
}

LeaseId Client::grant_lease(Timeout ttl, Timeout timeout) {
  check_ttl(ttl);
  const LeaseTerm term{.lease = static_cast<LeaseId>(random_id() >> 1 | 1), .ttl = ttl};
  return ask<LeaseId>(
      {.op = Op::kGrant, .lease = term}, fmt::format("grant a lease of {:.3g} s", to_seconds(ttl)),
      [this, term](ByteReader&, LeaseId& lease) {
        lease = term.lease;
        memory_.granted(term);
        renew(term.lease);
      },
      timeout);
}

void Client::revoke_lease(LeaseId lease, Timeout timeout) {
  if (lease <= 0) fail(ErrorCode::kInvalidArgument, "revoke lease {}: not a lease's id"_message, lease);
  ask<int>(
      {.op = Op::kRevoke, .leases = {lease}}, fmt::format("revoke lease {:#x}", lease),
      [this, lease](ByteReader&, int&) {
        memory_.revoked(lease);
        const auto renewal = renewals_.find(lease);
        if (renewal == renewals_.end()) return;
        loop_->cancel_timer(renewal->second);
        renewals_.erase(renewal);
      },
      timeout);
}

std::unique_ptr<Watch> Client::watch(std::string_view prefix, int64_t from_revision, WatchCallback callback) {
  check_prefix(prefix);
  if (from_revision <= 0)
    fail(ErrorCode::kInvalidArgument, "watch '{}*' from revision {}: begin at 1 or above"_message, prefix,
         from_revision);
  const std::string what = fmt::format("watch '{}*'", prefix);
  check_caller(what);
  auto watching = std::make_shared<Watching>();
  watching->id = next_id_++;
  watching->prefix = prefix;
  watching->next = from_revision;
  watching->callback = std::move(callback);
  count_request();
  const bool posted = loop_->post([this, watching] {
    if (watching->ended) return;
    watches_[watching->id] = watching;
    if (link_->ready()) start_watch(watching);
  });
  if (!posted) fail(ErrorCode::kCancelled, "store {}: {}: the client is closed"_message, url_, what);
  return std::make_unique<WatchHandle>(*this, std::move(watching));
}

void Client::end_watch(const std::shared_ptr<Watching>& watching) {
  if (owner_ != ::getpid()) return;
  if (loop_->on_thread()) {
    watching->ended = true;
  } else {
    const MutexLock lock(watching->delivering);
    watching->ended = true;
  }
  loop_->post([this, id = watching->id] {
    if (watches_.erase(id) == 0 || !link_->ready()) return;
    link_->send(StoreMessage::kUnwatch, message_bytes(WatchEnd{id}));
  });
}

template <typename Result>
Result Client::ask(Request request, std::string what, std::function<void(ByteReader&, Result&)> read, Timeout timeout) {
  check_caller(what);
  auto call = std::make_shared<Call>();
  auto result = std::make_shared<Result>();  // the reply may come after the caller has gone
  call->id = request.id = next_id_++;
  call->what = std::move(what);
  call->request = message_bytes(request);
  call->grants = request.op == Op::kGrant;
  call->on_reply = [result, read = std::move(read)](ByteReader& in) {
    read(in, *result);
    in.finish();
  };
  count_request();
  perform(call, timeout);
  return std::move(*result);
}

void Client::count_request() {
  requests_.fetch_add(1, std::memory_order_relaxed);
  Metrics::process().store_requests.add();
}

void Client::check_caller(std::string_view what) const {
  if (owner_ != ::getpid())
    fail(ErrorCode::kInvalidArgument, "store {}: {}: a forked child must open its own client"_message, url_, what);
  if (loop_->on_thread())
    fail(ErrorCode::kInvalidArgument, "store {}: {}: called from a watch's callback, which must not wait"_message, url_,
         what);
  if (closing_) fail(ErrorCode::kCancelled, "store {}: {}: the client is closed"_message, url_, what);
}

void Client::perform(const std::shared_ptr<Call>& call, Timeout timeout) {
  const Deadline deadline = Deadline::after(timeout);
  if (!loop_->post([this, call] { submit(call); }))
    fail(ErrorCode::kCancelled, "store {}: {}: the client is closed"_message, url_, call->what);
  bool done = false;
  Status status;
  {
    const MutexLock lock(call->mutex);
    done = call->changed.wait_until(call->mutex, deadline, [&]() REQUIRES(call->mutex) { return call->done; });
    status = call->status;
  }
  if (!done) {
    loop_->post([call] { call->abandoned = true; });
    late(*call, timeout).throw_if_error();
  }
  if (!status.ok()) fail(status.code(), "store {}: {}: {}"_message, url_, call->what, status.message());
}

Status Client::late(const Call& call, Timeout timeout) const {
  const Status link = link_status();
  if (link.ok())
    return failed(ErrorCode::kDeadlineExceeded, "store {}: {}: no answer within {:.3g} s"_message, url_, call.what,
                  to_seconds(timeout));
  return failed(ErrorCode::kUnavailable, "store {}: {}: no connection within {:.3g} s: {}"_message, url_, call.what,
                to_seconds(timeout), link.message());
}

Status Client::link_status() const {
  const MutexLock lock(mutex_);
  return link_status_;
}

Status Client::hopeless() const {
  Status link = link_status();
  if (link.ok() || lasting(link.code())) return link;
  if (!stop_.stop_requested()) return {};
  return failed(ErrorCode::kCancelled, "interrupted while there was no connection: {}"_message, link.message());
}

void Client::set_link_status(const Status& status) {
  {
    const MutexLock lock(mutex_);
    link_status_ = status;
  }
  link_changed_.notify_all();
}

void Client::close() {
  if (owner_ != ::getpid() || closing_.exchange(true)) return;
  on_stop_.reset();
  auto farewell = std::make_shared<Call>();
  farewell->id = next_id_++;
  farewell->what = "close";
  farewell->on_reply = [](ByteReader&) {};
  loop_->post([this, farewell] {
    std::vector<LeaseId> leases = memory_.leases();
    for (const LeaseId lease : leases) memory_.revoked(lease);
    if (!link_->ready() || leases.empty()) return farewell->end({});
    leases.resize(std::min<size_t>(leases.size(), kMaxListedLeases));
    Request request;
    request.id = farewell->id;
    request.op = Op::kRevoke;
    request.leases = std::move(leases);
    farewell->request = message_bytes(request);
    submit(farewell);
  });
  {
    const MutexLock lock(farewell->mutex);
    farewell->changed.wait_until(farewell->mutex, Deadline::after(kFarewellTime),
                                 [&]() REQUIRES(farewell->mutex) { return farewell->done; });
  }
  loop_->stop();
  shut_down();
}

}  // namespace tessera::store
