#include "exec/wire/quantize_run.h"

#include <algorithm>
#include <atomic>
#include <tuple>
#include <utility>

#include "base/fail.h"
#include "base/fail_point.h"
#include "exec/wire/quantize_program.h"

namespace tessera {
namespace {

constexpr int64_t kAbortBytes = int64_t{1} << 20;     // between two checks for abort()
constexpr int64_t kEncodeBytes = int64_t{128} << 10;  // encoded, then digested while the codes are in the cache

// Visits a part's bands [first, last), several at a time: about `bytes` of the source.
template <typename Visit>
void for_each_stretch(const BlockWalk& walk, DType dtype, Index first, Index last, int64_t bytes, const Visit& visit) {
  const Index step = std::max<Index>(bytes / std::max<int64_t>(bytes_of(dtype, walk.band_elements()), 1), 1);
  for (; first < last; first += step) visit(first, std::min(last, first + step));
}

void raise(float& amax, float to) {
  std::atomic_ref<float> shared(amax);
  float seen = shared.load(std::memory_order_relaxed);
  while (seen < to && !shared.compare_exchange_weak(seen, to, std::memory_order_relaxed)) {
  }
}

}  // namespace

AmaxRun::AmaxRun(std::shared_ptr<const QuantizeProgram> program, std::shared_ptr<QuantizeAmaxes> amaxes,
                 WorkerPool& pool, Done done)
    : TransferRun(pool, std::move(done), 0),
      program_(std::move(program)),
      amaxes_(std::move(amaxes)),
      data_(program_->routes()) {}

AmaxRun::~AmaxRun() = default;

void AmaxRun::read_from(std::span<const std::byte* const> data) {
  TESSERA_CHECK(!running());
  TESSERA_CHECK_EQ(data.size(), data_.size());
  std::ranges::copy(data, data_.begin());
  bytes_ = 0;
  for (size_t r = 0; r < data_.size(); ++r)
    if (data_[r] != nullptr) bytes_ += program_->impl().parts[r].looked_at();
}

size_t AmaxRun::units() const {
  return program_->impl().amax_units.size();
}

void AmaxRun::prepare(uint32_t /*epoch*/) {
  {
    const MutexLock lock(mutex_);
    nonfinite_.reset();
  }
  for (size_t r = 0; r < program_->routes(); ++r) std::ranges::fill(amaxes_->matrices(r), 0.0F);
}

void AmaxRun::run_unit(size_t index, std::span<std::byte> /*scratch*/) {
  fail_point("wire: look");
  const QuantizeProgram::Impl& program = program_->impl();
  const auto bands_of = [&](uint32_t p) { return program.parts[p].look.all_bands(); };
  for_each_part(program.amax_units[index], bands_of, [&](uint32_t p, Index first, Index last) {
    if (data_[p] == nullptr) return;
    const QuantizePart& part = program.parts[p];
    for_each_stretch(part.look, part.seen.src_dtype, first, last, kAbortBytes, [&](Index begin, Index end) {
      if (aborted()) return;
      part.look.for_each_matrix(begin, end, [&](Index matrix, const Interval& bands) { run_bands(p, matrix, bands); });
    });
  });
}

void AmaxRun::run_bands(size_t route, Index matrix, const Interval& bands) {
  const QuantizePart& part = program_->impl().parts[route];
  const codec::BlockFormat& format = part.format();
  const Index across = part.look.block_columns().size();
  float whole = 0;
  std::span<float> grid(&whole, 1);
  if (!format.one_scale())
    grid = amaxes_->blocks(route).subspan(part.grid_place(matrix, bands.begin, 0),
                                          static_cast<size_t>(bands.size() * across));
  std::ranges::fill(grid, 0.0F);
  const Index first = matrix * part.look.bands();
  int64_t elements = 0;
  part.look.for_each_box(first + bands.begin, first + bands.end, [&](const BlockBox& box) {
    const Index block_row = format.one_scale() ? 0 : box.block_row - bands.begin;
    codec::NonfiniteElements found;
    codec::add_block_amaxes(format, matrix_box(part.seen, box, part.look_at, data_[route], part.seen.src_dtype),
                            {grid.data() + block_row * across + box.block_column, across}, found);
    if (found.count > 0) note(route, box, found);
    elements += box.rows.size() * box.columns.size();
  });
  const std::span<float> amaxes = amaxes_->matrices(route);
  if (!amaxes.empty()) raise(amaxes[static_cast<size_t>(matrix)], *std::ranges::max_element(grid));
  add_bytes(bytes_of(part.seen.src_dtype, elements));
}

std::optional<NonfiniteValue> AmaxRun::nonfinite() const {
  const MutexLock lock(mutex_);
  return nonfinite_;
}

void AmaxRun::note(size_t route, const BlockBox& box, const codec::NonfiniteElements& found) {
  const QuantizePart& part = program_->impl().parts[route];
  const BoxOffsets places(part.seen, Region::full(part.seen.shape), element_strides(part.seen.shape));
  const Index place = places.of(box) + found.row * places.row_stride() + found.column;
  const NonfiniteValue value{part.tensor, static_cast<uint64_t>(place), found.value};
  const MutexLock lock(mutex_);
  if (!nonfinite_ || std::tie(value.tensor, value.index) < std::tie(nonfinite_->tensor, nonfinite_->index))
    nonfinite_ = value;
}

EncodeRun::EncodeRun(std::shared_ptr<const QuantizeProgram> program, std::shared_ptr<QuantizeAmaxes> amaxes,
                     std::vector<Memory> memory, bool digest, WorkerPool& pool, Done done)
    : TransferRun(pool, std::move(done), digest ? 2 * program->routes() : 0),
      program_(std::move(program)),
      amaxes_(std::move(amaxes)),
      memory_(std::move(memory)),
      table_(digest ? program_->routes() : 0, SecondDigest::kRest) {
  TESSERA_CHECK_EQ(memory_.size(), program_->routes());
}

EncodeRun::~EncodeRun() = default;

void EncodeRun::read_from(std::span<const std::byte* const> data) {
  TESSERA_CHECK(!running());
  TESSERA_CHECK_EQ(data.size(), memory_.size());
  for (size_t r = 0; r < memory_.size(); ++r) memory_[r].data = data[r];
}

int64_t EncodeRun::bytes() const {
  return program_->impl().encode_bytes;
}

size_t EncodeRun::units() const {
  return program_->impl().encode_units.size();
}

void EncodeRun::run_unit(size_t index, std::span<std::byte> /*scratch*/) {
  fail_point("wire: encode");
  const QuantizeProgram::Impl& program = program_->impl();
  const auto bands_of = [&](uint32_t p) { return program.parts[p].piece.walk().all_bands(); };
  for_each_part(program.encode_units[index], bands_of, [&](uint32_t p, Index first, Index last) {
    const WirePiece& piece = program.parts[p].piece;
    Digest main, rest;
    for_each_stretch(piece.walk(), piece.what().src_dtype, first, last, kEncodeBytes, [&](Index begin, Index end) {
      if (aborted()) return;
      encode(p, begin, end);
      if (table_.size() != 0) piece.digest(memory_[p].piece, begin, end, main, rest);
    });
    if (table_.size() == 0) return;
    add_digest(p, main);
    add_digest(table_.second(p), rest);
  });
}

void EncodeRun::encode(size_t route, Index first, Index last) {
  const QuantizePart& part = program_->impl().parts[route];
  const WirePiece& piece = part.piece;
  const auto& [data, to, planes] = memory_[route];
  if (data == nullptr && part.planes) {
    const Index copied = part.planes->read(piece, planes, first, last, to);
    return add_bytes(bytes_of(piece.what().src_dtype, copied));
  }
  const std::span<const float> amaxes = amaxes_->matrices(route);
  const float* const blocks = amaxes_->blocks(route).data();
  const auto grid_at = [&](Index matrix, Index block_row, Index block_column) {
    return part.format().one_scale() ? nullptr : blocks + part.grid_place(matrix, block_row, block_column);
  };
  const auto amax_of = [&](Index matrix) { return amaxes.empty() ? 0 : amaxes[static_cast<size_t>(matrix)]; };
  const Index across = piece.walk().block_columns().size();
  int64_t elements = 0;
  piece.walk().for_each_box(first, last, [&](const BlockBox& box) {
    const float* grid =
        part.format().one_scale() ? nullptr : blocks + part.grid_place(box.matrix, box.block_row, box.block_column);
    part.encoder.codes(amax_of(box.matrix), matrix_box(piece.what(), box, part.send, data, piece.what().src_dtype),
                       {grid, across}, {to + piece.codes(box), piece.row_bytes(), piece.odd(box)});
    elements += box.rows.size() * box.columns.size();
  });
  piece.walk().for_each_matrix(first, last, [&](Index matrix, const Interval& bands) {
    const Interval rows = piece.walk().block_rows_of(bands);
    const float amax = amax_of(matrix);
    part.encoder.scales(amax, grid_at(matrix, rows.begin, 0), rows.size() * across,
                        to + piece.scale(matrix, rows.begin, 0));
    if (bands.begin == 0 && !amaxes.empty()) std::memcpy(to + piece.amax(matrix), &amax, sizeof(amax));
  });
  add_bytes(bytes_of(piece.what().src_dtype, elements));
}

}  // namespace tessera
