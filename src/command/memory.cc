#include "command/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <utility>

#include "base/fail.h"
#include "base/process.h"
#include "memory/host/memory_limit.h"

namespace tessera {
namespace {

constexpr uint32_t kMagic = 0x51435354;  // "TSCQ"
constexpr uint16_t kQueueVersion = 1;
constexpr size_t kCommandsAt = 256;
constexpr size_t kRepliesAt = 512;
constexpr size_t kSlotsAt = 4096;
constexpr Duration kSpin = std::chrono::microseconds(50);

// At the start of the memory. Written before the descriptor is passed on, read once.
struct FileHeader {
  uint32_t magic = kMagic;
  uint16_t version = kQueueVersion;
  uint16_t record_bytes = kRecordBytes;
  uint64_t incarnation = 0;
  uint32_t command_slots = 0;
  uint32_t reply_slots = 0;
};
static_assert(sizeof(FileHeader) == 24 && sizeof(FileHeader) <= kCommandsAt);
static_assert(offsetof(RingSide<ProcessSync>, closed) == 8 && offsetof(RingSide<ProcessSync>, asleep) == 64);
static_assert(sizeof(RingHeader<ProcessSync>) == kRepliesAt - kCommandsAt && kRepliesAt * 2 <= kSlotsAt);
static_assert(sizeof(RingSlot<ProcessSync>) == kRecordBytes && std::atomic<uint64_t>::is_always_lock_free);

constexpr size_t bytes_of(uint64_t slots) {
  return kSlotsAt + slots * kRecordBytes;
}

std::span<std::byte> map(int fd, size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) fail_errno("command queue: mmap");
  return {static_cast<std::byte*>(data), bytes};
}

bool within_limits(uint32_t slots) {
  return slots >= 1 && slots <= CommandMemory::kMaxSlots;
}

}  // namespace

Duration command_spin() {
  return usable_cpus() >= 2 ? kSpin : Duration::zero();
}

CommandMemory::~CommandMemory() {
  ::munmap(data_.data(), data_.size());
}

void CommandMemory::find_rings(uint64_t incarnation, Slots slots) {
  incarnation_ = incarnation;
  const auto ring = [&](size_t header_at, size_t slots_at, size_t count) {
    return CommandRing{
        .header = std::launder(reinterpret_cast<RingHeader<ProcessSync>*>(data_.data() + header_at)),
        .slots = {std::launder(reinterpret_cast<RingSlot<ProcessSync>*>(data_.data() + slots_at)), count}};
  };
  commands_ = ring(kCommandsAt, kSlotsAt, slots.commands);
  replies_ = ring(kRepliesAt, bytes_of(slots.commands), slots.replies);
}

std::shared_ptr<CommandMemory> CommandMemory::create(uint64_t incarnation, Slots slots) {
  TESSERA_CHECK(within_limits(slots.commands) && within_limits(slots.replies));
  const size_t bytes = bytes_of(uint64_t{slots.commands} + slots.replies);
  require_memory(bytes, "command queue");
  UniqueFd fd(::memfd_create("tessera-commands", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail_errno("command queue: memfd_create");
  if (::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0) fail_errno("command queue: fallocate");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    fail_errno("command queue: sealing");
  const auto data = map(fd.get(), bytes);
  const FileHeader header{.incarnation = incarnation, .command_slots = slots.commands, .reply_slots = slots.replies};
  std::memcpy(data.data(), &header, sizeof header);
  std::shared_ptr<CommandMemory> memory(new CommandMemory(std::move(fd), data));
  memory->find_rings(incarnation, slots);
  return memory;
}

std::shared_ptr<CommandMemory> CommandMemory::open(UniqueFd fd, std::string_view owner) {
  // Reads the seal before the size: once the seal is there, the size cannot change.
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    fail(ErrorCode::kInvalidArgument, "command queue of {}: the descriptor is not sealed against shrinking"_message,
         owner);
  struct stat file{};
  if (::fstat(fd.get(), &file) != 0) fail_errno(fmt::format("command queue of {}: fstat", owner));
  const auto bytes = static_cast<uint64_t>(file.st_size);
  if (bytes < bytes_of(2) || bytes > bytes_of(2 * uint64_t{kMaxSlots}))
    fail(ErrorCode::kInvalidArgument, "command queue of {}: {} bytes, where {} to {} are possible"_message, owner,
         bytes, bytes_of(2), bytes_of(2 * uint64_t{kMaxSlots}));

  const std::shared_ptr<CommandMemory> memory(new CommandMemory({}, map(fd.get(), bytes)));
  FileHeader header;
  std::memcpy(&header, memory->data_.data(), sizeof header);
  if (header.magic != kMagic)
    fail(ErrorCode::kInvalidArgument, "command queue of {}: magic {:#010x} instead of {:#010x}"_message, owner,
         header.magic, kMagic);
  if (header.version != kQueueVersion)
    fail(ErrorCode::kMismatch, "command queue of {}: version {} of the format, this release speaks only {}"_message,
         owner, header.version, kQueueVersion);
  if (header.record_bytes != kRecordBytes || !within_limits(header.command_slots) ||
      !within_limits(header.reply_slots) || bytes != bytes_of(uint64_t{header.command_slots} + header.reply_slots))
    fail(ErrorCode::kInvalidArgument, "command queue of {}: {} and {} slots of {} bytes do not make {} bytes"_message,
         owner, header.command_slots, header.reply_slots, header.record_bytes, bytes);
  memory->find_rings(header.incarnation, {.commands = header.command_slots, .replies = header.reply_slots});
  return memory;
}

}  // namespace tessera
