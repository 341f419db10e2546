// Quantised matrices: 8- and 4-bit floats with a scale for the whole tensor or for each block of it. Formulas are
// stated in docs/formats/quantized.md, with their sources (OCP Microscaling Formats 1.0, NVIDIA TransformerEngine, the
// PTX ISA); the same input gives the same bytes with every kernel, any number of threads and any cut into shards.
//
// Quantising has three phases, so that shards of one tensor can agree on its amax (largest magnitude) in between:
//
//   Amax amax = compute_amax({&shard, 1}, {})[0];   // 1. of what this rank holds
//   amax.value = max over the ranks of amax.value;  // 2. the caller's
//   quantize(shard, spec, amax.value, planes, {});  // 3. codes and scales
//
// A matrix is [M, K], row-major. Its *row plane* has blocks along K, its *column plane* blocks along M:
//
//   format            blocks    row plane: codes, scales              column plane: codes, scales
//   fp8_e4m3, e5m2    all       [M, K],   f32 [1, 1]                  [K, M],   f32 [1, 1]
//   fp8_block_1x128   1x128     [M, K],   f32 [M, K/128]              [K, M],   f32 [K, M/128]
//   fp8_block_128x128 128x128   [M, K],   f32 [M/128, K/128]          [K, M],   f32 [K/128, M/128]
//   mxfp8, _e5m2      1x32      [M, K],   E8M0 [M, K/32]              [M, K],   E8M0 [M/32, K]     (blocks 32x1)
//   nvfp4             1x16,     [M, K/2], E4M3 [M, K/16]              [K, M/2], E4M3 [K, M/16]
//                     16x16     the same: a block's scale stands in each of its 16 rows
//
// Divisions of scales' shapes round up: blocks at the end of a dim are clipped. NVFP4 packs two codes a byte, the even
// one in the low nibble, so the packed dim must be even. All but MXFP8's column planes are planes of the transposed
// matrix. Scales are *compact* here, without padding; gemm_scales() makes the layout that tensor cores read.
//
// All functions are thread-safe and block for as long as they compute. Errors are Error(kInvalidArgument) unless said.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/dtype.h"

namespace tessera {

enum class Format : uint8_t { kFp8E4M3, kFp8E5M2, kFp8Block1x128, kFp8Block128x128, kMxfp8, kMxfp8E5M2, kNvfp4 };

// "fp8_e4m3", "fp8_e5m2", "fp8_block_1x128", "fp8_block_128x128", "mxfp8", "mxfp8_e5m2", "nvfp4".
std::string_view to_string(Format format);
Format parse_format(std::string_view name);  // any case; throws an error that lists the names
std::span<const Format> all_formats();

// A matrix in memory, not owned: f32, f16 or bf16 elements, row-major, rows `row_stride` elements apart (at least
// `columns`; any number where there is at most one row).
struct MatrixView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
};

// Who shares the work. Small inputs are not split.
struct Parallel {
  int threads = 1;  // 0: as many as this process may run on
};

// Amax --------------------------------------------------------------------------------------------------------------

// What a pass over a tensor finds. NaN does not count as a magnitude; infinity does.
struct Amax {
  float value = 0;               // the largest |x|; 0 for a tensor without elements
  int64_t nonfinite = 0;         // NaNs and infinities
  int64_t first_nonfinite = -1;  // the first one's row-major index

  friend bool operator==(const Amax&, const Amax&) = default;
};

// Of a list in one call, with the results that one call a tensor would give. While `*noop` is not 0, which
// TransformerEngine calls a no-op flag, nothing is read and `out` stays. REQUIRES: out.size() == tensors.size().
void compute_amax(std::span<const MatrixView> tensors, std::span<Amax> out, Parallel parallel = {},
                  const float* noop = nullptr);
std::vector<Amax> compute_amax(std::span<const MatrixView> tensors, Parallel parallel = {});

// Of the column plane's input when a spec says `hadamard`: the transformed matrix. `tensor` must be bf16, with rows in
// whole groups of 16.
Amax compute_hadamard_amax(const MatrixView& tensor, Parallel parallel = {});

// The last amax values of a tensor, for *delayed* scaling of the one-scale FP8 formats: the scale of a step comes from
// earlier steps. Not thread-safe.
class AmaxHistory {
 public:
  enum class Algorithm : uint8_t { kMax, kMostRecent };
  static constexpr size_t kLength = 1024;  // TransformerEngine's default

  // `margin`: scales are 2^margin smaller than they could be. -64 to 64.
  explicit AmaxHistory(size_t length = kLength, Algorithm algorithm = Algorithm::kMax, int margin = 0);

