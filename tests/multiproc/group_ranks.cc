#include "tests/multiproc/group_ranks.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/fail.h"
#include "collective/group.h"
#include "collective/movement/fold.h"
#include "collective/movement/gather.h"
#include "device/cpu_device.h"
#include "tessera/memory.h"

namespace tessera::test {
namespace {

using namespace collective;

constexpr int64_t kRows = 6;  // a rank
constexpr int64_t kColumns = 512;
constexpr uint32_t kSlot = 5;

// Over the board. Waits far longer than the group does: what a test does to a rank it does once the rank's blob is
// there, and the first moments of a process take seconds on a loaded machine, under a sanitizer.
Exchange exchange_over(GroupBoard& board, const GroupRank& options) {
  return [&board, &options](const std::string& blob) {
    GroupBoard::Blob& own = board.blobs[options.rank];
    TESSERA_CHECK_LE(blob.size(), sizeof(own.text));
    std::ranges::copy(blob, own.text);
    own.bytes.store(static_cast<uint32_t>(blob.size()));
    std::vector<std::string> blobs;
    const Deadline deadline = Deadline::after(hang_limit());
    for (int rank = 0; rank < options.size; ++rank) {
      GroupBoard::Blob& theirs = board.blobs[rank];
      while (theirs.bytes.load() == 0) {
        if (deadline.passed()) fail_internal("no blob of rank {}", rank);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      blobs.emplace_back(theirs.text, theirs.bytes.load());
    }
    return blobs;
  };
}

float weight_value(int rank, uint64_t version, int64_t i) {
  return static_cast<float>(version * 1000) + static_cast<float>(rank * 100) + static_cast<float>(i % 50);
}
float gradient_value(int rank, uint64_t step, int64_t i) {
  return static_cast<float>(rank + 1) + static_cast<float>(step % 7) + static_cast<float>(i % 3);
}

class Trainer {
 public:
  Trainer(const GroupRank& options, GroupBoard& board)
      : options_(options),
        device_(device::DeviceOptions{.rank = options.rank}),
        gathers_(device_.make_stream({.name = "gather", .timeout = options.timeout})),
        folds_(device_.make_stream({.name = "fold", .timeout = options.timeout})),
        shard_(SharedHeap::process().allocate(kRows * kColumns * sizeof(float))),
        gradient_(SharedHeap::process().allocate(static_cast<size_t>(options.size * kRows * kColumns) * sizeof(float))),
        gathered_(static_cast<size_t>(options.size * kRows * kColumns)),
        accumulated_(kRows * kColumns),
        board_(board) {
    group_ = Group::form(exchange_over(board, options_), {.rank = options.rank,
                                                          .size = options.size,
                                                          .name = "fault",
                                                          .timeout = options.timeout,
                                                          .device = &device_,
                                                          .slots = 16});
    meet();
  }

  // Whatever happens to the peers.
  ~Trainer() {
    for (int64_t i = 0; i < kRows * kColumns && version_ > 0; ++i)
      TESSERA_CHECK_EQ(shard()[i], weight_value(options_.rank, version_, i));
  }

  // An error of one rank is all ranks'.
  void run() {
    try {
      while (step()) {
      }
    } catch (const Error& error) {
      group_->fail({error.code(), error.what()});
      throw;
    }
    group_->close(group_->deadline());
  }

 private:
  bool step() {
    update();
    gather_weight();
    fold_gradient();
    std::vector<float> stop{board_.stop.load() ? 1.0F : 0.0F};
    group_->max_exchange(stop);
    ++board_.steps[options_.rank];
    return stop[0] == 0;
  }
  float* shard() const { return reinterpret_cast<float*>(shard_.data()); }

  // Longer than its operations wait: they know for whom.
  void await(device::Stream& stream) { device_.wait_host(stream.record(), Deadline::after(2 * options_.timeout)); }

  // All tell where their rows lie.
  void meet() {
    const MemoryRef own = group_->refer(shard_.data(), shard_.size());
    const auto refs = group_->exchange("shards", {reinterpret_cast<const char*>(&own), sizeof(own)});
    auto weight = std::make_shared<PublishedWeight>();
    weight->rows = options_.size * kRows;
    weight->columns = kColumns;
    for (int rank = 0; rank < options_.size; ++rank) {
      MemoryRef ref;
      std::memcpy(&ref, refs[static_cast<size_t>(rank)].data(), sizeof(ref));
      weight->owners.push_back({.begin = rank * kRows, .count = kRows, .data = group_->map(rank, ref)});
    }
    check_published(*weight, options_.size, "w");
    weight_ = std::move(weight);
  }

  void update() {
    const uint64_t next = version_ + 1;
    if (version_ > 0)
      device_.wait_host(*group_->all_at_least(Word::kRetired, kWholeRank, version_, "the last version"),
                        group_->deadline());
    version_ = next;
    for (int64_t i = 0; i < kRows * kColumns; ++i) shard()[i] = weight_value(options_.rank, version_, i);
    group_->set(Word::kPublished, kSlot, version_);
  }

  void gather_weight() {
    const GatherPart part{
        .slot = kSlot,
        .version = version_,
        .from = weight_,
        .to = {.data = gathered_.data(), .rows = options_.size * kRows, .columns = kColumns, .row_stride = kColumns},
        .weight = "w"};
    gather(*group_, *gathers_, {&part, 1});
    await(*gathers_);
    for (int rank = 0; rank < options_.size; ++rank)
      for (int64_t i = 0; i < kRows * kColumns; ++i)
        TESSERA_CHECK_EQ(gathered_[static_cast<size_t>(rank * kRows * kColumns + i)], weight_value(rank, version_, i));
    group_->set(Word::kRetired, kWholeRank, version_);
  }

  void fold_gradient() {
    const uint64_t interval = version_;
    const int64_t elements = options_.size * kRows * kColumns;
    auto* const gradient = reinterpret_cast<float*>(gradient_.data());
    for (int64_t i = 0; i < elements; ++i) gradient[i] = gradient_value(options_.rank, version_, i);
    std::ranges::fill(accumulated_, 0.0F);
    const FoldPart part{.slot = kSlot,
                        .interval = interval,
                        .round = 0,
                        .begin_row = options_.rank * kRows,
                        .rows = kRows,
                        .total_rows = options_.size * kRows,
                        .columns = kColumns,
                        .accumulated = accumulated_.data(),
                        .weight = "w"};
    fold(*group_, *folds_, {&part, 1});
    group_->set_gradient(kSlot, interval, 0, {.memory = group_->refer(gradient_.data(), gradient_.size())});
    group_->set(Word::kProduced, kSlot, round_word(interval, 1));
    await(*folds_);
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      float sum = 0;
      for (int rank = 0; rank < options_.size; ++rank)
        sum += gradient_value(rank, version_, options_.rank * kRows * kColumns + i);
      TESSERA_CHECK_EQ(accumulated_[static_cast<size_t>(i)], sum);
    }
    device_.wait_host(*group_->all_at_least(Word::kFolded, kSlot, round_word(interval, 1), "the gradient"),
                      group_->deadline());
    group_->set(Word::kClosed, kWholeRank, interval + 1);
  }

  const GroupRank options_;
  device::CpuDevice device_;
  std::shared_ptr<device::Stream> gathers_;
  std::shared_ptr<device::Stream> folds_;
  SharedBuffer shard_;
  SharedBuffer gradient_;
  std::vector<float> gathered_;
  std::vector<float> accumulated_;
  std::shared_ptr<const PublishedWeight> weight_;
  uint64_t version_ = 0;
  GroupBoard& board_;
  std::shared_ptr<Group> group_;
};

}  // namespace

int train(const GroupRank& options, GroupBoard& board) {
  const SharedBuffer spare = SharedHeap::process().allocate(64);  // the heap keeps an arena
  std::thread([] {}).join();  // ThreadSanitizer starts a thread of its own together with the first
  const Footprint before = Footprint::now();
  const auto check_footprint = [&] {
    const Footprint after = Footprint::now();
    if (options.checks_footprint && !after.within(before))
      fail_internal("left over: {} instead of {}", after.to_string(), before.to_string());
  };
  std::optional<Error> error;
  try {
    Trainer trainer(options, board);
    trainer.run();
  } catch (const Error& failure) {
    error = failure;
  }
  check_footprint();
  if (error) throw Error(*error);
  return 0;
}

}  // namespace tessera::test
