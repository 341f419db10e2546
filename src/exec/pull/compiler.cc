#include "exec/pull/compiler.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/fail.h"
#include "exec/delta/delta_stream.h"
#include "exec/pull/pull_program.h"
#include "exec/walk/route_walk.h"
#include "exec/wire/plane_writer.h"
#include "exec/wire/wire_decode.h"
#include "transport/transport.h"

namespace tessera {
namespace {

constexpr int64_t kDirectRow = 2048;  // destination rows from which a get writes them itself

// By what is possible, then by cost.
Access choose_access(const Connection& peer, int64_t bytes, int64_t pieces, const PullOptions& options) {
  const bool gets = peer.caps().has(Access::kGet);
  const bool both_ways = gets || !peer.get_refused().ok();  // or would be, were it permitted
  std::optional<Access> forced = options.private_access;
  if (!forced && both_ways) forced = forced_access();
  if (forced == Access::kGet && !gets)
    fail(ErrorCode::kPermissionDenied,
         "{}: private memory must not be streamed, and cannot be read otherwise: {}"_message, peer.name(),
         peer.get_refused().message());
  if (forced) return *forced;
  if (!gets) return Access::kStream;
  return cheaper_access(peer.cost(Access::kGet), peer.cost(Access::kStream), bytes, pieces);
}

// The walk over only the source's array, after the check that it stays within what the peer has described.
Walk checked_source_walk(const PullRoute& route, const Connection& peer) {
  Walk walk = make_walk(route.what, {.src = &route.src, .dst_dtype = route.what.dtype}, Walk::Order::kRowMajor);
  const ByteExtent extent = walk.extent(kSource, atom_bytes(route.what.dtype));
  const int64_t left = static_cast<int64_t>(std::min(route.memory.bytes, uint64_t{INT64_MAX}));
  const int64_t origin = static_cast<int64_t>(std::min(route.origin, uint64_t{INT64_MAX}));
  if (origin > left || extent.begin < -origin || extent.end > left - origin)
    fail(ErrorCode::kInvalidArgument, "{}: tensor {}: bytes {} to {} around {} leave its memory of {} bytes"_message,
         peer.name(), route.what.tensor, extent.begin, extent.end, origin, left);
  return walk;
}

int64_t bytes_of_parts(const std::vector<PullPart>& parts) {
  int64_t bytes = 0;
  for (const PullPart& part : parts) bytes += part.walk.atoms() * part.kernel.source_bytes();
  return bytes;
}

// Turns routes into parts.
class Compiler {
 public:
  Compiler(PullProgram::Impl& program, std::span<const PullRoute> routes, const PullOptions& options)
      : program_(program), routes_(routes), options_(options) {}

  void run() {
    place_routes();
    for (size_t r = 0; r < routes_.size(); ++r) compile(r);
    number_digests();
    program_.mapped_units = cut(program_.mapped);
    program_.get_units = cut(program_.get);
    program_.wire_units = cut_pieces(program_.wire);
    program_.delta_units = cut_deltas(program_.delta);
    program_.bytes = {bytes_of_parts(program_.mapped), bytes_of_parts(program_.get), bytes_of_parts(program_.streamed)};
    for (const std::vector<PullPart>* parts : {&program_.mapped, &program_.get, &program_.streamed})
      for (const PullPart& part : *parts)
        program_.route_bytes[part.route] = part.walk.atoms() * part.kernel.source_bytes();
    for (const WirePart& part : program_.wire) {
      program_.route_bytes[part.route] = part.reader->piece().bytes();
      program_.bytes[static_cast<size_t>(part.piece.access)] += part.reader->piece().bytes();
    }
  }

 private:
  struct Place {
    RemoteRegion region;
    Access access = Access::kMap;
    Walk walk;  // over the source's array
  };

  void place_routes() {
    const Caps caps = program_.peer->caps();
    int64_t bytes = 0;
    int64_t pieces = 0;
    bool streams_only = false;
    for (const PullRoute& route : routes_) {
      Place place{.region = program_.peer->region(route.memory), .walk = checked_source_walk(route, *program_.peer)};
      const Caps here = place.region.caps;
      place.access = here.has(Access::kMap) ? Access::kMap : here.has(Access::kStream) ? Access::kStream : Access::kGet;
      if (place.access == Access::kStream && place.walk.atoms() > 0) {
        bytes += place.walk.atoms() * atom_bytes(route.what.dtype);
        pieces += std::max<int64_t>(place.walk.atoms() / place.walk.row_atoms(), 1);
        streams_only |= caps.has(Access::kGet) && !here.has(Access::kGet);
      }
      places_.push_back(std::move(place));
    }
    if (bytes == 0 || streams_only || choose_access(*program_.peer, bytes, pieces, options_) == Access::kStream) return;
    for (Place& place : places_)
      if (place.access == Access::kStream) place.access = Access::kGet;
  }

