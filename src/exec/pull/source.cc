#include "exec/pull/source.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/fail.h"
#include "codec/simd/stream.h"
#include "exec/pull/stream_cursor.h"
#include "exec/units.h"
#include "exec/walk/copy_block.h"
#include "exec/walk/route_walk.h"

namespace tessera {
namespace {

// What a route covers of its tensor: all that is read of a route that has no bytes in a sample.
struct Cover {
  uint32_t route = 0;
  uint32_t tensor = 0;
  int64_t atoms = 0;
  int64_t atom_bytes = 1;
  int64_t elements_per_atom = 1;
  ImageRange image{};
};

// One route. With a stream, `walk` goes from the source array into the packed frame.
struct SourcePart {
  Cover cover;
  BlockKernel kernel;
  Walk walk;
  const std::byte* data = nullptr;  // first element of the source
  bool digested = true;
  const std::byte* delta = nullptr;
  std::optional<DeltaPiece> piece{};  // of it
};

constexpr int64_t kDigestUnitBytes = 128 << 10;
constexpr int64_t kSampledUnitBytes = int64_t{DigestSample::kOneIn} << 20;  // a megabyte is read

const std::byte* first_byte(const SourcePart& part, int64_t atom) {
  const std::byte* byte = nullptr;
  part.walk.visit(atom, atom + 1, [&](const Block& block) { byte = part.data + block.offset[kSource]; });
  return byte;
}

// Units in the order of memory. If they are small and two receivers take halves of the same rows, the second half is
// digested while it still is in the cache, to which the processor's prefetchers have brought it along with the first.
std::vector<Unit> cut_by_address(const std::vector<SourcePart>& parts, int64_t unit_bytes) {
  std::vector<PartSize> sizes;
  sizes.reserve(parts.size());
  for (const SourcePart& part : parts)
    sizes.push_back({part.cover.atoms, part.cover.atom_bytes, part.walk.row_atoms()});
  std::vector<std::pair<const std::byte*, Unit>> placed;
  for (const Unit& unit : cut_into_units(sizes, unit_bytes))
    placed.emplace_back(first_byte(parts[unit.first_part], unit.first_atom), unit);
  std::ranges::stable_sort(placed, std::less<>{}, &std::pair<const std::byte*, Unit>::first);
  std::vector<Unit> units;
  units.reserve(placed.size());
  for (const auto& [byte, unit] : placed) units.push_back(unit);
  return units;
}

}  // namespace

struct SourceProgram::Impl {
  bool digest = true;
  size_t routes = 0;
  int64_t bytes = 0;
  std::vector<SourcePart> digested, streamed;
  std::vector<Cover> covers;               // of `digested`
  std::vector<Unit> units, sampled_units;  // of `digested`
  StreamLayout stream;

