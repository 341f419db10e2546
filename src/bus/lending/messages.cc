#include "bus/lending/messages.h"

#include <algorithm>

#include "base/fail.h"

namespace tessera::bus {
namespace {

constexpr uint32_t kMaxArenasPerFrame = 1 << 16;

void write_shape(std::span<const Index> sizes, ByteWriter& out) {
  out.put(static_cast<uint8_t>(sizes.size()));
  for (const Index size : sizes) out.put(size);
}

Shape read_shape(ByteReader& in) {
  const auto dims = in.get<uint8_t>();
  if (dims > kMaxDims) fail(ErrorCode::kInvalidArgument, "MakeRun: a tensor of {} dims", dims);
  Shape sizes;
  for (int d = 0; d < dims; ++d) sizes.push_back(in.get<Index>());
  return sizes;
}

void write_region(const Region& region, ByteWriter& out) {
  out.put(static_cast<uint8_t>(region.ndim()));
  for (const IntervalSet& dim : region.dims()) {
    out.put(static_cast<uint32_t>(dim.intervals().size()));
    for (const Interval& interval : dim.intervals()) {
      out.put(interval.begin);
      out.put(interval.end);
    }
  }
}

// One that holds something: no route has another.
Region read_region(ByteReader& in) {
  const auto ndim = in.get<uint8_t>();
  if (ndim > kMaxDims) fail(ErrorCode::kInvalidArgument, "MakeRun: a region of {} dims", ndim);
  std::vector<IntervalSet> dims;
  for (int d = 0; d < ndim; ++d) {
    std::vector<Interval> intervals;
    for (uint32_t count = in.get_count(kMaxIntervals, 2 * sizeof(Index)); count > 0; --count) {
      Interval interval;
      interval.begin = in.get<Index>();
      interval.end = in.get<Index>();
      const Index after = intervals.empty() ? -1 : intervals.back().end;
      if (interval.begin <= after || interval.end <= interval.begin || interval.end > kMaxElements)
        fail(ErrorCode::kInvalidArgument, "MakeRun: the interval [{}, {}) after {}", interval.begin, interval.end,
             after);
      intervals.push_back(interval);
    }
    if (intervals.empty()) fail(ErrorCode::kInvalidArgument, "MakeRun: a region that holds nothing");
    dims.push_back(IntervalSet::of_sorted(intervals));
  }
  Region region(std::move(dims));
  element_count(region.extents());
  return region;
}

// Whether a region lies within a tensor of that shape.
void check_within(const Region& region, const Shape& shape) {
  bool within = static_cast<size_t>(region.ndim()) == shape.size();
  for (int d = 0; within && d < region.ndim(); ++d)
    within = region.dim(d).intervals().back().end <= shape[static_cast<size_t>(d)];
  if (!within)
    fail(ErrorCode::kInvalidArgument, "MakeRun: {} of a tensor of {}", region.to_string(), to_string_shape(shape));
}

LentPlace read_place_of(const RouteRegion& what, ByteReader& in) {
  LentPlace place = LentPlace::read(in);
  if (place.kind == LentPlace::Kind::kTensor) return place;
  const LocalArray& array = place.array;
  check_within(array.owned, what.shape);
  if (array.strides.size() != what.shape.size())
    fail(ErrorCode::kInvalidArgument, "MakeRun: {} strides for {} dims", array.strides.size(), what.shape.size());
  if (array.owned.intersect(what.region) != what.region)
    fail(ErrorCode::kInvalidArgument, "MakeRun: {} is not within {}", what.region.to_string(), array.owned.to_string());
  return place;
}

}  // namespace

void LendArenas::write(ByteWriter& out) const {
  out.put(run);
  out.put(own);
  out.put(writable);
  out.put(static_cast<uint32_t>(arenas.size()));
  for (const ArenaDesc& arena : arenas) arena.write(out);
}

LendArenas LendArenas::read(ByteReader& in) {
  LendArenas lend;
  lend.run = in.get<uint32_t>();
  lend.own = in.get_bool();
  lend.writable = in.get_bool();
  if (lend.writable && !lend.own) fail(ErrorCode::kInvalidArgument, "LendArenas: another rank's are not to be written");
  for (uint32_t count = in.get_count(kMaxArenasPerFrame, 12); count > 0; --count)
    lend.arenas.push_back(ArenaDesc::read(in));
  return lend;
}

void LentPlace::write(ByteWriter& out) const {
  out.put(kind);
  if (kind == Kind::kTensor) return out.put(tensor);
  memory.write(out);
  out.put(origin);
  write_region(array.owned, out);
  write_shape(array.strides, out);
}

LentPlace LentPlace::read(ByteReader& in) {
  LentPlace place;
  place.kind = in.get_enum(Kind::kPeer);
  if (place.kind == Kind::kTensor) {
    place.tensor = in.get<uint32_t>();
    return place;
  }
  place.memory = MemoryDesc::read(in);
  place.origin = in.get<uint64_t>();
  place.array.owned = read_region(in);
  place.array.strides = read_shape(in);
  return place;
}

void MakeRun::write(ByteWriter& out) const {
  out.put(run);
  out.put(kind);
  out.put(digest);
  out.put(ring);
  out.put_string(peer_name);
  if (pulls()) peer.write(out);
  out.put(static_cast<uint32_t>(routes.size()));
  for (const LentRoute& route : routes) {
    out.put(route.what.tensor);
    out.put(route.what.dtype);
    write_shape(route.what.shape, out);
    write_region(route.what.region, out);
    route.src.write(out);
    if (kind == Kind::kSource) continue;
    route.dst.write(out);
    out.put(route.dst_dtype);
  }
}

MakeRun MakeRun::read(ByteReader& in) {
  MakeRun make;
  make.run = in.get<uint32_t>();
  make.kind = in.get_enum(Kind::kPull);
  make.digest = in.get_bool();
  make.ring = in.get_bool();
  make.peer_name = in.get_string(256);
  if (make.pulls()) make.peer = Incarnation::read(in);
  for (uint32_t count = in.get_count(kMaxRoutes, 10); count > 0; --count) {
    LentRoute route;
    route.what.tensor = in.get<uint32_t>();
    route.what.dtype = in.get_enum(kLastDType);
    route.what.shape = read_shape(in);
    element_count(route.what.shape);
    route.what.region = read_region(in);
    check_within(route.what.region, route.what.shape);
    route.src = read_place_of(route.what, in);
    if (make.kind == Kind::kPull) {
      route.dst = read_place_of(route.what, in);
      route.dst_dtype = in.get_enum(kLastDType);
    }
    make.routes.push_back(std::move(route));
  }
  return make;
}

void StartRun::write(ByteWriter& out) const {
  out.put(run);
  out.put(epoch);
}

StartRun StartRun::read(ByteReader& in) {
  StartRun start;
  start.run = in.get<uint32_t>();
  start.epoch = in.get<uint32_t>();
  if (start.epoch == 0) fail(ErrorCode::kInvalidArgument, "StartRun: epoch 0");
  return start;
}

void AbortRun::write(ByteWriter& out) const {
  out.put(run);
  write_status(status, out);
}

AbortRun AbortRun::read(ByteReader& in) {
  AbortRun abort;
  abort.run = in.get<uint32_t>();
  abort.status = read_status(in);
  if (abort.status.ok()) fail(ErrorCode::kInvalidArgument, "AbortRun: without an error");
  return abort;
}

void RunProgress::write(ByteWriter& out) const {
  out.put(run);
  out.put(epoch);
  out.put(bytes);
}

RunProgress RunProgress::read(ByteReader& in) {
  RunProgress progress;
  progress.run = in.get<uint32_t>();
  progress.epoch = in.get<uint32_t>();
  progress.bytes = in.get<int64_t>();
  return progress;
}

void RunEnded::write(ByteWriter& out) const {
  out.put(run);
  out.put(epoch);
  out.put(bytes);
  write_status(status, out);
  out.put_bytes(std::as_bytes(std::span(digests)));
}

void Synced::write(ByteWriter& out) const {
  out.put(number);
  write_status(status, out);
}

Synced Synced::read(ByteReader& in) {
  Synced synced;
  synced.number = in.get<uint32_t>();
  synced.status = read_status(in);
  return synced;
}

RunEnded RunEnded::read(ByteReader& in) {
  RunEnded ended;
  ended.run = in.get<uint32_t>();
  ended.epoch = in.get<uint32_t>();
  ended.bytes = in.get<int64_t>();
  ended.status = read_status(in);
  const std::span<const std::byte> bytes = in.get_bytes(kMaxRoutes * sizeof(Digest));
  if (bytes.size() % sizeof(Digest) != 0)
    fail(ErrorCode::kInvalidArgument, "RunEnded: {} bytes are no whole number of digests", bytes.size());
  ended.digests.resize(bytes.size() / sizeof(Digest));
  std::ranges::copy(bytes, std::as_writable_bytes(std::span(ended.digests)).begin());
  return ended;
}

}  // namespace tessera::bus
