// The sender's side of quantised routes, in two passes over what it sends:
//
//   AmaxRun     amaxes of blocks and matrices, into QuantizeAmaxes; finds non-finite values
//               (the caller makes all ranks agree on amaxes and on cut blocks, and overwrites them)
//   EncodeRun   wire pieces (exec/wire/wire_piece.h) and their digests
//
// A route that has planes may be taken from them instead: then the first pass leaves it out, and the second copies.
//
// A block is *cut* if this rank does not hold all of its elements. The amax of any other block is complete here, even
// if routes cut it, since AmaxRun looks at all elements that this rank holds of the blocks that it sends. Every rank
// that holds some of a cut block reports it, so that all of it is covered: what two ranks hold of a tensor is equal or
// disjoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "exec/digests.h"
#include "exec/transfer_run.h"
#include "exec/units.h"
#include "exec/wire/plane_reader.h"
#include "exec/wire/wire_piece.h"

namespace tessera {

struct QuantizeRoute {
  uint32_t tensor = 0;  // ordinal in the batch
  WireRegion what{};
  LocalArray src{};  // owns what.region; of what.src_dtype
  std::optional<PlaneSource> planes = std::nullopt;
};

// A block of which other ranks, or other parts of a fused matrix, hold some elements.
struct CutBlock {
  Index matrix = 0;     // of the tensor, row-major over its stack
  Index block_row = 0;  // counted from the blocks' origin
  Index block_column = 0;
  size_t place = 0;  // in QuantizeAmaxes::blocks()
};

// Compiled once at registration. Immutable, hence thread-safe.
class QuantizeProgram {
 public:
  // Throws as BlockWalk does, and for arrays larger than any memory.
  explicit QuantizeProgram(std::span<const QuantizeRoute> routes);
  ~QuantizeProgram();

  size_t routes() const;
  const WirePiece& piece(size_t route) const;
  // The matrix of the tensor for a place in QuantizeAmaxes::matrices().
  Index matrix_of(size_t route, Index place) const;
  Index cut_block_count(size_t route) const;
  std::vector<CutBlock> cut_blocks(size_t route) const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<const Impl> impl_;
};

// Written by one pass and read by the other. Not thread-safe: do not change it while a run uses it.
class QuantizeAmaxes {
 public:
  explicit QuantizeAmaxes(const QuantizeProgram& program);

  // For each matrix of a route; empty for formats that need none.
  std::span<float> matrices(size_t route) { return span_of(matrices_, route); }
  // [matrices][touched block rows][touched block columns]; empty for formats with one scale.
  std::span<float> blocks(size_t route) { return span_of(blocks_, route); }

 private:
  struct Range {
    size_t first = 0;
    size_t count = 0;
  };
  std::span<float> span_of(const std::vector<Range>& ranges, size_t route) {
    return std::span(values_).subspan(ranges[route].first, ranges[route].count);
  }

  std::vector<float> values_;
  std::vector<Range> matrices_, blocks_;
};

// A NaN or an infinity.
struct NonfiniteValue {
  uint32_t tensor = 0;
  uint64_t index = 0;  // row-major in the whole tensor
  float value = 0;
};

class AmaxRun final : public TransferRun {
 public:
  AmaxRun(std::shared_ptr<const QuantizeProgram> program, std::shared_ptr<QuantizeAmaxes> amaxes, WorkerPool& pool,
          Done done);
  ~AmaxRun() override;

  // Sets where the routes' local tensors begin; before start(). Null: that route is taken from planes, and this run
  // does not look at it. REQUIRES: one for each route.
  void read_from(std::span<const std::byte* const> data);

  int64_t bytes() const override { return bytes_; }  // in the sources' dtypes, of all elements that it looks at
  // The first one by tensor and index; valid once the run has ended.
  std::optional<NonfiniteValue> nonfinite() const;

 private:
  size_t units() const override;
  void run_unit(size_t index, std::span<std::byte> scratch) override;
  void prepare(uint32_t epoch) override;
  void interrupt(const Status& /*status*/) override {}
  void run_bands(size_t route, Index matrix, const Interval& bands);
  void note(size_t route, const BlockBox& box, const codec::NonfiniteElements& found);

  std::shared_ptr<const QuantizeProgram> program_;
  std::shared_ptr<QuantizeAmaxes> amaxes_;
  std::vector<const std::byte*> data_;
  int64_t bytes_ = 0;
  mutable Mutex mutex_;
  std::optional<NonfiniteValue> nonfinite_ GUARDED_BY(mutex_);
};

// digests(): each route's image (codes and owned scales), and each route's rest (DigestTable).
class EncodeRun final : public TransferRun {
 public:
  struct Memory {
    const std::byte* data = nullptr;  // the local tensor's first element
    std::byte* piece = nullptr;       // WirePiece::bytes()
    std::vector<PlaneSource::Matrix> planes = {};
  };
  EncodeRun(std::shared_ptr<const QuantizeProgram> program, std::shared_ptr<QuantizeAmaxes> amaxes,
            std::vector<Memory> memory, bool digest, WorkerPool& pool, Done done);
  ~EncodeRun() override;

  // As AmaxRun's; until then those of the constructor.
  void read_from(std::span<const std::byte* const> data);

  int64_t bytes() const override;  // in the sources' dtypes
  // REQUIRES: it has digests
  const Digest& rest(size_t route) const { return digests()[table_.second(route)]; }

 private:
  size_t units() const override;
  void run_unit(size_t index, std::span<std::byte> scratch) override;
  void prepare(uint32_t /*epoch*/) override {}
  void interrupt(const Status& /*status*/) override {}
  void encode(size_t route, Index first, Index last);

  std::shared_ptr<const QuantizeProgram> program_;
  std::shared_ptr<QuantizeAmaxes> amaxes_;
  std::vector<Memory> memory_;
  const DigestTable table_;  // empty without digests
};

}  // namespace tessera
