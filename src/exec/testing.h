// For tests of the executor: random routes, a simple oracle for them, and a way to wait for runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/fail.h"
#include "base/mutex.h"
#include "codec/simd/cast.h"
#include "codec/simd/digest.h"
#include "codec/simd/digest_sample.h"
#include "exec/pull/compiler.h"
#include "exec/pull/source.h"
#include "exec/walk/route.h"
#include "exec/walk/route_walk.h"
#include "transport/peer_memory.h"
#include "transport/transport.h"

namespace tessera::exec_testing {

// This process as its own peer, and its private memory (an own_range()), accessed through `transport` as if it were
// another process's.
inline Endpoint own_endpoint() {
  return {.process = Incarnation::self(), .name = "trainer/0"};
}
inline std::shared_ptr<Connection> reach_self(std::string_view transport) {
  const Transport* const found = TransportRegistry::builtin().find(transport);
  std::shared_ptr<Connection> peer = found->connect(own_endpoint());
  peer->add_key(kOwnMemory, found->export_region({}));
  return peer;
}

inline constexpr Duration kPatience = std::chrono::seconds(60);  // later is a hang, even with sanitizers

// Signalled by a run's Done; tests wait for it.
class Completion {
 public:
  TransferRun::Done callback() {
    return [this] {
      const MutexLock lock(mutex_);
      ++count_;
      changed_.notify_all();
    };
  }
  bool wait(int count = 1) {
    const MutexLock lock(mutex_);
    const bool reached =
        changed_.wait_until(mutex_, Deadline::after(kPatience), [&]() REQUIRES(mutex_) { return count_ >= count; });
    count_ = reached ? count_ - count : count_;
    return reached;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int count_ GUARDED_BY(mutex_) = 0;
};

using Random = std::mt19937_64;

inline Index pick(Random& random, Index low, Index high) {
  return std::uniform_int_distribution<Index>(low, high)(random);
}

// Intervals within [0, n), with even cuts if `step` is 2.
inline IntervalSet random_subset(Random& random, const IntervalSet& of, Index step) {
  if (pick(random, 0, 2) == 0) return of;
  std::vector<Interval> intervals;
  for (const Interval& whole : of.intervals()) {
    for (Index at = whole.begin; at < whole.end;) {
      const Index end = std::min(whole.end, at + step * pick(random, 1, 6));
      if (pick(random, 0, 3) != 0) intervals.push_back({at, end});
      at = end;
    }
  }
  return IntervalSet::of_sorted(intervals);
}

// A local tensor with room around it: all of it in `bytes`, its first element at `first`.
struct Buffer {
  LocalArray array;
  size_t size = 0;
  size_t first = 0;
};

// Contiguous, padded, permuted, reversed or (sources only) with a dim of stride zero.
inline Buffer random_array(Random& random, const Region& owned, DType dtype, bool may_alias) {
  const Shape extents = owned.extents();
  const auto ndim = static_cast<Index>(extents.size());
  std::vector<Index> order(extents.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = static_cast<Index>(d);
  const bool halves = dtype == DType::kF4;
  if (pick(random, 0, 3) == 0 && ndim > 0) std::shuffle(order.begin(), order.end() - (halves ? 1 : 0), random);
  const Index padding = pick(random, 0, 1) * pick(random, 0, 3);
  std::vector<Index> strides(extents.size());
  Index step = halves ? 1 : atom_bytes(dtype) * (pick(random, 0, 4) == 0 ? 2 : 1);
  for (size_t k = order.size(); k-- > 0;) {
    const auto d = static_cast<size_t>(order[k]);
    const bool pairs = halves && d + 1 == extents.size();
    strides[d] = step;
    step *= std::max<Index>(pairs ? extents[d] / 2 : extents[d], 1);
    step += padding * atom_bytes(dtype);
    if (pick(random, 0, 7) == 0 && !pairs) strides[d] = -strides[d];
    if (may_alias && pick(random, 0, 9) == 0 && !pairs) strides[d] = 0;
  }
  const ByteExtent extent = extent_of(dtype, extents, strides);
  const size_t before = static_cast<size_t>(-extent.begin) + static_cast<size_t>(pick(random, 0, 1) * 8);
  return {.array = {.owned = owned, .strides = strides},
          .size = before + static_cast<size_t>(extent.end) + 16,
          .first = before};
}

// A route and the memory on both sides of it.
struct RandomRoute {
  RouteRegion what;
  Buffer src, dst;
  DType dst_dtype = DType::kF32;

  static RandomRoute make(Random& random, DType dtype, DType dst_dtype, Index max_size = 8) {
    RandomRoute route;
    const Index step = dtype == DType::kF4 ? 2 : 1;
    const auto ndim = static_cast<size_t>(pick(random, dtype == DType::kF4 ? 1 : 0, 4));
    std::vector<IntervalSet> src_dims, dst_dims, region;
    for (size_t d = 0; d < ndim; ++d) {
      const Index last_step = d + 1 == ndim ? step : 1;
      const Index size =
          last_step * pick(random, pick(random, 0, 15) == 0 ? 0 : 1, (d + 1 == ndim ? 4 : 1) * max_size / last_step);
      const IntervalSet whole(Interval{0, size});
      route.what.shape.push_back(size);
      region.push_back(random_subset(random, whole, last_step));
      const auto around = [&] { return pick(random, 0, 1) == 0 ? whole : region.back(); };
      src_dims.push_back(around());
      dst_dims.push_back(around());
    }
    route.what.dtype = dtype;
    route.what.region = Region(region);
    route.dst_dtype = dst_dtype;
    route.src = random_array(random, Region(src_dims), dtype, true);
    route.dst = random_array(random, Region(dst_dims), dst_dtype, false);
    return route;
  }
};

// Calls visit(global indices in atoms) for every atom of the region, row-major, in the simplest way.
inline void for_each_atom(const RouteRegion& what, const std::function<void(const std::vector<Index>&)>& visit) {
  std::vector<std::vector<Index>> atoms;
  for (size_t d = 0; d < what.shape.size(); ++d) {
    const Index scale = d + 1 == what.shape.size() ? elements_per_atom(what.dtype) : 1;
    std::vector<Index>& dim = atoms.emplace_back();
    for (Index i = 0; i < what.shape[d] / scale; ++i)
      if (what.region.dim(static_cast<int>(d)).contains(i * scale)) dim.push_back(i);
    if (dim.empty()) return;
  }
  std::vector<size_t> place(atoms.size());
  std::vector<Index> at(atoms.size());
  while (true) {
    for (size_t d = 0; d < at.size(); ++d) at[d] = atoms[d][place[d]];
    visit(at);
    size_t d = at.size();
    while (d > 0 && ++place[d - 1] == atoms[d - 1].size()) place[--d] = 0;
    if (d == 0) return;
  }
}

// The places of a local tensor's atoms. What it owns is counted one by one, but only once, since sanitizers make each
// step expensive.
class PlainOffsets {
 public:
  PlainOffsets(const LocalArray& array, Index per_atom) {
    for (size_t d = 0; d < array.strides.size(); ++d) {
      const IntervalSet& owned = array.owned.dim(static_cast<int>(d));
      const Index scale = d + 1 == array.strides.size() ? per_atom : 1;
      std::vector<int64_t>& dim = bytes_.emplace_back();
      Index position = 0;
      for (Index i = 0; position < owned.size() / scale; ++i) {
        dim.push_back(position * array.strides[d]);
        position += owned.contains(i * scale) ? 1 : 0;
      }
    }
  }
  // In bytes from the first element; the element must be owned.
  int64_t of(const std::vector<Index>& at) const {
    int64_t offset = 0;
    for (size_t d = 0; d < at.size(); ++d) offset += bytes_[d][static_cast<size_t>(at[d])];
    return offset;
  }

 private:
  std::vector<std::vector<int64_t>> bytes_;  // dim by dim
};

// The expected contents of `dst` after a pull, and the digest that both sides should find.
inline Digest plain_pull(const RandomRoute& route, const std::byte* src, std::byte* dst, const SampleSeed& seed = {}) {
  const Index per_atom = elements_per_atom(route.what.dtype);
  const int64_t bytes = atom_bytes(route.what.dtype);
  int64_t image_bytes = bytes;
  for (size_t d = 0; d < route.what.shape.size(); ++d)
    image_bytes *= d + 1 == route.what.shape.size() ? route.what.shape[d] / per_atom : route.what.shape[d];
  std::vector<std::byte> image(static_cast<size_t>(image_bytes));
  Digest digest;
  const CastRow cast = cast_row(route.what.dtype, route.dst_dtype);
  const PlainOffsets src_offsets(route.src.array, per_atom), dst_offsets(route.dst.array, per_atom);
  for_each_atom(route.what, [&](const std::vector<Index>& at) {
    const std::byte* from = src + route.src.first + src_offsets.of(at);
    std::byte* to = dst + route.dst.first + dst_offsets.of(at);
    int64_t flat = 0;
    for (size_t d = 0; d < at.size(); ++d)
      flat = flat * (d + 1 == at.size() ? route.what.shape[d] / per_atom : route.what.shape[d]) + at[d];
    std::memcpy(image.data() + flat * bytes, from, static_cast<size_t>(bytes));
    if (route.what.dtype == route.dst_dtype) {
      std::memcpy(to, from, static_cast<size_t>(bytes));
    } else {
      cast(from, to, 1);
    }
    digest.elements += static_cast<uint64_t>(per_atom);
  });
  for (size_t i = 0; seed && i < image.size(); ++i)
    if (i / 16384 != DigestSample(*seed, route.what.tensor).block(i / (16 * 16384))) image[i] = {};
  digest_bytes(digest, 0, image.data(), image.size());
  return digest;
}

inline void fill_random(Random& random, std::byte* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(random());
}

}  // namespace tessera::exec_testing
