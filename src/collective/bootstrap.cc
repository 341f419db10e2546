#include "collective/bootstrap.h"

#include <algorithm>

#include "base/fail.h"
#include "base/mutex.h"
#include "collective/conditions.h"
#include "tessera/store.h"

namespace tessera::collective {
namespace {

// Of `size` ranks, those for which `is_there` is false: "0, 3".
template <typename IsThere>
std::string missing(int size, const IsThere& is_there) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank)
    if (!is_there(rank)) ranks.push_back(rank);
  return fmt::format("{}", fmt::join(ranks, ", "));
}

}  // namespace

Exchange store_exchange(Store& store, std::string prefix, int rank, int size, Duration timeout, std::stop_token stop) {
  struct Calls {
    uint64_t number = 0;
    LeaseId lease = kNoLease;
  };
  return [&store, prefix = std::move(prefix), rank, size, timeout, stop = std::move(stop),
          calls = std::make_shared<Calls>()](const std::string& blob) {
    constexpr Duration kLease = std::chrono::seconds(30);
    if (calls->lease == kNoLease) calls->lease = store.grant_lease(kLease, timeout);
    const std::string folder = fmt::format("{}/{}/", prefix, calls->number++);
    const auto key = [&folder](int of) { return folder + std::to_string(of); };
    store.put(key(rank), blob, {.lease = calls->lease}, timeout);
    StoreView view;
    const auto all_there = [&](const StoreView& keys) {
      view = keys;
      return missing(size, [&](int of) { return keys.contains(key(of)); }).empty();
    };
    try {
      view = store.wait_for(folder, all_there, timeout, stop);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kDeadlineExceeded) throw;
      fail(ErrorCode::kDeadlineExceeded, "bootstrap over {}: no blob of rank(s) {} under '{}' in {:.3g} s"_message,
           store.url(), missing(size, [&](int of) { return view.contains(key(of)); }), folder, to_seconds(timeout));
    }
    std::vector<std::string> blobs;
    for (int of = 0; of < size; ++of) blobs.push_back(view.at(key(of)).value);
    return blobs;
  };
}

// Rounds: a rank may be in the next one while others still read the last.
struct InProcessExchange::State {
  using Round = std::vector<std::optional<std::string>>;

  explicit State(int ranks) : size(ranks), calls(static_cast<size_t>(ranks)) {}

  std::shared_ptr<Round> begin(int rank, std::string blob) {
    const MutexLock lock(mutex);
    const size_t number = calls[static_cast<size_t>(rank)]++;
    if (number >= rounds.size()) rounds.push_back(std::make_shared<Round>(static_cast<size_t>(size)));
    (*rounds[number])[static_cast<size_t>(rank)] = std::move(blob);
    changed.notify_all();
    return rounds[number];
  }
  bool is_complete(const Round& round) const REQUIRES(mutex) {
    return std::ranges::all_of(round, [](const auto& blob) { return blob.has_value(); });
  }
  std::string late(const Round& round) const {
    const MutexLock lock(mutex);
    return missing(size, [&](int rank) { return round[static_cast<size_t>(rank)].has_value(); });
  }

  const int size;
  mutable Mutex mutex;
  CondVar changed;
  std::vector<size_t> calls GUARDED_BY(mutex);
  std::vector<std::shared_ptr<Round>> rounds GUARDED_BY(mutex);
};

InProcessExchange::InProcessExchange(int size) : state_(std::make_shared<State>(size)) {}

Exchange InProcessExchange::of_rank(int rank, device::Device& device, Duration timeout) {
  return [state = state_, rank, &device, timeout](std::string blob) {
    const std::shared_ptr<State::Round> round = state->begin(rank, std::move(blob));
    const OwnCondition complete(
        "the blobs of all ranks", [&] { return state->late(*round).empty(); },
        [&](const auto& ready, const Deadline& deadline) {
          while (!ready()) {
            const MutexLock lock(state->mutex);
            if (state->is_complete(*round) || !state->changed.wait_until(state->mutex, deadline)) return;
          }
        },
        [&] { return fmt::format("rank(s) {} have not come", state->late(*round)); });
    device.wait_host(complete, Deadline::after(timeout));
    std::vector<std::string> blobs;
    for (const auto& of_rank : *round) blobs.push_back(*of_rank);
    return blobs;
  };
}

}  // namespace tessera::collective
