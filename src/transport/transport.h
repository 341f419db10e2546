// The interface between the executor and what moves the data. Every transport has its own folder with the same file
// names; for those that a build leaves out, a no_<name>.cc says how to get them.
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

// The process that has the memory, and the kind of device.
struct Endpoint {
  Incarnation process;
  std::string name;  // "trainer/3"
  DeviceKind device = DeviceKind::kHost;
};

// Memory of this process that can be announced to a peer.
struct LocalMemory {
  const std::byte* data = nullptr;
  size_t bytes = 0;
  DeviceKind device = DeviceKind::kHost;
  bool packed = false;  // its owner packs it into a stream; nobody else reads it
};

// Stateless and immutable: thread-safe.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  virtual Capability capability() const = 0;
  // How well it moves bytes from `src` to `dst`: 0 if it cannot; a higher score is better.
  virtual int score(const Endpoint& src, const Endpoint& dst) const = 0;
  // Gives access to the memory of `peer`. Throws kPeerLost if it is dead, kUnimplemented if unavailable.
  virtual std::unique_ptr<Connection> connect(const Endpoint& peer) const = 0;
  // The transport's address for memory of this process, and the ways of access that it gives a peer.
  struct Located {
    uint64_t region = 0;  // unique in this process
    uint64_t offset = 0;  // RemoteRange::offset
    Caps caps;
  };
  virtual Located locate(const LocalMemory& memory) const = 0;
  // The key of the region with `memory`, for a peer. Throws Error.
  virtual RemoteKey export_region(const LocalMemory& memory) const = 0;
  // Null if it has no streams.
  virtual const Streams* streams() const = 0;
  // What a process must hold while peers may read its private memory; null: nothing. Throws Error(kInvalidArgument) for
  // an unknown setting.
  virtual std::unique_ptr<Consent> consent() const = 0;
};

// The transports of this build, in a fixed order.
class TransportRegistry {
 public:
  static const TransportRegistry& builtin();

  std::span<const Transport* const> transports() const { return transports_; }
  const Transport* find(std::string_view name) const;  // null: there is none
  // The best one for this pair. Throws Error(kUnimplemented), which says what each one lacks.
  const Transport& choose(const Endpoint& src, const Endpoint& dst) const;
  // The best one that has streams. Throws likewise.
  const Transport& streaming(const Endpoint& src, const Endpoint& dst) const { return best(src, dst, true); }
  // A stream of that transport. Also throws Error(kResourceExhausted).
  Streams::Ends make_stream(const Endpoint& src, const Endpoint& dst) const;
  // Opens an end that came from `owner`, by the transport that it names. Throws Error(kInvalidArgument) if that has no
  // streams from `src` to `dst`, or did not make the end.
  std::unique_ptr<ByteStream> open_stream(StreamEnd end, const Endpoint& src, const Endpoint& dst,
                                          std::string_view owner) const;
  // Of all transports.
  std::vector<std::unique_ptr<Consent>> consents() const;

  explicit TransportRegistry(std::vector<const Transport*> transports) : transports_(std::move(transports)) {}

 private:
  const Transport& best(const Endpoint& src, const Endpoint& dst, bool streams) const;

  std::vector<const Transport*> transports_;
};

// Throws Error(kInvalidArgument) if TESSERA_FORCE_TRANSPORT names no transport.
void require_forced_transport();

// The value of TESSERA_FORCE_PULL: kGet or kStream, for memory that can be read both ways. Throws
// Error(kInvalidArgument) for an unknown value.
std::optional<Access> forced_access();

}  // namespace tessera
