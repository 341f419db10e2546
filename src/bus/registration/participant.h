// A rank on the bus: its connection to the store, its agent and its claim on (job, rank). A process has one for a rank,
// however many Bus it makes of it.
#pragma once

#include <memory>
#include <optional>

#include "base/observation.h"
#include "base/process.h"
#include "bus/registration/batch_exchange.h"
#include "bus/registration/rendezvous.h"
#include "peer/agent.h"
#include "tessera/bus.h"
#include "tessera/store.h"

namespace tessera::bus {

// Thread-safe, as its parts are.
class Participant {
 public:
  // Connects to the store and claims the rank, for that `worker` if it is another process. `options` are complete().
  Participant(const BusOptions& options, std::optional<Incarnation> worker);
  Participant(const Participant&) = delete;
  Participant& operator=(const Participant&) = delete;

  // That of this process for (store, namespace, job, rank): the one there is, or a new one, which lives until the last
  // that was given it lets go of it. Where another thread is making it, or the last one is just going, it waits for
  // that, as `options` say. Throws kInvalidArgument where the one there is has another world or other threads. A forked
  // child has none of its parent's.
  static std::shared_ptr<Participant> of_process(const BusOptions& options);

  Store& store() { return *store_; }
  Agent& agent() { return *agent_; }
  Rendezvous& rendezvous() { return *rendezvous_; }
  BatchExchanges& exchanges() { return *exchanges_; }

 private:
  const std::shared_ptr<Observation> observation_ = Observation::start();
  // In this order: the rendezvous uses the store, nobody uses the rendezvous when it goes.
  std::unique_ptr<Store> store_;
  std::unique_ptr<Agent> agent_;
  std::unique_ptr<Rendezvous> rendezvous_;
  std::unique_ptr<BatchExchanges> exchanges_;
};

}  // namespace tessera::bus
