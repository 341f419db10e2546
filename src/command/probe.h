// Arbitrary bytes as the memory of a command queue, read as both ends and an observer would: for fuzzing.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <span>

#include "base/fail.h"
#include "command/log.h"
#include "command/memory.h"

namespace tessera {

// A file of these bytes, sealed like those of command queues.
inline UniqueFd sealed_file(std::span<const std::byte> bytes) {
  UniqueFd fd(::memfd_create("tessera-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ::write(fd.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()) ||
      ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
    fail_errno("a file of bytes");
  return fd;
}

// The number of records that could be popped. Throws Error, and no other exception, if an end would refuse what it
// reads.
inline size_t probe_command_memory(std::span<const std::byte> bytes) {
  struct Nowhere final : ReplySink {
    void reply(uint64_t, const CommandOutcome&) override {}
  };
  const auto memory = CommandMemory::open(sealed_file(bytes), "a probe");
  const auto sink = std::make_shared<Nowhere>();
  CommandLog log(memory->incarnation());
  size_t popped = 0;
  Record record;
  RingState state = RingState::kReady;
  for (const CommandRing* ring : {&memory->commands(), &memory->replies()}) {
    for (const PendingRecord& pending : ring->pending())
      if (pending.age < Duration::zero()) fail_internal("a record of the future");
    if (ring->size() > ring->capacity()) fail_internal("{} records in a ring", ring->size());
    CommandConsumer consumer(*ring, Duration::zero());
    for (state = consumer.try_pop(record); state == RingState::kReady; state = consumer.try_pop(record)) {
      ++popped;
      if (ring == &memory->replies())
        read_outcome(record);
      else if (log.begin(record.head.id, sink))
        log.finish(record.head.id, {.status = {}, .result = {record.payload().begin(), record.payload().end()}});
    }
    if (state == RingState::kBroken) fail(ErrorCode::kDataLoss, "a ring is broken"_message);
    CommandProducer producer(*ring, Duration::zero());  // fills the ring, once more than it was emptied
    for (size_t pushed = 0; producer.try_push({.id = 1}, {}) == RingState::kReady;)
      if (++pushed > 2 * ring->capacity()) fail_internal("a ring without end");
    consumer.close();
  }
  return popped;
}

}  // namespace tessera
