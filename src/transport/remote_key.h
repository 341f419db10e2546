// How one process tells another where its memory is: the region, which has a key, and the range in it. Only the
// transport that wrote a key interprets it; all others pass it on. Values on the wire: reading one checks its form, and
// its user checks the rest (Connection).
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

// Permission to access a region of memory of the process that made it. Its descriptors travel beside it (SCM_RIGHTS): a
// key that has just been read has as many as it says, all empty until attach_fds().
struct RemoteKey {
  static constexpr uint32_t kMaxNameBytes = 32;
  static constexpr uint32_t kMaxBytes = 4096;
  static constexpr uint8_t kMaxFds = 8;

  std::string transport{};                // that wrote it and interprets it: "shm"
  DeviceKind device = DeviceKind::kHost;  // the region's device
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

// A range of bytes in a region. A process numbers its keys from 0 in the order in which it gives them.
struct RemoteRange {
  uint32_t key = 0;
  uint64_t offset = 0;  // in the transport's terms: from the region's first byte, or an address
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

// Takes the descriptors of all `keys` of a message, which travel beside it; the keys still say how many they have.
std::vector<UniqueFd> detach_fds(std::span<RemoteKey> keys);
// The reverse. Throws Error(kMismatch) unless there are as many as the keys say.
void attach_fds(std::span<RemoteKey> keys, std::vector<UniqueFd> fds);
// Splits keys into parts that fit into one message each (kMaxFdsPerMessage), in order; at least one part, which may be
// empty.
std::vector<std::vector<RemoteKey>> split_by_fds(std::vector<RemoteKey> keys);

}  // namespace tessera
