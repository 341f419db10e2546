#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "codec/simd/stream.h"
#include "exec/pull/compiler.h"
#include "exec/pull/get_batch.h"
#include "exec/pull/pull_program.h"

namespace tessera {

PullRun::PullRun(std::shared_ptr<const PullProgram> program, WorkerPool& pool, Done done,
                 std::unique_ptr<ByteStream> stream, const RunOptions& options)
    : TransferRun(pool, std::move(done),
                  program->impl().digest ? program->routes() + program->wire_routes() + program->delta_routes() : 0),
      program_(std::move(program)),
      stream_(std::move(stream)),
      options_(options),
      travel_(program_->routes(), Travel::kFull) {
  TESSERA_CHECK_EQ(program_->wants_stream(), stream_ != nullptr);
}

PullRun::~PullRun() = default;

void PullRun::travel(std::span<const Travel> routes) {
  TESSERA_CHECK(!running() && !stream_);
  TESSERA_CHECK_EQ(routes.size(), travel_.size());
  std::ranges::copy(routes, travel_.begin());
  any_delta_ = std::ranges::count(routes, Travel::kDelta) > 0;
}

int64_t PullRun::bytes() const {
  return program_->bytes();
}

// The stream comes first: it has a peer waiting at its other end.
size_t PullRun::units() const {
  const PullProgram::Impl& program = program_->impl();
  return (stream_ ? 1 : 0) + program.get_units.size() + program.mapped_units.size() + program.wire_units.size() +
         (any_delta_ ? program.delta_units.size() : 0);
}

void PullRun::prepare(uint32_t epoch) {
  epoch_ = epoch;
}

void PullRun::interrupt(const Status& status) {
  if (stream_) stream_->interrupt(status);
}

void PullRun::run_unit(size_t index, std::span<std::byte> scratch) {
  const PullProgram::Impl& program = program_->impl();
  if (stream_) {
    if (index == 0) return drain_stream();
    --index;
  }
  if (index < program.get_units.size()) {
    run_get(program.get_units[index], scratch);
  } else if (index -= program.get_units.size(); index < program.mapped_units.size()) {
    run_mapped(program.mapped_units[index]);
  } else if (index -= program.mapped_units.size(); index < program.wire_units.size()) {
    run_wire(program.wire_units[index]);
  } else {
    run_delta(program.delta_units[index - program.wire_units.size()], scratch);
  }
  stream_fence();
}

void PullRun::finished(const PullPart& part, int64_t atoms, Digest digest) {
  add_bytes(atoms * part.kernel.source_bytes());
  if (!program_->impl().digest) return;
  digest.elements = static_cast<uint64_t>(atoms * part.elements_per_atom);
  add_digest(part.route, digest);
}

void PullRun::run_mapped(const Unit& unit) {
  const PullProgram::Impl& program = program_->impl();
  const auto atoms_of = [&](uint32_t p) { return program.mapped[p].walk.atoms(); };
  for_each_part(unit, atoms_of, [&](uint32_t p, int64_t first, int64_t last) {
    const PullPart& part = program.mapped[p];
    if (!in_full(part.route)) return;
    Digest digest;
    part.walk.visit(first, last, [&](const Block& block) {
      part.kernel.run(block, part.mapped, part.data, program.digest ? &digest : nullptr);
    });
    finished(part, last - first, digest);
  });
}

void PullRun::run_wire(const Unit& unit) {
  const PullProgram::Impl& program = program_->impl();
  const auto bands_of = [&](uint32_t p) { return program.wire[p].reader->piece().walk().all_bands(); };
  for_each_part(unit, bands_of, [&](uint32_t p, int64_t first, int64_t last) {
    const WirePart& part = program.wire[p];
    if (!in_full(part.route)) return;
    Digest main, rest;
    const Index step = part.reader->bands_at_once();
    for (Index band = first; band < last && !aborted(); band += step) {
      const Index end = std::min(last, band + step);
      if (program.digest) part.reader->digest(band, end, main, rest);
      add_bytes(part.reader->read(band, end));
    }
    if (!program.digest) return;
    add_digest(part.route, main);
    add_digest(program.routes + p, rest);
  });
}

void PullRun::run_delta(const Unit& unit, std::span<std::byte> scratch) {
  const PullProgram::Impl& program = program_->impl();
  const auto segments_of = [&](uint32_t p) { return program.delta[p].reader.piece().segments(); };
  for_each_part(unit, segments_of, [&](uint32_t p, int64_t first, int64_t last) {
    const DeltaPart& part = program.delta[p];
    if (travel_[part.route] != Travel::kDelta) return;
    const bool copies = part.reader.copies();
    Digest digest;
    for (int64_t segment = first; segment < last && !aborted(); ++segment) {
      part.reader.apply(segment, scratch, program.digest && !copies ? &digest : nullptr);
      if (program.digest && copies) part.reader.digest(segment, digest);
      add_bytes(part.reader.piece().segment_atoms(segment) * part.reader.piece().atom_bytes());
    }
    if (program.digest) add_digest(copies ? part.route : program.routes + program.wire.size() + p, digest);
  });
}

void PullRun::run_get(const Unit& unit, std::span<std::byte> scratch) {
  const PullProgram::Impl& program = program_->impl();
  const auto on_finished = [&](const PullPart& part, int64_t atoms, const Digest& digest) {
    finished(part, atoms, digest);
  };
  GetBatch batch(program, scratch);
  Status status;
  const auto atoms_of = [&](uint32_t p) { return program.get[p].walk.atoms(); };
  for_each_part(unit, atoms_of, [&](uint32_t p, int64_t first, int64_t last) {
    if (status.ok() && in_full(program.get[p].route)) status = batch.add(program.get[p], first, last, on_finished);
  });
  if (status.ok()) status = batch.finish(on_finished);
  if (!status.ok()) abort(status);
}

void PullRun::drain_stream() {
  const PullProgram::Impl& program = program_->impl();
  StreamLayout::Cursor cursor(program.stream);
  // Now, not at start(): the sender counts from here how long nothing moves. It forgets an abort() before it, hence
  // aborted() comes after.
  stream_->begin_consume(epoch_);
  while (!cursor.at_end() && !aborted()) {
    const size_t expected = cursor.frame_bytes();
    const std::span<const std::byte> frame = stream_->acquire(Deadline::after(options_.stall));
    if (frame.size() != expected) {
      const Status why = stream_->status();
      if (!why.ok()) return abort(Status(why.code(), fmt::format("{}: {}", program.peer->name(), why.message())));
      if (frame.empty())
        return abort(failed(ErrorCode::kDeadlineExceeded, "{}: nothing came through the {} for {:.0f} s",
                            program.peer->name(), stream_->name(), to_seconds(options_.stall)));
      return abort(failed(ErrorCode::kDataLoss, "{}: a frame of {} bytes in the {}, {} expected", program.peer->name(),
                          frame.size(), stream_->name(), expected));
    }
    cursor.visit_frame([&](size_t p, int64_t first, int64_t last, size_t at) {
      const PullPart& part = program.streamed[p];
      const int64_t bytes = part.kernel.source_bytes();
      Digest digest;
      unpack(part, first / bytes, last / bytes, frame.data() + at, program.digest ? &digest : nullptr);
      finished(part, (last - first) / bytes, digest);
    });
    stream_->release();
  }
  stream_fence();
}

}  // namespace tessera