  const std::vector<Unit>& units_of(const SampleSeed& sample) const { return sample ? sampled_units : units; }
};

SourceProgram::SourceProgram(std::span<const SourceRoute> routes, const SourceOptions& options) {
  auto impl = std::make_unique<Impl>();
  impl->digest = options.digest;
  impl->routes = routes.size();
  for (size_t r = 0; r < routes.size(); ++r) {
    const SourceRoute& route = routes[r];
    const DType dtype = route.what.dtype;
    const WalkArrays arrays{.src = &route.src, .dst_dtype = dtype, .image = options.digest};
    SourcePart part{.cover = {.route = static_cast<uint32_t>(r),
                              .tensor = route.what.tensor,
                              .atom_bytes = atom_bytes(dtype),
                              .elements_per_atom = elements_per_atom(dtype),
                              .image = image_range(route.what)},
                    .kernel = BlockKernel(dtype, dtype, Combine::kCopy, ReduceOp::kSum, BlockKernel::Store::kCache),
                    .walk = make_walk(route.what, arrays, Walk::Order::kRowMajor),
                    .data = route.data,
                    .digested = options.digest && route.digested};
    part.cover.atoms = part.walk.atoms();
    const int64_t bytes = part.cover.atoms * part.cover.atom_bytes;
    if (bytes == 0) continue;
    const bool streamed = route.streamed;
    if (!streamed && !part.digested) continue;
    impl->bytes += bytes;
    if (streamed) {
      if (route.delta != nullptr) {
        part.delta = route.delta;
        part.piece.emplace(route.what);
      }
      impl->stream.add(bytes);
      impl->streamed.push_back(std::move(part));
    } else {
      impl->covers.push_back(part.cover);
      impl->digested.push_back(std::move(part));
    }
  }
  impl->units = cut_by_address(impl->digested, kDigestUnitBytes);
  impl->sampled_units = cut_by_address(impl->digested, kSampledUnitBytes);
  impl_ = std::move(impl);
}

SourceProgram::~SourceProgram() = default;

bool SourceProgram::fills_stream() const {
  return impl_->stream.bytes() > 0;
}
int64_t SourceProgram::bytes() const {
  return impl_->bytes;
}
size_t SourceProgram::routes() const {
  return impl_->routes;
}

SourceRun::SourceRun(std::shared_ptr<const SourceProgram> program, WorkerPool& pool, Done done, std::string peer,
                     std::shared_ptr<ByteStream> stream, const RunOptions& options)
    : TransferRun(pool, std::move(done), program->impl().digest ? program->routes() : 0),
      program_(std::move(program)),
      peer_(std::move(peer)),
      stream_(std::move(stream)),
      options_(options) {
  TESSERA_CHECK_EQ(program_->fills_stream(), stream_ != nullptr);
}

SourceRun::~SourceRun() = default;

int64_t SourceRun::bytes() const {
  return program_->bytes();
}

size_t SourceRun::units() const {
  return (stream_ ? 1 : 0) + program_->impl().units_of(sample()).size();
}

void SourceRun::prepare(uint32_t epoch) {
  if (stream_) stream_->begin_produce(epoch);
}

void SourceRun::interrupt(const Status& status) {
  if (stream_) stream_->interrupt(status);
}

void SourceRun::run_unit(size_t index, std::span<std::byte> /*scratch*/) {
  const SourceProgram::Impl& program = program_->impl();
  if (stream_) {
    if (index == 0) return fill_stream();
    --index;
  }
  const auto atoms_of = [&](uint32_t p) { return program.covers[p].atoms; };
  int64_t done = 0;
  for_each_part(program.units_of(sample())[index], atoms_of, [&](uint32_t p, int64_t first, int64_t last) {
    const Cover& cover = program.covers[p];
    Digest digest{.elements = static_cast<uint64_t>((last - first) * cover.elements_per_atom)};
    const PartDigest how(sample(), cover.tensor, cover.image);
    if (how.any()) {
      const SourcePart& part = program.digested[p];
      part.walk.visit(first, last, [&](const Block& block) {
        digest_block(digest, block, part.data, cover.atom_bytes, how.sample());
      });
    }
    if (last - first == cover.atoms) {
      put_digest(cover.route, digest);
    } else {
      add_digest(cover.route, digest);
    }
    done += (last - first) * cover.atom_bytes;
  });
  add_bytes(done);
}

void SourceRun::travel(std::span<const int64_t> deltas) {
  TESSERA_CHECK(!running());
  const SourceProgram::Impl& program = program_->impl();
  const bool any = std::ranges::any_of(deltas, [](int64_t bytes) { return bytes != DeltaRun::kFull; });
  deltas_.assign(deltas.begin(), any ? deltas.end() : deltas.begin());
  layout_.clear();
  for (const SourcePart& part : program.streamed) {
    const int64_t full = part.cover.atoms * part.cover.atom_bytes;
    const uint32_t route = part.cover.route;
    if (any) layout_.add(!is_delta(route) ? full : part.delta != nullptr ? deltas_[route] : 0);
  }
}

void SourceRun::fill_stream() {
  StreamLayout::Cursor cursor(deltas_.empty() ? program_->impl().stream : layout_);
  // The receiver begins when it has a thread to spare, which its other transfers may hold up for long. It says itself
  // when it gives up; a stall is what comes after it has begun.
  Duration patience = Duration::max();
  while (!cursor.at_end() && !aborted()) {
    const size_t bytes_in_frame = cursor.frame_bytes();
    const std::span<std::byte> frame = stream_->reserve(Deadline::after(patience));
    if (frame.empty()) {
      const Status why = stream_->status();
      if (!why.ok()) return abort(Status(why.code(), fmt::format("{}: {}", peer_, why.message())));
      return abort(failed(ErrorCode::kDeadlineExceeded, "{}: took nothing from the {} for {:.0f} s"_message, peer_,
                          stream_->name(), to_seconds(options_.stall)));
    }
    bool filled = true;
    cursor.visit_frame([&](size_t p, int64_t first, int64_t last, size_t at) {
      filled = filled && fill(p, first, frame.subspan(at, static_cast<size_t>(last - first)));
    });
    if (!filled) return abort(failed_internal("{}: a delta that is shorter than was granted", peer_));
    stream_->publish(bytes_in_frame);
    patience = options_.stall;
  }
}

// The next bytes of a streamed part, from `first` on.
bool SourceRun::fill(size_t index, int64_t first, std::span<std::byte> out) {
  const SourcePart& part = program_->impl().streamed[index];
  const auto last = first + static_cast<int64_t>(out.size());
  if (is_delta(part.cover.route)) {
    if (first == 0) packer_.emplace(*part.piece, part.delta);
    return packer_->take(out);
  }
  const int64_t bytes = part.cover.atom_bytes;
  Digest digest{.elements = static_cast<uint64_t>((last - first) / bytes * part.cover.elements_per_atom)};
  const PartDigest how = part.digested ? PartDigest(sample(), part.cover.tensor, part.cover.image) : PartDigest();
  part.walk.visit(first / bytes, last / bytes, [&](Block block) {
    block.offset[kDestination] -= first;
    part.kernel.run(block, part.data, out.data(), how.into(digest), how.sample());
  });
  if (part.digested) add_digest(part.cover.route, digest);
  add_bytes(last - first);
  return true;
}

}  // namespace tessera
