// The parts of a Group.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fork_guard.h"
#include "collective/calls.h"
#include "collective/failure.h"
#include "collective/group.h"
#include "collective/leftovers.h"
#include "collective/messages.h"
#include "collective/service.h"
#include "collective/shared/arenas.h"
#include "collective/shared/bells.h"
#include "collective/shared/page.h"

namespace tessera::collective {

// The values that were read of a rank's words: a word must not go back behind them.
class SeenWords {
 public:
  explicit SeenWords(uint32_t slots)
      : slots_(slots), values_((static_cast<size_t>(kLastSlotWord) + 1) * slots + static_cast<size_t>(kLastWord)) {}
  std::atomic<uint64_t>& of(Word word, uint32_t slot) {
    const auto index = static_cast<size_t>(word);
    const auto kinds = static_cast<size_t>(kLastSlotWord) + 1;
    return values_[word <= kLastSlotWord ? index * slots_ + slot : kinds * slots_ + index - kinds];
  }

 private:
  uint32_t slots_;
  std::vector<std::atomic<uint64_t>> values_;
};

struct Group::Impl {
  explicit Impl(const GroupOptions& chosen) : options(chosen) {}
  ~Impl();

  // Formation, in this order.
  Bootstrap prepare();
  void meet(const std::vector<std::string>& blobs);
  void find_pages();
  void connect();
  void open_pages();
  void await_all(RankState state, const Deadline& deadline);

  bool alone_in_process() const { return options.in_process || options.size == 1; }
  std::string describe(int rank) const;
  std::string describe_state(int rank) const;
  bool stopped(int rank) const;
  std::string explain(std::span<const int> late) const;
  const Page& page(int rank) const { return pages[static_cast<size_t>(rank)]; }
  void check_rank(int rank) const;
  void require_open() const;    // not failed, not closed
  void require_usable() const;  // and not a forked child: a system call
  // Adopts a peer's failure, if one has failed or its state goes back.
  void look();
  void fail(const Status& status);
  [[noreturn]] void fail_for(int rank, const Status& status);
  void ring();
  void abandon();
  // Collectives end with the group's failure if they end at their deadline.
  void await_step(uint64_t step, const std::string& what, std::optional<Duration> timeout);
  uint64_t call(const Call& call, const TakeMail& take);
  void await_or_fail(const device::Condition& condition);
  void note_shared(const std::byte* data, size_t bytes);  // of any rank of this process
  void note_arena(int owner, uint32_t arena, const std::byte* data, uint64_t bytes);
  const std::byte* map_arena(int rank, const MemoryRef& ref);

  const GroupOptions options;
  ForkGuard process;
  Failure failure;
  uint64_t key = 0;
  RankPages memory;
  std::vector<Bootstrap> ranks;
  std::optional<Page> own_page;
  std::vector<Page> pages;
  std::vector<std::unique_ptr<SeenWords>> seen;
  std::vector<std::atomic<RankState>> seen_states;  // by rank
  std::unique_ptr<Bells> bells;
  std::unique_ptr<Calls> calls;
  Arenas arenas;
  std::shared_ptr<const Readers> readers;
  Mutex reading_mutex;
  std::weak_ptr<const void> reading GUARDED_BY(reading_mutex);
  std::unique_ptr<Service> service;  // none within a process; before what it uses
  std::atomic<bool> opened{false};   // pages and bells are there
  std::atomic<bool> closed{false};
  std::atomic<bool> claimed{false};
};

}  // namespace tessera::collective
