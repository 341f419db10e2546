// The implementations behind Bus, Pair, Batch and Handle: the same calls, whether the agent is embedded in this process
// (embedded.h) or a daemon (daemon/client.h). Semantics, errors and thread-safety are those of tessera/bus.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "tessera/bus.h"

namespace tessera::bus {

class OperationClient {
 public:
  virtual ~OperationClient() = default;
  virtual int64_t wait() = 0;
  virtual bool wait_for(Timeout timeout, std::stop_token stop) = 0;
  virtual bool done() const = 0;
  virtual bool cancel() = 0;
  virtual bool withdraw() = 0;
  virtual Progress progress() const = 0;
  virtual int64_t version() const = 0;
};

class BatchClient {
 public:
  virtual ~BatchClient() = default;
  virtual std::shared_ptr<OperationClient> send(std::optional<int64_t> version, Timeout timeout) = 0;
  virtual std::shared_ptr<OperationClient> recv(std::optional<int64_t> min_version, Timeout timeout) = 0;
  virtual std::shared_ptr<OperationClient> stage(std::optional<int64_t> min_version, Timeout timeout) = 0;
  virtual int64_t commit() = 0;
  virtual void relocate(std::span<const TensorSpec> tensors) = 0;
  virtual int64_t version() const = 0;
  virtual int64_t newest() const = 0;
  virtual int64_t wait_version(int64_t version, Timeout timeout) = 0;
  virtual std::vector<BatchPeer> peers() const = 0;
  virtual void wait_peers(int jobs, int64_t version, Timeout timeout) = 0;
  virtual bool torn() const = 0;
  virtual bool undecided() const = 0;
  virtual BatchStats stats() const = 0;
  virtual std::vector<TensorDigest> digests() const = 0;
  virtual Untaken close(std::optional<Timeout> linger) = 0;
  // False in a forked child, where no other call may be made.
  virtual bool in_own_process() const = 0;
};

class BusClient;

class PairClient {
 public:
  virtual ~PairClient() = default;
  virtual const BusClient* bus() const = 0;
  virtual const std::string& name() const = 0;
  virtual std::string peer_job() const = 0;  // "engine0+engine1" for several
  virtual const Layout& layout() const = 0;  // for tensors without one
  virtual int peer_world() const = 0;
  virtual uint64_t membership() const = 0;
  virtual std::vector<ManifestEntry> manifest(const std::string& batch, Timeout timeout, std::stop_token stop) = 0;
  virtual std::vector<std::string> all_gather(const std::string& batch, const std::string& value, Timeout timeout,
                                              std::stop_token stop) = 0;
  virtual void give_up(const std::string& batch, const Status& why) = 0;
  virtual std::shared_ptr<BatchClient> register_batch(const std::string& id, std::span<const TensorSpec> tensors,
                                                      bool sends, Timeout timeout, const BatchOptions& options) = 0;
  virtual bool in_own_process() const = 0;
};

class BusClient {
 public:
  virtual ~BusClient() = default;
  virtual const BusOptions& options() const = 0;  // completed from the environment
  // Throws kInvalidArgument in a forked child.
  virtual void require_own_process() const = 0;
  virtual bool in_own_process() const = 0;
  virtual bool alive() const = 0;
  virtual void interrupt() = 0;
  virtual std::shared_ptr<PairClient> pair(const PairOptions& options) = 0;
};

inline constexpr const char* kEmbeddedAgent = "embedded";
inline constexpr const char* kDaemonAgent = "daemon";

// Options completed from the environment. Throws kInvalidArgument for invalid ones.
BusOptions complete(BusOptions options);
// With everything that has a default. Throws kInvalidArgument for invalid ones.
BatchOptions complete(BatchOptions options, const std::string& batch, Timeout timeout);
// Throws kInvalidArgument unless the bus can have such a pair.
void check(const BusOptions& bus, const PairOptions& pair);

}  // namespace tessera::bus
