// Access to one peer's memory. Made by a Transport (transport.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "base/fd.h"
#include "tessera/error.h"
#include "transport/remote_key.h"

namespace tessera {

// How a peer's memory is read.
enum class Access : uint8_t {
  kMap,     // by ordinary loads
  kGet,     // by Connection::get()
  kStream,  // the peer packs them into a ByteStream
};
std::string_view to_string(Access access);  // "map", "get", "stream"

// A set of Access values. A value.
class Caps {
 public:
  constexpr Caps() = default;
  constexpr Caps(std::initializer_list<Access> of) {
    for (const Access access : of) bits_ |= bit(access);
  }
  constexpr bool has(Access access) const { return (bits_ & bit(access)) != 0; }
  constexpr Caps without(Access access) const {
    Caps caps = *this;
    caps.bits_ &= static_cast<uint8_t>(~bit(access));
    return caps;
  }
  constexpr Caps with(Caps others) const {
    others.bits_ |= bits_;
    return others;
  }
  bool operator==(const Caps&) const = default;

 private:
  static constexpr uint8_t bit(Access access) { return static_cast<uint8_t>(1u << static_cast<unsigned>(access)); }
  uint8_t bits_ = 0;
};

// A run of bytes in one of the peer's regions; offsets are those of its RemoteRanges.
struct Piece {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// A range of the peer's memory, as a connection can access it.
struct RemoteRegion {
  Caps caps;
  const std::byte* mapped = nullptr;  // kMap: its first byte, as long as the connection lives
  // kGet. Ranges with one key may be read in one get().
  uint32_t key = 0;
  uint64_t offset = 0;  // of the range's first byte

  // Prefers map to get, and get to stream.
  Access best() const {
    return caps.has(Access::kMap) ? Access::kMap : caps.has(Access::kGet) ? Access::kGet : Access::kStream;
  }
};

// CPU time of both sides together: proportional to the bytes, and to the number of contiguous runs at the source.
struct PathCost {
  double byte = 0;   // seconds per byte
  double piece = 0;  // seconds per piece
  double seconds(int64_t bytes, int64_t pieces) const {
    return byte * static_cast<double>(bytes) + piece * static_cast<double>(pieces);
  }
};

// The cheaper one, kGet or kStream. The stream has to win clearly, since it takes the peer's time, too.
Access cheaper_access(const PathCost& get, const PathCost& stream, int64_t bytes, int64_t pieces);

// Thread-safe, except add_key().
class Connection {
 public:
  virtual ~Connection() = default;

  virtual const std::string& name() const = 0;  // "trainer/3", for messages

  // All ways of access that some region has.
  virtual Caps caps() const = 0;
  // Why it may not get private memory, which it otherwise could; ok: it never can. REQUIRES: caps() is without kGet
  virtual Status get_refused() const = 0;
  // The cost of kGet and kStream where both are possible.
  virtual PathCost cost(Access access) const = 0;

  // Makes one of the peer's regions accessible: its ranges refer to it as `index`. Throws Error(kInvalidArgument) if
  // another key has that index, or if the key is not valid for its transport. Call it before any other thread uses this
  // object.
  virtual void add_key(uint32_t index, RemoteKey key) = 0;

  // Throws Error(kInvalidArgument) if there is no such key, or the range is not within its region.
  virtual RemoteRegion region(const RemoteRange& range) const = 0;

  // One-sided get: gathers the bytes of all `pieces`, in order, into all of `out`, in order. Never throws. REQUIRES:
  // both have the same total size; pieces lie within ranges of that key that have kGet. Fails with kPeerLost if the
  // peer died, kPermissionDenied if its memory may not be read.
  virtual Status get(uint32_t key, std::span<const Piece> pieces, std::span<const std::span<std::byte>> out) const = 0;
};

}  // namespace tessera
