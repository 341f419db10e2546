// A Store that speaks Tessera's protocol to a Server anywhere.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/event_loop.h"
#include "base/mutex.h"
#include "store/client/store_link.h"
#include "store/memory/memory.h"
#include "tessera/store.h"

namespace tessera::store {

class Client final : public Store {
 public:
  Client(std::string url, std::unique_ptr<Connector> connector, uint64_t id, std::stop_token stop = {});
  ~Client() override;

  // Waits for the first connection. Throws kUnavailable at the deadline, kCancelled once stopped.
  void wait_connected(Timeout timeout);

  const std::string& url() const override { return url_; }
  int64_t put(std::string_view key, std::string_view value, PutOptions options, Timeout timeout) override;
  std::optional<KeyValue> get(std::string_view key, Timeout timeout) override;
  StoreRange range(std::string_view prefix, Timeout timeout) override;
  int64_t erase(std::string_view key, Timeout timeout) override;
  int64_t erase_prefix(std::string_view prefix, Timeout timeout) override;
  TransactionResult transact(const StoreTransaction& transaction, Timeout timeout) override;
  LeaseId grant_lease(Timeout ttl, Timeout timeout) override;
  void revoke_lease(LeaseId lease, Timeout timeout) override;
  std::unique_ptr<Watch> watch(std::string_view prefix, int64_t from_revision, WatchCallback callback) override;
  uint64_t requests() const override { return requests_.load(std::memory_order_relaxed); }
  void close() override;

 private:
  struct Call;
  struct Watching;
  class WatchHandle;

  // On any thread.
  void count_request();
  void check_caller(std::string_view what) const;
  template <typename Result>
  Result ask(Request request, std::string what, std::function<void(ByteReader&, Result&)> read, Timeout timeout);
  void perform(const std::shared_ptr<Call>& call, Timeout timeout);
  Status late(const Call& call, Timeout timeout) const;
  StoreRange read_range(Request request, std::string what, Timeout timeout);
  int64_t erase_keys(std::string_view key, bool prefix, Timeout timeout);
  void end_watch(const std::shared_ptr<Watching>& watching);
  Status link_status() const;
  Status hopeless() const;  // why calls fail immediately without a connection, or ok
  void set_link_status(const Status& status);

  // On the client's thread.
  StoreHello hello() const;
  void submit(const std::shared_ptr<Call>& call);
  void on_ready(const StoreWelcome& welcome);
  void on_frame(StoreMessage type, ByteReader& in);
  void on_down(const Status& why);
  void fail_if_hopeless();
  void on_reply(ByteReader& in);
  void on_events(ByteReader& in);
  void on_compacted(ByteReader& in);
  void on_leases_lost(ByteReader& in);
  void republish(const Memory::Republication& republication);
  void start_watch(const std::shared_ptr<Watching>& watching);
  void renew(LeaseId lease);
  void keep_alive(const std::vector<LeaseId>& leases);
  void note_revision(int64_t revision) { last_revision_ = std::max(last_revision_, revision); }
  void shut_down();

  const std::string url_;
  const uint64_t id_;
  const pid_t owner_;
  const std::stop_token stop_;
  std::atomic<uint64_t> requests_{0};
  std::atomic<uint64_t> next_id_{1};
  std::atomic<bool> closing_{false};

  mutable Mutex mutex_;
  CondVar link_changed_;
  Status link_status_ GUARDED_BY(mutex_);  // why there is no connection, or ok

  // On the client's thread.
  std::map<uint64_t, std::shared_ptr<Call>> calls_;  // in order, as they are sent again
  std::map<uint64_t, std::shared_ptr<Watching>> watches_;
  std::unordered_map<LeaseId, EventLoop::TimerId> renewals_;
  Memory memory_;
  uint64_t instance_ = 0;      // of the last store that it was connected to
  int64_t last_revision_ = 0;  // the highest one seen
  std::unique_ptr<StoreLink> link_;
  std::unique_ptr<EventLoop> loop_;  // ends before the members that its callbacks use
  std::optional<std::stop_callback<std::function<void()>>> on_stop_;
};

}  // namespace tessera::store