  void compile(size_t r) {
    const PullRoute& route = routes_[r];
    Place& place = places_[r];
    if (route.wire != nullptr) return compile_wire(r);
    if (route.delta) compile_delta(r);
    if (place.walk.atoms() == 0) return;
    PullPart part{
        .route = static_cast<uint32_t>(r),
        .tensor = route.what.tensor,
        .elements_per_atom = elements_per_atom(route.what.dtype),
        .kernel = BlockKernel(route.what.dtype, route.dst_dtype, route.combine, route.op, BlockKernel::Store::kStream),
        .image = image_range(route.what),
        .data = route.data};
    WalkArrays arrays{.dst = &route.dst, .dst_dtype = route.dst_dtype, .image = options_.digest};
    switch (place.access) {
      case Access::kMap:
        arrays.src = &route.src;
        part.walk = make_walk(route.what, arrays, Walk::Order::kFree);
        part.mapped = place.region.mapped + route.origin;
        program_.mapped.push_back(std::move(part));
        break;
      case Access::kGet: {
        part.key = place.region.key;
        part.origin = static_cast<int64_t>(place.region.offset + route.origin);
        part.walk = make_walk(route.what, arrays, Walk::Order::kRowMajor);
        part.direct = part.kernel.copies() && part.walk.row_atoms() * part.kernel.source_bytes() >= kDirectRow;
        if (part.direct) {
          arrays.src = &route.src;
          part.walk = make_walk(route.what, arrays, Walk::Order::kRowMajor);
        } else {
          part.remote = std::move(place.walk);
        }
        program_.get.push_back(std::move(part));
        break;
      }
      case Access::kStream:
        part.walk = make_walk(route.what, arrays, Walk::Order::kRowMajor);
        add_to_stream({.route = part.route,
                       .plain = static_cast<uint32_t>(program_.streamed.size()),
                       .delta = route.delta ? static_cast<uint32_t>(program_.delta.size() - 1) : StreamPart::kNone,
                       .bytes = part.walk.atoms() * part.kernel.source_bytes()});
        program_.streamed.push_back(std::move(part));
        break;
    }
  }

  void number_digests() {
    std::vector<SecondDigest> seconds(routes_.size(), SecondDigest::kNone);
    for (const WirePart& part : program_.wire) seconds[part.route] = SecondDigest::kRest;
    for (const DeltaPart& part : program_.delta) seconds[part.route] = SecondDigest::kPiece;
    program_.digests = DigestTable(seconds);
  }

  void compile_wire(size_t r) {
    const PullRoute& route = routes_[r];
    TESSERA_CHECK(route.what.dtype == DType::kU8 && route.what.shape == Shape{route.wire->bytes()});
    TESSERA_CHECK(route.what.region == Region::full(route.what.shape) && route.src.owned == route.what.region);
    TESSERA_CHECK_EQ(route.src.strides.front(), Index{1});
    TESSERA_CHECK(route.combine == Combine::kCopy);
    const auto index = static_cast<uint32_t>(program_.wire.size());
    const Bytes piece = bytes_at(places_[r].region, places_[r].access, route.origin);
    program_.wire.push_back({static_cast<uint32_t>(r), piece, reader_of(route)});
    const int64_t bytes = route.wire->bytes();
    if (piece.access == Access::kStream && bytes > 0) {
      add_to_stream({.route = static_cast<uint32_t>(r), .wire = index, .bytes = bytes});
      program_.streamed_wire = std::max(program_.streamed_wire, static_cast<size_t>(bytes));
    } else if (piece.access == Access::kGet && bytes > 0) {
      program_.fetched_wire.push_back(index);
      program_.fetch_bytes = std::max(program_.fetch_bytes, static_cast<size_t>(bytes));
    }
  }

  static std::unique_ptr<const WireReader> reader_of(const PullRoute& route) {
    if (!route.planes.empty()) return std::make_unique<PlaneWriter>(route.wire, route.dst.owned, route.planes);
    return std::make_unique<WireDecoder>(
        route.wire, WireDecoder::Target{.array = route.dst, .dtype = route.dst_dtype, .data = route.data});
  }

  static Bytes bytes_at(const RemoteRegion& region, Access access, uint64_t origin) {
    Bytes bytes{.access = access, .key = region.key, .origin = region.offset + origin};
    if (access == Access::kMap) bytes.mapped = region.mapped + origin;
    return bytes;
  }

  void add_to_stream(const StreamPart& part) {
    program_.stream.add(part.bytes);
    program_.stream_parts.push_back(part);
  }

