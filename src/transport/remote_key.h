// How one process tells another where its memory lies: in which of its regions, which has a key, and where in that.
// What a key says is the affair of the transport that wrote it; all others pass it on. Values that go over the wire:
// reading one checks its form, and whoever uses it checks the rest (Connection).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/fields.h"
#include "base/message.h"
#include "memory/device.h"

namespace tessera {

// Leave to reach a region of the memory of the process that made it. Its descriptors travel beside it (SCM_RIGHTS): of
// one that was just read there are as many as it says, and all are empty until attach_fds().
struct RemoteKey {
  static constexpr uint32_t kMaxNameBytes = 32;
  static constexpr uint32_t kMaxBytes = 4096;
  static constexpr uint8_t kMaxFds = 8;

  std::string transport{};                // that wrote it, and reads it: "shm"
  DeviceKind device = DeviceKind::kHost;  // that the region lies on
  std::vector<std::byte> bytes{};
  std::vector<UniqueFd> fds{};

  RemoteKey duplicate() const;
  static void fields(auto& f, auto& self) {
    f("transport", self.transport, kMaxNameBytes);
    f("device", self.device, DeviceKind::kCuda);
    f.array("bytes", self.bytes, kMaxBytes);
    auto count = static_cast<uint8_t>(self.fds.size());
    f("fds", count);
    f.require(count <= kMaxFds, "key: {} descriptors, at most {}"_message, count, kMaxFds);
    if constexpr (kFills<decltype(f)>) self.fds.resize(count);
  }
};

// A range of bytes in a region. Keys are numbered by the process that gives them, from 0 in the order in which it does.
struct RemoteRange {
  uint32_t key = 0;
  uint64_t offset = 0;  // as the transport counts: from the region's first byte, or an address
  uint64_t bytes = 0;

  bool operator==(const RemoteRange&) const = default;
  static void fields(auto& f, auto& self) {
    f("key", self.key);
    f("offset", self.offset);
    f("bytes", self.bytes);
    f.require(self.bytes <= uint64_t{INT64_MAX} && self.offset <= uint64_t{INT64_MAX} - self.bytes,
              "memory: {} bytes at {:#x} wrap around"_message, self.bytes, self.offset);
  }
};

// The descriptors of all `keys` of a message, as they go beside it; the keys still say how many they have.
std::vector<UniqueFd> detach_fds(std::span<RemoteKey> keys);
// The other way round. Throws Error(kMismatch) unless there are as many as the keys say.
void attach_fds(std::span<RemoteKey> keys, std::vector<UniqueFd> fds);
// In parts that a message each can carry (kMaxFdsPerMessage), in order; at least one, which may be empty.
std::vector<std::vector<RemoteKey>> split_by_fds(std::vector<RemoteKey> keys);

}  // namespace tessera
