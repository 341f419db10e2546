// The seam between the executor and whatever carries bytes. Every transport has its own folder with the same file
// names; those that a build leaves out are a no_<name>.cc that says how to get them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/process.h"
#include "memory/device.h"
#include "transport/byte_stream.h"
#include "transport/connection.h"
#include "transport/consent.h"

namespace tessera {

// Whose memory it is, and on which kind of device.
struct Endpoint {
  Incarnation process;
  std::string name;  // "trainer/3"
  DeviceKind device = DeviceKind::kHost;
};

// Memory of this process that a peer may be told of.
struct LocalMemory {
  const std::byte* data = nullptr;
  size_t bytes = 0;
  DeviceKind device = DeviceKind::kHost;
  bool packed = false;  // whoever owns it packs it into a stream, and nobody else reads it
};

// Stateless and immutable: thread-safe.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  virtual Capability capability() const = 0;
  // How well it moves bytes from `src` to `dst`: 0 if it cannot, otherwise the higher the better.
  virtual int score(const Endpoint& src, const Endpoint& dst) const = 0;
  // Reaches the memory of `peer` from this process. Throws kPeerLost if it is dead, kUnimplemented if unavailable.
  virtual std::unique_ptr<Connection> connect(const Endpoint& peer) const = 0;
  // Where memory of this process lies as this transport tells of it, and what a peer can do there.
  struct Located {
    uint64_t region = 0;  // a number of this process' own
    uint64_t offset = 0;  // RemoteRange::offset
    Caps caps;
  };
  virtual Located locate(const LocalMemory& memory) const = 0;
  // The key of the region that `memory` lies in, for a peer. Throws Error.
  virtual RemoteKey export_region(const LocalMemory& memory) const = 0;
  // Null: it has none.
  virtual const Streams* streams() const = 0;
  // What has to hold in a process while peers may get its private memory; null: nothing. Throws Error(kInvalidArgument)
  // for a setting that it does not know.
  virtual std::unique_ptr<Consent> consent() const = 0;
};

// The transports of this build, in a fixed order.
class TransportRegistry {
 public:
  static const TransportRegistry& builtin();

  std::span<const Transport* const> transports() const { return transports_; }
  const Transport* find(std::string_view name) const;  // null: there is none
  // The best for this pair. Throws Error(kUnimplemented) that says what each one lacks.
  const Transport& choose(const Endpoint& src, const Endpoint& dst) const;
  // The best that has streams. Likewise.
  const Transport& streaming(const Endpoint& src, const Endpoint& dst) const { return best(src, dst, true); }
  // A stream of that one. Throws Error(kResourceExhausted), too.
  Streams::Ends make_stream(const Endpoint& src, const Endpoint& dst) const;
  // Opens an end that came from `owner`, by the transport that it names. Throws Error(kInvalidArgument) if that has no
  // streams from `src` to `dst`, or the end is none of its.
  std::unique_ptr<ByteStream> open_stream(StreamEnd end, const Endpoint& src, const Endpoint& dst,
                                          std::string_view owner) const;
  // Of all transports.
  std::vector<std::unique_ptr<Consent>> consents() const;

  explicit TransportRegistry(std::vector<const Transport*> transports) : transports_(std::move(transports)) {}

 private:
  const Transport& best(const Endpoint& src, const Endpoint& dst, bool streams) const;

  std::vector<const Transport*> transports_;
};

// What TESSERA_FORCE_PULL says: kGet or kStream of memory that can be read both ways. Throws Error(kInvalidArgument)
// for what it does not know.
std::optional<Access> forced_access();

}  // namespace tessera
