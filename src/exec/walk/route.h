// The routes that the executor carries out: a region of one tensor, and its place in memory on one side or on both.
//
// A route's stream is its elements row-major over the region, packed, in the source's dtype. The order depends only on
// the region, so that sender and receiver walk one route without any exchange.
//
// f4 elements travel as bytes, two at a time. One dim, the last one of even size, counts in pairs: its cuts are even
// and its stride is that of a pair. The dims below it, of odd sizes, are whole and contiguous in its rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tessera/dtype.h"
#include "tessera/layout.h"
#include "transport/remote_key.h"

namespace tessera {

class WirePiece;

// What one rank holds of a tensor, and its layout in memory.
struct LocalArray {
  Region owned{};              // global coordinates
  std::vector<Index> strides;  // BYTES from one element to the next, by dim; any sign, zero too (f4: byte_strides())
};

// Strides in bytes of a local tensor whose strides in elements are `strides` (empty: contiguous row-major). For f4, the
// paired dim has the stride of a pair and those below it 0. Throws Error(kInvalidArgument) for f4 strides that are not
// whole bytes.
std::vector<Index> byte_strides(DType dtype, std::span<const Index> extents, std::span<const Index> strides = {});

// A dim of a local tensor in memory, outermost first: `count` atoms or rows, `stride` bytes apart. For f4, the paired
// dim includes those below it.
struct MemoryDim {
  Index count = 0;
  int64_t stride = 0;
};
std::vector<MemoryDim> memory_dims(DType dtype, std::span<const Index> extents, std::span<const Index> byte_strides);

// The bytes of a local tensor around its first element: [first + begin, first + end). Both 0 if it is empty.
struct ByteExtent {
  int64_t begin = 0;  // at most 0
  int64_t end = 0;
};
ByteExtent extent_of(DType dtype, std::span<const Index> extents, std::span<const Index> byte_strides);

// What is done with each element at the end of a route.
enum class Combine : uint8_t {
  kCopy,        // cast to the destination's dtype and store
  kFirst,       // the first term of a reduction: store it in the accumulator's dtype
  kAccumulate,  // a further term: combine it with the accumulator
};

// The properties of a route that both sides know.
struct RouteRegion {
  uint32_t tensor = 0;        // position in the batch; used in messages
  Shape shape{};              // global
  DType dtype = DType::kF32;  // the source's
  Region region{};            // owned by both sides
};

// The bytes of the tensor's image (docs/formats/digest.md) from the first to the last element of a region:
// [begin, end). Both 0 if it is empty.
struct ImageRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};
ImageRange image_range(const RouteRegion& what);

// The sender's half.
struct SourceRoute {
  RouteRegion what{};
  LocalArray src{};
  const std::byte* data = nullptr;  // first element of the local tensor
  bool streamed = false;            // it goes into the stream, if the receiver has one: PullProgram::streams()
  bool digested = true;             // false: its digest is computed elsewhere
  // If it is streamed: its delta piece, which may be streamed instead.
  const std::byte* delta = nullptr;
};

// A plane of a quantised tensor (tessera/quantize.h) that a route is written to, as far as the receiver holds it: codes
// and scales of what travels, or of its transpose, one matrix after another.
struct PlaneTarget {
  bool transposed = false;
  std::byte* codes = nullptr;
  std::byte* scales = nullptr;
  std::byte* amaxes = nullptr;  // f32 for each matrix; null if the format needs none
};

// The receiver's half.
struct PullRoute {
  RouteRegion what{};  // with `wire`, and `src`: the piece, as one dim of u8
  LocalArray src{};
  RemoteRange memory{};  // the full extent of the source's local tensor (extent_of)
  uint64_t origin = 0;   // offset of its first element in `memory`: -extent.begin
  LocalArray dst{};
  DType dst_dtype = DType::kF32;  // the accumulator's if it accumulates
  std::byte* data = nullptr;      // first element of the local tensor
  Combine combine = Combine::kCopy;
  ReduceOp op = ReduceOp::kSum;  // only if it accumulates
  // The piece, if the route travels quantised (exec/wire/wire_piece.h). It is decoded into `dst`, which describes the
  // elements of the tensor in a float dtype; or, with planes, written to them as it is: then `dst` owns the region of
  // the planes and has no strides.
  std::shared_ptr<const WirePiece> wire{};
  std::vector<PlaneTarget> planes{};
  // The place of the route's delta piece (exec/delta/delta_piece.h), if it may travel as a delta.
  std::optional<RemoteRange> delta{};
};

}  // namespace tessera