  // Newest first; the oldest is dropped. Throws unless amax is 0 or more (infinity is).
  void push(float amax);
  // What scales are made of: the largest of the history, or the newest; 0 (a scale of 1) while there is none.
  float amax() const;
  int margin() const { return margin_; }
  size_t length() const { return length_; }
  Algorithm algorithm() const { return algorithm_; }
  std::vector<float> values() const;  // newest first

 private:
  size_t length_;
  Algorithm algorithm_;
  int margin_;
  std::vector<float> values_;  // a ring: the newest at next_ - 1
  size_t next_ = 0;
};

// Formats and shapes ------------------------------------------------------------------------------------------------

enum class Plane : uint8_t { kRow, kColumn };
std::string_view to_string(Plane plane);  // "row", "column"

enum class NvScaling : uint8_t { k1x16, k16x16 };
enum class Rounding : uint8_t { kNearest, kStochastic };
enum class Nonfinite : uint8_t { kError, kPropagate };

// What to quantise to. The defaults are weights'.
struct QuantSpec {
  Format format = Format::kMxfp8;
  NvScaling scaling = NvScaling::k16x16;  // nvfp4: 16x16 for weights, 1x16 for activations and gradients
  // nvfp4 of bf16: each 16 elements along M go through a random Hadamard transform on their way to the column plane.
  bool hadamard = false;
  // nvfp4: stochastic rounding draws from Philox4x32-10 by the element's place in the whole plane and the seed.
  Rounding rounding = Rounding::kNearest;
  uint64_t seed = 0;
  float eps = 0;  // fp8: amaxes below are taken as this
  std::optional<bool> power_of_two =
      std::nullopt;  // fp8: scales rounded down to powers of two; by default in the block formats
  int margin = 0;    // fp8 with one scale: 2^-margin of the largest scale (AmaxHistory::margin)
  // NaN, infinity, and an nvfp4 amax outside [7.9e-36, 7.5e35] other than 0: refused, or taken through the formulas.
  Nonfinite nonfinite = Nonfinite::kError;

  friend bool operator==(const QuantSpec&, const QuantSpec&) = default;
};

// Throws if a member does not go with the format, naming both.
void check_spec(const QuantSpec& spec);

// Rows and columns of one block of a plane, in the matrix's own directions: {1, 32} and {32, 1} for MXFP8. {0, 0}: one
// scale for all.
struct BlockShape {
  int64_t rows = 0;
  int64_t columns = 0;

  friend bool operator==(const BlockShape&, const BlockShape&) = default;
};
BlockShape block_shape(const QuantSpec& spec, Plane plane);

// True for formats whose bytes depend on the whole tensor's amax: one-scale FP8 and NVFP4.
bool needs_amax(Format format);

// Of an [M, K] matrix. Widths count elements: `code_columns` of f4 take half as many bytes.
struct PlaneShape {
  DType code_dtype = DType::kF8E4M3;
  int64_t code_rows = 0;
  int64_t code_columns = 0;
  DType scale_dtype = DType::kF32;
  int64_t scale_rows = 0;
  int64_t scale_columns = 0;
  int64_t gemm_rows = 0;  // of gemm_scales()
  int64_t gemm_columns = 0;

  int64_t code_row_bytes() const { return bytes_of(code_dtype, code_columns); }
  int64_t scale_row_bytes() const { return bytes_of(scale_dtype, scale_columns); }
  int64_t code_bytes() const { return code_rows * code_row_bytes(); }
  int64_t scale_bytes() const { return scale_rows * scale_row_bytes(); }
  int64_t gemm_bytes() const { return gemm_rows * bytes_of(scale_dtype, gemm_columns); }

  friend bool operator==(const PlaneShape&, const PlaneShape&) = default;
};
// Throws where the packed dim of nvfp4 is odd, or M is not whole groups of 16 under a Hadamard transform.
PlaneShape plane_shape(const QuantSpec& spec, Plane plane, int64_t rows, int64_t columns);

// Memory of a plane, not owned. Rows are `*_stride` bytes apart, at least a row's bytes.
struct PlaneMemory {
  std::byte* codes = nullptr;
  int64_t code_stride = 0;
  std::byte* scales = nullptr;
  int64_t scale_stride = 0;
};
struct ConstPlaneMemory {
  const std::byte* codes = nullptr;
  int64_t code_stride = 0;
  const std::byte* scales = nullptr;
  int64_t scale_stride = 0;
};

// Which planes of a tensor.
struct PlaneSet {
  bool row = false;
  bool column = false;

