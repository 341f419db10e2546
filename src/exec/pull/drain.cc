// The part of a PullRun that comes through a stream.
#include <cstring>

#include "base/fail.h"
#include "codec/simd/stream.h"
#include "exec/pull/compiler.h"
#include "exec/pull/get_batch.h"
#include "exec/pull/pull_program.h"
#include "exec/pull/staging.h"

namespace tessera {

// What it carries of a route this time.
int64_t PullRun::streamed_bytes(const StreamPart& part) const {
  if (travel_[part.route] != Travel::kDelta) return part.bytes;
  const bool with_it = program_->impl().delta[part.delta].piece.access == Access::kStream;
  return with_it ? staging_->delta_bytes[part.route] : 0;
}

void PullRun::drain_stream(std::span<std::byte> scratch) {
  const PullProgram::Impl& program = program_->impl();
  StreamLayout::Cursor cursor(any_delta_ ? staging_->layout : program.stream);
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
        return abort(failed(ErrorCode::kDeadlineExceeded, "{}: nothing came through the {} for {:.0f} s"_message,
                            program.peer->name(), stream_->name(), to_seconds(options_.stall)));
      return abort(failed(ErrorCode::kDataLoss, "{}: a frame of {} bytes in the {}, {} expected"_message,
                          program.peer->name(), frame.size(), stream_->name(), expected));
    }
    Status status;
    cursor.visit_frame([&](size_t p, int64_t first, int64_t last, size_t at) {
      if (status.ok()) status = take_bytes(p, first, frame.subspan(at, static_cast<size_t>(last - first)), scratch);
    });
    if (!status.ok()) return abort(status);
    stream_->release();
  }
  stream_fence();
}

// Bytes of part `index` of the stream, the next ones from `first` on.
Status PullRun::take_bytes(size_t index, int64_t first, std::span<const std::byte> bytes,
                           std::span<std::byte> scratch) {
  const PullProgram::Impl& program = program_->impl();
  const StreamPart& part = program.stream_parts[index];
  const int64_t last = first + static_cast<int64_t>(bytes.size());
  if (part.wire != StreamPart::kNone) {
    std::memcpy(staging_->wire.data() + first, bytes.data(), bytes.size());
    if (last == part.bytes)
      read_bands(part.wire, staging_->wire.data(), 0, program.wire[part.wire].reader->piece().walk().all_bands());
    return {};
  }
  if (travel_[part.route] == Travel::kDelta) return take_delta(part, first, last, bytes, scratch);
  const PullPart& plain = program.streamed[part.plain];
  const int64_t atom = plain.kernel.source_bytes();
  Digest digest;
  const PartDigest how = program.digest ? PartDigest(sample(), plain.tensor, plain.image) : PartDigest();
  unpack(plain, first / atom, last / atom, bytes.data(), how.into(digest), how.sample());
  finished(plain, (last - first) / atom, digest);
  return {};
}

Status PullRun::take_delta(const StreamPart& part, int64_t first, int64_t last, std::span<const std::byte> bytes,
                           std::span<std::byte> scratch) {
  const DeltaPart& delta = program_->impl().delta[part.delta];
  const DeltaPiece& piece = delta.reader.piece();
  if (first == 0) {
    staging_->delta.begin(piece);
    staging_->digest = {};
  }
  const bool fits = staging_->delta.add(bytes, [&](int64_t segment, const DeltaSegment& from) {
    delta.reader.apply(segment, from, scratch,
                       program_->impl().digest && !delta.reader.copies() ? &staging_->digest : nullptr);
  });
  const bool ends = last == staging_->delta_bytes[part.route];
  if (!fits || ends != staging_->delta.whole())
    return failed(ErrorCode::kDataLoss, "{}: a delta of {} bytes in the {}, which holds another"_message,
                  program_->peer().name(), staging_->delta_bytes[part.route], stream_->name());
  if (!ends) return {};
  if (program_->impl().digest && delta.reader.copies())
    for (int64_t segment = 0; segment < piece.segments(); ++segment) delta.reader.digest(segment, staging_->digest);
  add_delta_digest(part.delta, staging_->digest);
  add_bytes(piece.full_bytes());
  return {};
}

}  // namespace tessera
