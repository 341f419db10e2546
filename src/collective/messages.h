// What ranks tell each other besides words: the blob of the bootstrap, and frames between their service threads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/fields.h"
#include "base/process.h"
#include "base/socket.h"
#include "collective/shared/page.h"

namespace tessera::collective {

inline constexpr uint32_t kBootstrapMagic = 0x50545354;  // "TSTP"
inline constexpr uint16_t kBootstrapVersion = 1;
inline constexpr uint32_t kMaxNameBytes = 128;

// Who a rank is and how it is reached. Every rank sees every blob.
struct Bootstrap {
  uint32_t magic = kBootstrapMagic;
  uint16_t version = kBootstrapVersion;
  uint32_t rank = 0;
  uint32_t size = 0;
  uint32_t slots = 0;
  std::string name{};
  std::string host{};  // for messages
  bool in_process = false;
  Incarnation process{};
  int32_t recorder = 0;  // the rank that its recorder names
  uint64_t key = 0;      // drawn for this rank of this group; in process, its pages are found by it
  std::string socket{};  // path; empty in process

  static void fields(auto& f, auto& self) {
    f("magic", self.magic);
    f("version", self.version);
    f.require(ErrorCode::kMismatch, self.magic == kBootstrapMagic && self.version == kBootstrapVersion,
              "{}: magic {:x} version {}, not {:x} version {}: run the same release on all ranks"_message, f.what(),
              self.magic, self.version, kBootstrapMagic, kBootstrapVersion);
    f("rank", self.rank);
    f("size", self.size);
    f("slots", self.slots);
    f("name", self.name, kMaxNameBytes);
    f("host", self.host, kMaxNameBytes);
    f("in_process", self.in_process);
    f("process", self.process);
    f("recorder", self.recorder);
    f("key", self.key);
    f("socket", self.socket, uint32_t{SocketAddress::kMaxPathBytes});
    f.require(self.size >= 1 && self.size <= kMaxRanks && self.rank < self.size, "{}: rank {} of {}"_message, f.what(),
              self.rank, self.size);
    f.require(self.slots >= 1 && self.slots <= kMaxSlots, "{}: {} slots"_message, f.what(), self.slots);
  }
  bool operator==(const Bootstrap&) const = default;
};

// Frames between service threads -------------------------------------------------------------------------------------

inline constexpr uint32_t kServiceMagic = 0x47545354;  // "TSTG"
inline constexpr uint16_t kServiceVersion = 1;
inline constexpr uint32_t kMaxServiceBytes = 1024;
inline constexpr uint16_t kMaxServiceFds = 2;

enum class ServiceType : uint16_t { kHello, kAskArena, kArena };

// The first frame of both ends; with the descriptor of the page and, from rank 0, that of the bell page.
struct GroupHello {
  static constexpr ServiceType kType = ServiceType::kHello;
  uint32_t rank = 0;
  uint64_t key = 0;     // the sender's
  uint64_t callee = 0;  // the key of whom it calls
  static void fields(auto& f, auto& self) {
    f("rank", self.rank);
    f("key", self.key);
    f("callee", self.callee);
  }
  bool operator==(const GroupHello&) const = default;
};

struct AskArena {
  static constexpr ServiceType kType = ServiceType::kAskArena;
  uint32_t arena = 0;
  static void fields(auto& f, auto& self) { f("arena", self.arena); }
  bool operator==(const AskArena&) const = default;
};

// With the arena's descriptor, unless `bytes` is 0: then there is none of that number (any more).
struct ArenaAnswer {
  static constexpr ServiceType kType = ServiceType::kArena;
  uint32_t arena = 0;
  uint64_t bytes = 0;
  static void fields(auto& f, auto& self) {
    f("arena", self.arena);
    f("bytes", self.bytes);
  }
  bool operator==(const ArenaAnswer&) const = default;
};

}  // namespace tessera::collective
