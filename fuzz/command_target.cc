#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "base/message.h"
#include "command/memory.h"
#include "fuzz/agent_messages.h"
#include "fuzz/targets.h"

namespace tessera::fuzz {
namespace {

constexpr size_t kSlotsAt = 4096;  // docs/formats/command-ring.md
constexpr uint32_t kFewSlots = 4;

// A memfd whose first bytes a peer wrote, and whose size they determine.
void open_queue(ByteReader& in) {
  const bool sealed = in.get<uint8_t>() % 2 == 0;
  const size_t slots = in.get<uint8_t>() % 16;
  const std::span<const std::byte> head = in.rest();
  UniqueFd fd(::memfd_create("commands", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  TESSERA_CHECK(::ftruncate(fd.get(), static_cast<off_t>(kSlotsAt + slots * kRecordBytes)) == 0);
  TESSERA_CHECK(::pwrite(fd.get(), head.data(), std::min(head.size(), kSlotsAt), 0) >= 0);
  if (sealed) TESSERA_CHECK(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
  const auto memory = CommandMemory::open(std::move(fd), "a/0");
  TESSERA_CHECK_EQ(memory->commands().capacity() + memory->replies().capacity(), slots);
  TESSERA_CHECK_LE(memory->commands().pending().size(), memory->commands().capacity());
  TESSERA_CHECK_LE(memory->replies().pending().size(), memory->replies().capacity());
}

// The peer writes anything anywhere between any two of our steps.
void disturb_queue(ByteReader& in) {
  struct Shared {
    std::shared_ptr<CommandMemory> memory = CommandMemory::create(1, {.commands = kFewSlots, .replies = kFewSlots});
    size_t bytes = kSlotsAt + 2 * kFewSlots * kRecordBytes;
    std::byte* data =
        static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd(), 0));
  };
  static const Shared shared;
  TESSERA_CHECK(shared.data != MAP_FAILED);
  constexpr size_t kRingsAt = 256;  // after the header, which is read only once, when the queue is opened
  std::fill(shared.data + kRingsAt, shared.data + shared.bytes, std::byte{0});
  CommandProducer producer(shared.memory->commands(), Duration::zero());
  CommandConsumer consumer(shared.memory->replies(), Duration::zero());
  Record record;
  for (uint64_t id = 1; in.left() > 0; ++id) {
    const size_t at = kRingsAt + in.get<uint16_t>() % (shared.bytes - kRingsAt - sizeof(uint64_t));
    const auto value = in.get<uint64_t>();
    std::memcpy(shared.data + at, &value, sizeof(value));
    producer.try_push({.incarnation = 1, .id = id, .type = 7}, std::as_bytes(std::span(&id, 1)));
    if (consumer.try_pop(record) == RingState::kReady) TESSERA_CHECK_LE(record.payload().size(), kMaxRecordPayload);
    for (const CommandRing& ring : {shared.memory->commands(), shared.memory->replies()}) {
      TESSERA_CHECK_LE(ring.size(), ring.capacity());
      TESSERA_CHECK_LE(ring.pending().size(), ring.capacity());
    }
  }
}

}  // namespace

bool command(Input input) {
  return accepts([&] {
    ByteReader in(input, "input");
    switch (in.get<char>()) {
      case 'o':
        return open_queue(in);
      case 'r':
        return disturb_queue(in);
      case 'f':
        return read_agent_frames(in.rest());
      case 'c':
        return read_agent_command(in);
      default:
        fail(ErrorCode::kInvalidArgument, "no such kind"_message);
    }
  });
}

}  // namespace tessera::fuzz