  bool empty() const { return !row && !column; }
  friend bool operator==(const PlaneSet&, const PlaneSet&) = default;
};
std::string_view to_string(PlaneSet planes);  // "row", "column", "row and column", "none"

// Whether the column plane is the row plane, transposed, codes and scales alike: one-scale and 128x128 FP8, and nvfp4
// with 16x16 scaling and rounding to nearest.
bool column_is_transposed_row(const QuantSpec& spec);

// How planes of a stack of [M, K] matrices lie in one block of memory, as a batch takes them: codes [matrices, ...],
// scales [matrices, ...] and amaxes (f32 [matrices], of formats that need them) of the row plane, then those of the
// column plane. Each begins at a multiple of 64 bytes.
struct QuantizedLayout {
  // Offsets in bytes.
  struct Place {
    PlaneShape shape{};
    int64_t codes = 0;
    int64_t scales = 0;
    int64_t amaxes = 0;
    int64_t end = 0;
  };
  std::optional<Place> row;
  std::optional<Place> column;
  int64_t bytes = 0;
};
// Throws as plane_shape() does, and for sizes beyond any memory.
QuantizedLayout quantized_layout(const QuantSpec& spec, PlaneSet planes, int64_t matrices, int64_t rows,
                                 int64_t columns);

// A stack of matrices whose elements lie elsewhere, quantised, by default options. Whoever writes the elements keeps
// it: ETP publishes such copies of its weights.
struct QuantizedCopy {
  Format format = Format::kNvfp4;
  PlaneSet planes = {};
  std::vector<const std::byte*> matrices = {};  // each in one block: quantized_layout() of one matrix
  // Whether it is the copy of what the elements are now; it then stays so until they are next written. Called on any
  // thread; never blocks or throws.
  std::function<bool()> current = {};
  std::shared_ptr<const void> keeper = {};  // of the blocks
};

// Quantising --------------------------------------------------------------------------------------------------------

// Where to; null codes: that plane is not wanted.
struct Planes {
  PlaneMemory row;
  PlaneMemory column;
};
// Amaxes of the whole tensor; read by formats that need them. The column's is another one under a Hadamard transform.
struct PlaneAmax {
  float row = 0;
  float column = 0;
};
// A shard of an [M, K] matrix begins here, at whole blocks: only stochastic rounding asks.
struct Origin {
  int64_t first_row = 0;
  int64_t first_column = 0;
  int64_t rows = 0;  // the whole matrix's; 0: the view is the whole
  int64_t columns = 0;
  int64_t first_element = 0;  // of the matrix in a stack of them
};

// Quantises to one plane or both, in one pass over the input. Where the spec does not let NaN and infinity through and
// there is one, throws an error that says how many and where the first is; what was written is undefined then. While
// `*noop` is not 0, nothing is read or written.
void quantize(const MatrixView& matrix, const QuantSpec& spec, PlaneAmax amax, const Planes& planes,
              Parallel parallel = {}, const Origin& origin = {}, const float* noop = nullptr);

// The inverse, into f32, f16 or bf16 [rows, columns] at `dst`, computed in f32 and rounded once. `amax`: nvfp4's.
struct MatrixMemory {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;  // elements
};
void dequantize(const QuantSpec& spec, Plane plane, const ConstPlaneMemory& from, float amax, const MatrixMemory& to,
                Parallel parallel = {});

// What follows a gather ---------------------------------------------------------------------------------------------

// Compact scales of an [M, K] matrix's plane in the layout that GEMMs read, PlaneShape::gemm_bytes() at `to`. E4M3 and
// E8M0: tiles of 128 rows by 4 columns of scales, zeros around; MXFP8's column scales are transposed first. fp32 of
// blocks: rows padded to a multiple of 4. One scale: itself.
void gemm_scales(const QuantSpec& spec, Plane plane, int64_t rows, int64_t columns, const std::byte* scales,
                 int64_t scale_stride, std::byte* to);

// Column planes of `ranks` shards along M, gathered one behind the other as [ranks * rows, row_bytes], to
// [rows, ranks * row_bytes]: for codes and scales of transposed planes. The memories must not overlap.
void deinterleave_columns(const std::byte* gathered, int64_t ranks, int64_t rows, int64_t row_bytes, std::byte* to,
                          Parallel parallel = {});

// Transposes codes and scales of a row plane to those of the column plane. Throws unless column_is_transposed_row().
void transpose_plane(const QuantSpec& spec, int64_t rows, int64_t columns, const ConstPlaneMemory& row,
                     const PlaneMemory& column, Parallel parallel = {});

}  // namespace tessera
