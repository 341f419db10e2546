// How the ranks of a group find each other: one function that exchanges a blob with all of them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "base/clock.h"
#include "device/device.h"

namespace tessera {
class Store;
}

namespace tessera::collective {

// Every rank calls it with its own blob and gets those of all ranks, in rank order. It blocks until all have called it
// and throws Error where one does not in time. Group::form() calls it once. A torch ProcessGroup's all_gather_object,
// an MPI_Allgather or any other collective will do.
using Exchange = std::function<std::vector<std::string>(std::string blob)>;

// The largest blob that Group::form() gives to an Exchange, and that it takes from one.
inline constexpr size_t kMaxBootstrapBytes = size_t{4} << 10;

// Over a store: rank r puts "PREFIX/<n>/r" at its n-th call and waits for the others' keys. The prefix must be fresh
// for each life of the group (a job's restart is another life): keys are put under a lease and vanish with the store's
// client. `store` must outlive the result. Errors: kDeadlineExceeded, which lists the missing ranks, kCancelled once
// `stop` is requested while it waits for the others, and the store's.
Exchange store_exchange(Store& store, std::string prefix, int rank, int size, Duration timeout,
                        std::stop_token stop = {});

// Among ranks of one process, each on a thread or a fiber of its own. Thread-safe.
class InProcessExchange {
 public:
  explicit InProcessExchange(int size);
  // The rank's. It waits through `device`, so that ranks that are fibers can take turns; `device` must outlive it.
  // Errors: kDeadlineExceeded, which lists the missing ranks.
  Exchange of_rank(int rank, device::Device& device, Duration timeout);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera::collective