  void compile_delta(size_t r) {
    const PullRoute& route = routes_[r];
    const DeltaPiece piece(route.what);
    const int64_t wanted = piece.bytes();
    if (route.delta->bytes < static_cast<uint64_t>(wanted))
      fail(ErrorCode::kInvalidArgument, "{}: tensor {}: a delta piece of {} bytes, it takes {}"_message,
           program_.peer->name(), route.what.tensor, route.delta->bytes, wanted);
    Bytes at{.access = Access::kStream};
    if (places_[r].walk.atoms() > 0) {
      const RemoteRegion region = program_.peer->region(*route.delta);
      const Access access =
          region.caps.has(Access::kMap) || !region.caps.has(places_[r].access) ? region.best() : places_[r].access;
      at = bytes_at(region, access, 0);
      if (at.access == Access::kStream && places_[r].access != Access::kStream)
        fail(ErrorCode::kInvalidArgument, "{}: tensor {}: a delta piece for streams, and the tensor is not"_message,
             program_.peer->name(), route.what.tensor);
      if (at.access == Access::kGet)
        program_.fetch_bytes = std::max(program_.fetch_bytes, static_cast<size_t>(max_segment_bytes(piece)));
    }
    program_.delta.push_back({static_cast<uint32_t>(r), at, DeltaReader(route)});
  }

  static std::vector<Unit> cut_deltas(const std::vector<DeltaPart>& parts) {
    std::vector<PartSize> sizes;
    sizes.reserve(parts.size());
    for (const DeltaPart& part : parts) {
      sizes.push_back(delta_part_size(part.reader.piece()));
      if (part.piece.access == Access::kStream) sizes.back().atoms = 0;
    }
    return cut_into_units(sizes);
  }

  static std::vector<Unit> cut_pieces(const std::vector<WirePart>& parts) {
    std::vector<PartSize> sizes;
    sizes.reserve(parts.size());
    for (const WirePart& part : parts)
      sizes.push_back({.atoms = part.piece.access == Access::kMap ? part.reader->piece().walk().all_bands() : 0,
                       .atom_bytes = part.reader->band_bytes()});
    return cut_into_units(sizes);
  }

  static std::vector<Unit> cut(const std::vector<PullPart>& parts) {
    std::vector<PartSize> sizes;
    sizes.reserve(parts.size());
    for (const PullPart& part : parts)
      sizes.push_back({part.walk.atoms(), part.kernel.source_bytes(), part.walk.row_atoms()});
    return cut_into_units(sizes);
  }

  PullProgram::Impl& program_;
  std::span<const PullRoute> routes_;
  const PullOptions& options_;
  std::vector<Place> places_;
};

size_t memory_of_parts(const std::vector<PullPart>& parts) {
  size_t bytes = parts.capacity() * sizeof(PullPart);
  for (const PullPart& part : parts) bytes += part.walk.memory_bytes() + part.remote.memory_bytes() - 2 * sizeof(Walk);
  return bytes;
}

}  // namespace

PullProgram::PullProgram(std::shared_ptr<const Connection> peer, std::span<const PullRoute> routes,
                         const PullOptions& options) {
  auto impl = std::make_unique<Impl>();
  impl->peer = std::move(peer);
  impl->digest = options.digest;
  impl->routes = routes.size();
  impl->route_bytes.resize(routes.size());
  Compiler(*impl, routes, options).run();
  impl_ = std::move(impl);
}

PullProgram::~PullProgram() = default;

bool PullProgram::wants_stream() const {
  return impl_->stream.bytes() > 0;
}

int64_t PullProgram::bytes() const {
  return std::accumulate(impl_->bytes.begin(), impl_->bytes.end(), int64_t{0});
}

int64_t PullProgram::bytes(Access access) const {
  return impl_->bytes[static_cast<size_t>(access)];
}

bool PullProgram::streams(size_t route) const {
  return std::ranges::find(impl_->stream_parts, route, &StreamPart::route) != impl_->stream_parts.end();
}

size_t PullProgram::routes() const {
  return impl_->routes;
}
size_t PullProgram::delta_routes() const {
  return impl_->delta.size();
}
int64_t PullProgram::bytes_of(size_t route) const {
  return impl_->route_bytes[route];
}
const Connection& PullProgram::peer() const {
  return *impl_->peer;
}

bool PullProgram::only_maps() const {
  return impl_->get.empty() && impl_->streamed.empty() && impl_->wire.empty() && impl_->delta.empty();
}

size_t PullProgram::memory_bytes() const {
  return sizeof(Impl) + memory_of_parts(impl_->mapped) + memory_of_parts(impl_->get) +
         memory_of_parts(impl_->streamed) + impl_->wire.capacity() * sizeof(WirePart) +
         impl_->delta.capacity() * sizeof(DeltaPart) + impl_->route_bytes.capacity() * sizeof(int64_t) +
         (impl_->mapped_units.size() + impl_->get_units.size() + impl_->wire_units.size() + impl_->delta_units.size()) *
             sizeof(Unit);
}

}  // namespace tessera
