#include "bus/registration/participant.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <stop_token>
#include <tuple>

#include "base/fail.h"
#include "base/fork_guard.h"
#include "base/mutex.h"
#include "tessera/version.h"

namespace tessera::bus {
namespace {

// The participants of this process, by rank.
class Participants {
 public:
  // A forked child has a separate instance: its parent's may be locked.
  static Participants& of_process() {
    static std::atomic<Participants*> present{nullptr};  // never freed in a child: their threads belong to the parent
    Participants* found = present.load();
    while (found == nullptr || !found->process_.here()) {
      auto made = std::make_unique<Participants>();
      if (present.compare_exchange_strong(found, made.get())) found = made.release();
    }
    return *found;
  }

  std::shared_ptr<Participant> take(const BusOptions& options) {
    const Key key{options.store, options.name_space, options.job, options.rank};
    const Deadline deadline = Deadline::after(options.timeout);
    {
      const MutexLock lock(mutex_);
      while (true) {
        const auto [it, added] = ranks_.try_emplace(key, Entry{.world = options.world, .threads = options.threads});
        if (added) break;
        if (std::shared_ptr<Participant> there = it->second.participant.lock()) {
          require_alike(options, it->second);
          return there;
        }
        const uint64_t seen = changes_;
        if (changed_.wait_until(mutex_, options.stop, deadline, [&]() REQUIRES(mutex_) { return changes_ != seen; }))
          continue;
        const ErrorCode code = options.stop.stop_requested() ? ErrorCode::kCancelled : ErrorCode::kDeadlineExceeded;
        fail(code, "{}: another thread of this process has been joining or leaving the bus for {:.1f} s"_message,
             rank_name(options.job, options.rank), to_seconds(options.timeout));
      }
    }
    try {
      BusOptions now = options;
      now.timeout = deadline.left();
      std::shared_ptr<Participant> made(std::make_unique<Participant>(now, std::nullopt).release(),
                                        [this, key](Participant* gone) {
                                          delete gone;
                                          forget(key);
                                        });
      const MutexLock lock(mutex_);
      ranks_.at(key).participant = made;
      tell();
      return made;
    } catch (...) {
      forget(key);
      throw;
    }
  }

 private:
  using Key = std::tuple<std::string, std::string, std::string, Rank>;  // store, namespace, job, rank
  struct Entry {
    int world = 1;
    int threads = 0;
    std::weak_ptr<Participant> participant = {};  // null while it is made or destroyed
  };

  static void require_alike(const BusOptions& options, const Entry& there) {
    if (options.world != there.world)
      fail(ErrorCode::kInvalidArgument,
           "world {}: this process is on the bus as {} of a world of {} already: close that bus first, or give this "
           "one the same world"_message,
           options.world, rank_name(options.job, options.rank), there.world);
    if (options.threads != 0 && options.threads != there.threads)
      fail(ErrorCode::kInvalidArgument,
           "threads {}: this process is on the bus as {} with {} already, and shares them: leave it out here"_message,
           options.threads, rank_name(options.job, options.rank), there.threads);
  }

  void forget(const Key& key) {
    const MutexLock lock(mutex_);
    ranks_.erase(key);
    tell();
  }

  void tell() REQUIRES(mutex_) {
    ++changes_;
    changed_.notify_all();
  }

  const ForkGuard process_;
  Mutex mutex_;
  StoppableCondVar changed_;
  uint64_t changes_ GUARDED_BY(mutex_) = 0;
  std::map<Key, Entry> ranks_ GUARDED_BY(mutex_);
};

}  // namespace

Participant::Participant(const BusOptions& options, std::optional<Incarnation> worker) {
  const Deadline deadline = Deadline::after(options.timeout);
  std::stop_source opening;  // stopping one Bus must not end another one's calls later
  const std::stop_callback on_stop(options.stop, [&] { opening.request_stop(); });
  store_ = open_store(options.store, {.connect_timeout = options.timeout, .stop = opening.get_token()});
  agent_ = std::make_unique<Agent>(
      Identity{options.name_space, options.job, options.rank, options.world},
      options.threads > 0 ? options.threads : std::max(1, usable_cpus() / std::max(1, options.world)));
  rendezvous_ = std::make_unique<Rendezvous>(*store_, agent_->identity(),
                                             RankRecord{.incarnation = agent_->incarnation(),
                                                        .world = options.world,
                                                        .address = agent_->address(),
                                                        .release = kVersion,
                                                        .worker = std::move(worker)},
                                             agent_->waits(), agent_->loop());
  exchanges_ = std::make_unique<BatchExchanges>(*rendezvous_);
  rendezvous_->claim({.deadline = deadline, .stop = options.stop});
}

std::shared_ptr<Participant> Participant::of_process(const BusOptions& options) {
  return Participants::of_process().take(options);
}

}  // namespace tessera::bus
