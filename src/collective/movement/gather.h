// Gathers: a weight's rows, read out of the ranks' published memory into one matrix, and decoded on the way.
//
// One operation for each owner of rows: this rank first, then r + 1, r + 2, ... It waits until that owner has published
// exactly the version wanted of every part and then reads its rows once and writes them once; nothing is staged. Nobody
// else takes part. Owners without rows cost nothing. `together`: one operation for all owners, which begins once all of
// them have published; for a few KiB, which take no longer than an operation does.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "collective/group.h"
#include "device/stream.h"
#include "tessera/quantize.h"

namespace tessera::collective {

// The rows of one owner and where it publishes them: pointers from Group::map(), this rank's own for itself.
struct PublishedRows {
  int64_t begin = 0;  // in the whole matrix
  int64_t count = 0;
  const std::byte* data = nullptr;  // plain: [count, columns], contiguous
  ConstPlaneMemory plane{};         // quantised: the plane of the owner's rows as a [count, columns] matrix
};

// How a weight is published. Immutable; shared by all gathers of it.
struct PublishedWeight {
  int64_t rows = 0;  // of the whole matrix; those of `owners` cover them once, in rank order
  int64_t columns = 0;
  DType dtype = DType::kF32;        // plain rows: f32, f16 or bf16; any dtype if it is also the destination's
  std::optional<QuantSpec> spec{};  // set: quantised
  Plane plane = Plane::kRow;
  const float* amax = nullptr;        // of formats that need one: read when the operation runs
  std::vector<PublishedRows> owners;  // one for each rank of the group
};
// Throws Error(kInvalidArgument), naming `weight`, unless all of that is so.
void check_published(const PublishedWeight& published, int ranks, std::string_view weight);

struct GatherPart {
  uint32_t slot = 0;
  uint64_t version = 0;
  const uint64_t* version_now = nullptr;  // of an operation that is replayed: read when it runs, instead of `version`
  std::shared_ptr<const PublishedWeight> from;
  MatrixMemory to;          // [rows, columns]
  std::string_view weight;  // its name, for messages and the trace; outlives the operation
};

// Whether the owner has published exactly the version wanted. Throws Error(kMismatch) if it has published a newer one.
bool is_published(const Group& group, int owner, const GatherPart& part);

// Enqueues on `stream`; does not block. The parts' memory must live until the operations have run, which an event
// recorded afterwards tells. Errors of the operations, which poison the stream: a newer version than wanted is
// published (kMismatch), the group failed. Plain rows are cast where the dtypes differ.
void gather(Group& group, device::Stream& stream, std::span<const GatherPart> parts, bool together = false);
void gather(Group& group, device::Stream& stream, std::vector<GatherPart>&& parts, bool together = false);

// The same operations, to be enqueued many times, each time in this order.
std::vector<std::shared_ptr<const device::Operation>> gather_operations(Group& group, std::span<const GatherPart> parts,
                                                                        bool together = false);

}  // namespace tessera::collective
