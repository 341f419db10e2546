// Reads of what a group's ranks have in their memory, private memory included: one-sided, by whoever wants it. How
// ranks learn the places is up to them (Group::exchange()).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collective/group.h"
#include "exec/worker_pool.h"
#include "transport/connection.h"
#include "transport/consent.h"

namespace tessera::collective {

// MemoryRef::arena of private memory: the offset is an address then.
inline constexpr uint32_t kPrivateMemory = UINT32_MAX;

// A stretch of a rank's memory, and where its bytes go.
struct MemoryRead {
  int rank = 0;
  MemoryRef from;  // MemoryReader::refer() of that rank gave it, or a part of it
  std::byte* to = nullptr;
};

// Thread-safe.
class MemoryReader {
 public:
  // Collective. Private memory may be read as long as the readers of both sides live. At most `threads` copy in a
  // read(); 0: usable CPUs divided by the ranks.
  explicit MemoryReader(std::shared_ptr<Group> group, int threads = 0);
  ~MemoryReader();
  MemoryReader(const MemoryReader&) = delete;
  MemoryReader& operator=(const MemoryReader&) = delete;

  // Why some rank may not read another's private memory (Yama, or TESSERA_FORCE_PULL=stream); empty if all may. The
  // same on all ranks.
  const std::string& refused() const { return refused_; }

  // Of this rank's memory, for peers, which may read it while it is as they were told. If refused(), it must lie in one
  // block of SharedHeap::process(), or it throws kInvalidArgument.
  MemoryRef refer(const void* data, size_t bytes) const;

  // Copies all of it; blocks. A later call of this thread reads nothing that is older than what this one has read.
  // Throws kPeerLost if a rank has died, or has no memory there any more: part of it may have been written then.
  void read(std::span<const MemoryRead> reads);

 private:
  struct Told;
  void connect(const Told& own, const std::vector<std::string>& blobs);
  Status copy(std::span<const MemoryRead> reads) const;

  const std::shared_ptr<Group> group_;
  std::vector<std::unique_ptr<Consent>> consents_;
  std::vector<std::unique_ptr<Connection>> ranks_;
  std::string refused_;
  std::unique_ptr<WorkerPool> pool_;  // null: only the caller copies
};

}  // namespace tessera::collective
