#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "codec/simd/stream.h"
#include "exec/pull/compiler.h"
#include "exec/pull/get_batch.h"
#include "exec/pull/pull_program.h"
#include "exec/pull/staging.h"

namespace tessera {

PullRun::PullRun(std::shared_ptr<const PullProgram> program, WorkerPool& pool, Done done,
                 std::shared_ptr<ByteStream> stream, const RunOptions& options)
    : TransferRun(pool, std::move(done), program->impl().digest ? program->impl().digests.size() : 0),
      program_(std::move(program)),
      stream_(std::move(stream)),
      options_(options),
      travel_(program_->routes(), Travel::kFull),
      staging_(std::make_unique<PullStaging>(program_->impl(), static_cast<size_t>(pool.threads()))) {
  TESSERA_CHECK_EQ(program_->wants_stream(), stream_ != nullptr);
}

PullRun::~PullRun() = default;

void PullRun::travel(std::span<const Travel> routes, std::span<const int64_t> delta_bytes) {
  TESSERA_CHECK(!running());
  TESSERA_CHECK_EQ(routes.size(), travel_.size());
  std::ranges::copy(routes, travel_.begin());
  any_delta_ = std::ranges::count(routes, Travel::kDelta) > 0;
  if (!stream_ || !any_delta_) return;
  TESSERA_CHECK_EQ(delta_bytes.size(), routes.size());
  std::ranges::copy(delta_bytes, staging_->delta_bytes.begin());
  staging_->layout.clear();
  for (const StreamPart& part : program_->impl().stream_parts) staging_->layout.add(streamed_bytes(part));
}

void PullRun::pass(Pass pass) {
  TESSERA_CHECK(!running());
  TESSERA_CHECK(pass == Pass::kPull || program_->only_maps());
  pass_ = pass;
}

int64_t PullRun::bytes() const {
  return program_->bytes();
}

// The stream comes first: it has a peer waiting at its other end.
size_t PullRun::units() const {
  const PullProgram::Impl& program = program_->impl();
  return (stream_ ? 1 : 0) + program.get_units.size() + program.mapped_units.size() + program.wire_units.size() +
         program.fetched_wire.size() + (any_delta_ ? program.delta_units.size() : 0);
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
    if (index == 0) return drain_stream(scratch);
    --index;
  }
  if (index < program.get_units.size()) {
    run_get(program.get_units[index], scratch);
  } else if (index -= program.get_units.size(); index < program.mapped_units.size()) {
    run_mapped(program.mapped_units[index]);
  } else if (index -= program.mapped_units.size(); index < program.wire_units.size()) {
    run_wire(program.wire_units[index]);
  } else if (index -= program.wire_units.size(); index < program.fetched_wire.size()) {
    run_fetched_wire(program.fetched_wire[index]);
  } else {
    run_delta(program.delta_units[index - program.fetched_wire.size()], scratch);
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
  const bool digests = program.digest && pass_ != Pass::kCopy;
  const auto atoms_of = [&](uint32_t p) { return program.mapped[p].walk.atoms(); };
  int64_t bytes = 0;
  for_each_part(unit, atoms_of, [&](uint32_t p, int64_t first, int64_t last) {
    const PullPart& part = program.mapped[p];
    if (!in_full(part.route)) return;
    Digest digest{.elements = static_cast<uint64_t>((last - first) * part.elements_per_atom)};
    const PartDigest how = digests ? PartDigest(sample(), part.tensor, part.image) : PartDigest();
    if (pass_ != Pass::kDigest)
      part.walk.visit(first, last, [&](const Block& block) {
        part.kernel.run(block, part.mapped, part.data, how.into(digest), how.sample());
      });
    else if (how.any())
      part.walk.visit(first, last, [&](const Block& block) {
        digest_block(digest, block, part.mapped, part.kernel.source_bytes(), how.sample());
      });
    bytes += (last - first) * part.kernel.source_bytes();
    if (!digests) return;
    if (last - first == part.walk.atoms()) {
      put_digest(part.route, digest);
    } else {
      add_digest(part.route, digest);
    }
  });
  add_bytes(bytes);
}

void PullRun::run_wire(const Unit& unit) {
  const PullProgram::Impl& program = program_->impl();
  const auto bands_of = [&](uint32_t p) {
    return program.wire[p].piece.access == Access::kMap ? program.wire[p].reader->piece().walk().all_bands() : 0;
  };
  for_each_part(unit, bands_of, [&](uint32_t p, int64_t first, int64_t last) {
    if (first < last) read_bands(p, program.wire[p].piece.mapped, first, last);
  });
}

void PullRun::run_fetched_wire(uint32_t index) {
  const WirePart& part = program_->impl().wire[index];
  if (!in_full(part.route)) return;
  FetchRooms::Room room(staging_->rooms);
  const std::span<std::byte> piece = room.bytes().first(static_cast<size_t>(part.reader->piece().bytes()));
  if (Status status = fetch(program_->peer(), part.piece, 0, piece); !status.ok()) return abort(status);
  read_bands(index, piece.data(), 0, part.reader->piece().walk().all_bands());
}

void PullRun::read_bands(uint32_t index, const std::byte* from, Index first, Index last) {
  const PullProgram::Impl& program = program_->impl();
  const WirePart& part = program.wire[index];
  if (!in_full(part.route)) return;
  Digest main, rest;
  const Index step = part.reader->bands_at_once();
  for (Index band = first; band < last && !aborted(); band += step) {
    const Index end = std::min(last, band + step);
    if (program.digest) part.reader->piece().digest(from, band, end, main, rest);
    add_bytes(part.reader->read(from, band, end));
  }
  if (!program.digest) return;
  add_digest(part.route, main);
  add_digest(program.digests.second(part.route), rest);
}

void PullRun::run_delta(const Unit& unit, std::span<std::byte> scratch) {
  const PullProgram::Impl& program = program_->impl();
  const auto segments_of = [&](uint32_t p) {
    return program.delta[p].piece.access == Access::kStream ? 0 : program.delta[p].reader.piece().segments();
  };
  for_each_part(unit, segments_of, [&](uint32_t p, int64_t first, int64_t last) {
    const DeltaPart& part = program.delta[p];
    if (first == last || travel_[part.route] != Travel::kDelta) return;
    const DeltaPiece& piece = part.reader.piece();
    std::optional<FetchRooms::Room> room;
    if (part.piece.access == Access::kGet) room.emplace(staging_->rooms);
    Digest digest;
    for (int64_t segment = first; segment < last && !aborted(); ++segment) {
      DeltaSegment from;
      if (!room) {
        from = DeltaSegment::of_piece(piece, part.piece.mapped, segment);
      } else if (Status status = fetch_segment(program_->peer(), part, segment, room->bytes(), from); !status.ok()) {
        return abort(status);
      }
      apply_segment(part, segment, from, scratch, digest);
      add_bytes(piece.segment_atoms(segment) * piece.atom_bytes());
    }
    add_delta_digest(p, digest);
  });
}

void PullRun::apply_segment(const DeltaPart& part, int64_t segment, const DeltaSegment& from,
                            std::span<std::byte> scratch, Digest& digest) const {
  const bool digests = program_->impl().digest;
  const bool copies = part.reader.copies();
  part.reader.apply(segment, from, scratch, digests && !copies ? &digest : nullptr);
  if (digests && copies) part.reader.digest(segment, digest);
}

void PullRun::add_delta_digest(uint32_t index, const Digest& digest) {
  const PullProgram::Impl& program = program_->impl();
  const DeltaPart& part = program.delta[index];
  if (program.digest) add_digest(part.reader.copies() ? part.route : program.digests.second(part.route), digest);
}

void PullRun::run_get(const Unit& unit, std::span<std::byte> scratch) {
  const PullProgram::Impl& program = program_->impl();
  const auto on_finished = [&](const PullPart& part, int64_t atoms, const Digest& digest) {
    finished(part, atoms, digest);
  };
  GetBatch batch(program, scratch, sample());
  Status status;
  const auto atoms_of = [&](uint32_t p) { return program.get[p].walk.atoms(); };
  for_each_part(unit, atoms_of, [&](uint32_t p, int64_t first, int64_t last) {
    if (status.ok() && in_full(program.get[p].route)) status = batch.add(program.get[p], first, last, on_finished);
  });
  if (status.ok()) status = batch.finish(on_finished);
  if (!status.ok()) abort(status);
}

}  // namespace tessera
