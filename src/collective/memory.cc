// Memory of a group's ranks, and the gradients that they show in it.
#include "tessera/memory.h"
#include "base/fail.h"
#include "collective/conditions.h"
#include "collective/group_impl.h"
#include "memory/host/shared_arena.h"

namespace tessera::collective {
namespace {

// Within a process memory is named by its address.
MemoryRef address_of(const void* data, size_t bytes) {
  return {.arena = 0, .offset = reinterpret_cast<uintptr_t>(data), .bytes = bytes};
}

}  // namespace

MemoryRef Group::refer(const void* data, size_t bytes) const {
  impl_->require_usable();
  const auto place = SharedHeap::process().locate(data, bytes);
  if (place && impl_->arenas.show(place->arena))
    impl_->note_arena(impl_->options.in_process ? 0 : rank(), place->arena->id(), place->arena->data(),
                      place->arena->bytes());
  if (impl_->alone_in_process()) return address_of(data, bytes);
  if (!place)
    tessera::fail(ErrorCode::kInvalidArgument,
                  "group '{}': {} bytes that peers are to read do not lie in one block of shared memory: allocate them "
                  "as BufferKind::kShared"_message,
                  name(), bytes);
  return {.arena = place->arena->id(), .offset = place->offset, .bytes = bytes};
}

const std::byte* Group::map(int rank, const MemoryRef& ref) {
  impl_->require_usable();
  impl_->check_rank(rank);
  if (impl_->alone_in_process()) {
    const auto* const data = reinterpret_cast<const std::byte*>(static_cast<uintptr_t>(ref.offset));
    if (device().recorder().on()) impl_->note_shared(data, ref.bytes);
    return data;
  }
  if (rank != impl_->options.rank) return impl_->map_arena(rank, ref);
  const auto arena = impl_->arenas.shown(ref.arena);
  if (arena == nullptr || ref.offset > arena->bytes() || ref.bytes > arena->bytes() - ref.offset)
    tessera::fail(ErrorCode::kInvalidArgument,
                  "group '{}': this rank has shown no arena {} with {} bytes at {}"_message, name(), ref.arena,
                  ref.bytes, ref.offset);
  return arena->data() + ref.offset;
}

void Group::Impl::note_arena(int owner, uint32_t arena, const std::byte* data, uint64_t bytes) {
  options.device->recorder().add_region(data, bytes, {ranks[static_cast<size_t>(owner)].recorder, arena},
                                        fmt::format("arena {} of rank {}", arena, owner));
}

void Group::Impl::note_shared(const std::byte* data, size_t bytes) {
  if (const auto place = SharedHeap::process().locate(data, bytes))
    note_arena(0, place->arena->id(), place->arena->data(), place->arena->bytes());
}

// Within an operation, too: its own thread waits.
void Group::Impl::await_or_fail(const device::Condition& condition) {
  try {
    device::await(condition, Deadline::after(options.timeout));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDeadlineExceeded) fail({error.code(), error.what()});
    throw;
  }
}

const std::byte* Group::Impl::map_arena(int rank, const MemoryRef& ref) {
  const MappedArena* arena = arenas.find(rank, ref.arena);
  if (arena == nullptr) {
    if (arenas.want(rank, ref.arena)) service->ask(rank, ref.arena);
    const OwnCondition answered(
        fmt::format("arena {} of rank {}", ref.arena, rank),
        [&] {
          look();
          require_usable();
          return arenas.find(rank, ref.arena) != nullptr || arenas.refused(rank, ref.arena);
        },
        [this](const auto& ready, const Deadline& until) { service->sleep_until(ready, until); },
        [&] { return describe_state(rank); });
    await_or_fail(answered);
    arena = arenas.find(rank, ref.arena);
    if (arena == nullptr)
      fail_for(rank,
               failed(ErrorCode::kDataLoss, "it names its arena {}, and has none of that number"_message, ref.arena));
    note_arena(rank, ref.arena, arena->data(), arena->bytes());
  }
  if (ref.offset > arena->bytes() || ref.bytes > arena->bytes() - ref.offset)
    fail_for(rank, failed(ErrorCode::kDataLoss, "it names {} bytes at {} of its arena {}, which has {}"_message,
                          ref.bytes, ref.offset, ref.arena, arena->bytes()));
  return arena->data() + ref.offset;
}

void Group::set_gradient(uint32_t slot, uint64_t interval, uint64_t round, const ShownGradient& gradient) {
  impl_->require_usable();
  const Page& own = *impl_->own_page;
  if (slot >= own.slots() || interval > kMaxIntervals || round >= kMaxRounds)
    tessera::fail(ErrorCode::kInvalidArgument, "group '{}': no gradient of slot {}, interval {}, round {}"_message,
                  name(), slot, interval, round);
  GradientEntry& entry = own.gradient(slot, round);
  entry.arena.store(gradient.memory.arena, std::memory_order_relaxed);
  entry.dtype.store(static_cast<uint32_t>(gradient.dtype), std::memory_order_relaxed);
  entry.offset.store(gradient.memory.offset, std::memory_order_relaxed);
  entry.bytes.store(gradient.memory.bytes, std::memory_order_relaxed);
  entry.key.store(round_word(interval, round + 1), std::memory_order_release);
}

std::optional<ShownGradient> Group::gradient(int rank, uint32_t slot, uint64_t interval, uint64_t round) const {
  impl_->require_open();
  impl_->check_rank(rank);
  const Page& page = impl_->page(rank);
  if (slot >= page.slots() || round >= kMaxRounds) return {};
  const GradientEntry& entry = page.gradient(slot, round);
  if (entry.key.load(std::memory_order_acquire) != round_word(interval, round + 1)) return {};
  ShownGradient shown{.memory = {.arena = entry.arena.load(std::memory_order_relaxed),
                                 .offset = entry.offset.load(std::memory_order_relaxed),
                                 .bytes = entry.bytes.load(std::memory_order_relaxed)}};
  const uint32_t dtype = entry.dtype.load(std::memory_order_relaxed);
  if (dtype > static_cast<uint32_t>(DType::kC64))
    impl_->fail_for(rank, failed(ErrorCode::kDataLoss, "its gradient of slot {} is of dtype {}"_message, slot, dtype));
  shown.dtype = static_cast<DType>(dtype);
  return shown;
}

}  // namespace tessera::collective
