#include "exec/wire/quantize_run.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>

#include "codec/codec_testing.h"
#include "exec/wire/plane_testing.h"
#include "exec/wire/wire_testing.h"
#include "tessera/memory.h"
#include "transport/shm/bounce_ring.h"

namespace tessera {
namespace {

using exec_testing::Buffer;
using exec_testing::Completion;
using exec_testing::every_wire_format;
using exec_testing::for_each_element;
using exec_testing::pick;
using exec_testing::PlainOffsets;
using exec_testing::Random;
using exec_testing::random_array;
using exec_testing::random_regions;
using exec_testing::reach_self;
using exec_testing::WireReference;
using exec_testing::WireTensor;

// A local tensor of a sender or a receiver, with its memory.
struct WireArray {
  Buffer buffer;
  PlainOffsets offsets;
  std::vector<std::byte> memory;

  WireArray(Random& random, const Region& owned, DType dtype)
      : buffer(random_array(random, owned, dtype, false)), offsets(buffer.array, 1) {
    memory.resize(buffer.size, std::byte{0xA5});
  }
  std::byte* data() { return memory.data() + buffer.first; }
  std::byte* at(const std::vector<Index>& indices) { return data() + offsets.of(indices); }
};

// All blocks and matrices of a fused matrix, as if ranks had agreed on them.
struct Agreement {
  std::map<std::tuple<Index, Index, Index>, float> blocks;
  std::map<Index, float> matrices;
};

// One rank that sends parts of some tensors.
class WireSender {
 public:
  void add(Random& random, uint32_t tensor, const WireTensor& from, const Region& held, const Region& sent) {
    const DType dtype = from.whole->dtype();
    sources_.push_back(std::make_unique<WireArray>(random, held, dtype));
    // An empty route reads nothing.
    for_each_element(sent.empty() ? sent : held, [&](const std::vector<Index>& at) {
      std::memcpy(sources_.back()->at(at), from.whole->value(from.matrix_of(at), from.row_of(at), from.column_of(at)),
                  static_cast<size_t>(bytes_of(dtype, 1)));
    });
    routes_.push_back({tensor, from.region(sent), sources_.back()->buffer.array});
  }

  void look(WorkerPool& pool) {
    program_ = std::make_shared<QuantizeProgram>(routes_);
    amaxes_ = std::make_shared<QuantizeAmaxes>(*program_);
    run_amax(pool);
  }
  std::optional<NonfiniteValue> run_amax(WorkerPool& pool) {
    Completion done;
    AmaxRun run(program_, amaxes_, pool, done.callback());
    std::vector<const std::byte*> data;
    for (const auto& source : sources_) data.push_back(source->data());
    run.read_from(data);
    for (uint32_t epoch = 1; epoch <= 2; ++epoch) {  // a run is reusable
      run.start(epoch);
      EXPECT_TRUE(done.wait());
      EXPECT_EQ(run.bytes_done(), run.bytes());
    }
    return run.nonfinite();
  }

  void report(Agreement& agreement) {
    const auto meet = [](float& known, float value) { known = std::max(known, value); };
    for (size_t r = 0; r < routes_.size(); ++r) {
      for (const CutBlock& cut : program_->cut_blocks(r))
        meet(agreement.blocks[{cut.matrix, cut.block_row, cut.block_column}], amaxes_->blocks(r)[cut.place]);
      for (size_t m = 0; m < amaxes_->matrices(r).size(); ++m)
        meet(agreement.matrices[program_->matrix_of(r, static_cast<Index>(m))], amaxes_->matrices(r)[m]);
      EXPECT_EQ(static_cast<size_t>(program_->cut_block_count(r)), program_->cut_blocks(r).size());
    }
  }
  void agree(const Agreement& agreement) {
    for (size_t r = 0; r < routes_.size(); ++r) {
      for (const CutBlock& cut : program_->cut_blocks(r))
        amaxes_->blocks(r)[cut.place] = agreement.blocks.at({cut.matrix, cut.block_row, cut.block_column});
      for (size_t m = 0; m < amaxes_->matrices(r).size(); ++m)
        amaxes_->matrices(r)[m] = agreement.matrices.at(program_->matrix_of(r, static_cast<Index>(m)));
    }
  }

  void encode(WorkerPool& pool) {
    std::vector<EncodeRun::Memory> memory;
    for (size_t r = 0; r < routes_.size(); ++r) {
      pieces_.emplace_back(static_cast<size_t>(program_->piece(r).bytes()), std::byte{0});
      memory.push_back({sources_[r]->data(), pieces_[r].data()});
    }
    Completion done;
    EncodeRun run(program_, amaxes_, memory, true, pool, done.callback());
    for (uint32_t epoch = 1; epoch <= 2; ++epoch) {
      run.start(epoch);
      ASSERT_TRUE(done.wait());
      EXPECT_EQ(run.bytes_done(), run.bytes());
    }
    digests_.assign(run.digests().begin(), run.digests().end());
  }

  size_t routes() const { return routes_.size(); }
  const QuantizeRoute& route(size_t r) const { return routes_[r]; }
  const std::vector<std::byte>& piece(size_t r) const { return pieces_[r]; }
  const QuantizeAmaxes& amaxes() const { return *amaxes_; }
  WireArray& source(size_t r) { return *sources_[r]; }
  const Digest& main(size_t r) const { return digests_[r]; }
  const Digest& rest(size_t r) const { return digests_[routes_.size() + r]; }

 private:
  std::vector<std::unique_ptr<WireArray>> sources_;
  std::vector<QuantizeRoute> routes_;
  std::shared_ptr<QuantizeProgram> program_;
  std::shared_ptr<QuantizeAmaxes> amaxes_;
  std::vector<std::vector<std::byte>> pieces_;
  std::vector<Digest> digests_;
};

// Packs the pieces of `routes` into a stream.
std::unique_ptr<SourceRun> fill(const std::vector<PullRoute>& routes, WorkerPool& pool, Completion& filled,
                                std::unique_ptr<ByteStream> stream) {
  std::vector<SourceRoute> sources;
  for (const PullRoute& route : routes)
    sources.push_back(
        {.what = route.what, .src = route.src, .data = own_data(route.memory), .streamed = true, .digested = false});
  return std::make_unique<SourceRun>(std::make_shared<SourceProgram>(sources, SourceOptions{}), pool, filled.callback(),
                                     "inference/0", std::move(stream));
}

// A rank that pulls a region of one tensor from all ranks that send any of it.
void pull_and_check(Random& random, WorkerPool& pool, const std::vector<WireSender>& senders, uint32_t ordinal,
                    const WireTensor& tensor, const Region& wanted, DType to) {
  WireArray destination(random, wanted, to);
  WireArray expected = destination;
  const std::vector<std::byte> decoded = tensor.whole->decoded(to);
  const int64_t element = bytes_of(to, 1);
  for_each_element(wanted, [&](const std::vector<Index>& at) {
    const int64_t place = tensor.whole->place_of(tensor.matrix_of(at), tensor.row_of(at), tensor.column_of(at));
    std::memcpy(expected.at(at), decoded.data() + place * element, static_cast<size_t>(element));
  });
  std::vector<PullRoute> routes;
  std::vector<Digest> digests;
  std::vector<Digest> rest;
  for (const WireSender& sender : senders) {
    for (size_t r = 0; r < sender.routes(); ++r) {
      const QuantizeRoute& route = sender.route(r);
      if (route.tensor != ordinal || !(route.what.region == route.what.region.intersect(wanted))) continue;
      auto piece = std::make_shared<WirePiece>(route.what);
      const Shape bytes{piece->bytes()};
      routes.push_back({.what = {.tensor = ordinal, .shape = bytes, .dtype = DType::kU8, .region = Region::full(bytes)},
                        .src = {Region::full(bytes), {1}},
                        .memory = own_range(sender.piece(r).data(), sender.piece(r).size()),
                        .dst = destination.buffer.array,
                        .dst_dtype = to,
                        .data = destination.data(),
                        .wire = std::move(piece)});
      digests.push_back(sender.main(r));
      rest.push_back(sender.rest(r));
    }
  }
  digests.insert(digests.end(), rest.begin(), rest.end());
  // Mapped, got, or streamed.
  const auto access = static_cast<Access>(pick(random, 0, 2));
  PullOptions options;
  if (access != Access::kMap) options.private_access = access;
  Completion done;
  auto program =
      std::make_shared<PullProgram>(reach_self(access == Access::kMap ? "loopback" : "shm"), routes, options);
  EXPECT_EQ(program->bytes(access), program->bytes());
  Completion filled;
  WorkerPool fill_pool(1, "fill");
  std::unique_ptr<SourceRun> source;
  std::unique_ptr<BounceRing> ring;
  if (program->wants_stream()) {
    ring = BounceRing::create();
    source = fill(routes, fill_pool, filled, BounceRing::open(UniqueFd(::dup(ring->fd())), "trainer/0"));
    source->start(1);
  }
  PullRun run(program, pool, done.callback(), std::move(ring));
  run.start(1);
  ASSERT_TRUE(done.wait());
  if (source) {
    ASSERT_TRUE(filled.wait());
  }
  EXPECT_EQ(run.status(), Status());
  EXPECT_EQ(run.bytes_done(), program->bytes());
  ASSERT_EQ(destination.memory, expected.memory) << wanted.to_string() << " as " << to_string(to);
  ASSERT_EQ(std::vector<Digest>(run.digests().begin(), run.digests().end()), digests);
}

// Tensors that form a stack of matrices together: the whole, or fused parts of it.
std::vector<WireTensor> tensors_of(Random& random, const WireReference& whole, const Shape& stack, Index rows,
                                   Index columns, bool fused) {
  const auto tensor = [&](Interval r, Interval c) {
    WireTensor part{.whole = &whole, .shape = stack, .fused = fused, .row0 = r.begin, .column0 = c.begin};
    part.shape.push_back(r.size());
    part.shape.push_back(c.size());
    return part;
  };
  if (!fused) return {tensor({0, rows}, {0, columns})};
  const Index row = pick(random, 0, rows);
  const Index step = whole.format().packed() ? 2 : 1;
  const Index column = step * pick(random, 0, columns / step);
  std::vector<WireTensor> parts;
  for (const Interval& r : {Interval{0, row}, Interval{row, rows}})
    for (const Interval& c : {Interval{0, column}, Interval{column, columns}})
      if (r.size() > 0 && c.size() > 0) parts.push_back(tensor(r, c));
  return parts;
}

class WireRunsTest : public EveryKernelTest {
 protected:
  // With random senders and receivers, the result is that of quantising the whole.
  static void check(Random& random, WorkerPool& pool, const codec::BlockFormat& format, DType from, Index rows,
                    Index columns) {
    Shape stack;
    for (Index d = pick(random, 0, 2); d > 0; --d) stack.push_back(pick(random, 1, 3));
    SCOPED_TRACE(std::string(to_string(format.spec.format)) + " of " + std::string(to_string(from)) + ", " +
                 to_string_shape(stack) + " matrices of " + std::to_string(rows) + "x" + std::to_string(columns));
    const WireReference whole(random, format, from, element_count(stack), rows, columns);
    const auto tensors = tensors_of(random, whole, stack, rows, columns, pick(random, 0, 2) == 0);
    std::vector<WireSender> senders(4);
    std::vector<std::vector<Region>> wanted;
    for (uint32_t t = 0; t < tensors.size(); ++t) {
      const Shape& shape = tensors[t].shape;
      wanted.push_back(random_regions(random, shape));
      for (const Region& held : random_regions(random, shape))
        for (const Region& served : random_regions(random, shape)) {  // replicas share what all of them hold
          WireSender& sender = senders[static_cast<size_t>(pick(random, 0, 3))];
          const Region sent = held.intersect(served);
          for (const Region& region : wanted.back()) sender.add(random, t, tensors[t], held, sent.intersect(region));
        }
    }
    Agreement agreement;
    for (WireSender& sender : senders) sender.look(pool);
    for (WireSender& sender : senders) sender.report(agreement);
    for (WireSender& sender : senders) sender.agree(agreement);
    for (WireSender& sender : senders) sender.encode(pool);
    constexpr DType kTargets[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
    for (uint32_t t = 0; t < tensors.size(); ++t) {
      Digest sum;
      for (const WireSender& sender : senders)
        for (size_t r = 0; r < sender.routes(); ++r)
          if (sender.route(r).tensor == t) sum += sender.main(r);
      EXPECT_EQ(sum, tensors[t].digest());
      for (const Region& region : wanted[t])
        pull_and_check(random, pool, senders, t, tensors[t], region, kTargets[pick(random, 0, 3)]);
    }
  }
};

Index columns_for(Random& random, const codec::BlockFormat& format, Index most) {
  return format.packed() ? 2 * pick(random, 1, most / 2) : pick(random, 1, most);
}

constexpr DType kWireSources[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};

TEST_P(WireRunsTest, WhatArrivesIsTheWholeTensorQuantisedWhateverTheLayouts) {
  Random random(71);
  WorkerPool pool(2, "wire");
  for (int i = 0; i < 3; ++i)
    for (const codec::BlockFormat& format : every_wire_format())
      for (const DType from : kWireSources)
        check(random, pool, format, from, pick(random, 1, i == 0 ? 8 : 60),
              columns_for(random, format, i == 0 ? 40 : 100));
}

TEST_P(WireRunsTest, SoItIsWithMatricesOfManyBlocks) {
  Random random(72);
  WorkerPool pool(2, "wire");
  for (const codec::BlockFormat& format : every_wire_format())
    check(random, pool, format, DType::kBF16, pick(random, 200, 300), 300 + columns_for(random, format, 140));
}

INSTANTIATE_TEST_SUITE_P(Kernels, WireRunsTest, every_kernel(), kernel_name);

TEST(QuantizeRun, BlocksThatThisRankHoldsWholeAreNotCutThoughRoutesCutThem) {
  const Shape shape{40, 64};
  const auto cut = [&](const Region& held, const Region& sent, bool fused) {
    const LocalArray src{held, byte_strides(DType::kF32, held.extents())};
    const QuantizeRoute route{0, {.shape = shape, .region = sent, .fused = fused}, src};
    return QuantizeProgram(std::span(&route, 1)).cut_block_count(0);
  };
  const Region full = Region::full(shape);
  const Region odd({IntervalSet({0, 20}), IntervalSet({7, 23})});  // 2 x 2 blocks
  EXPECT_EQ(cut(full, odd, false), 0);
  EXPECT_EQ(cut(odd, odd, false), 4);
  EXPECT_EQ(cut(Region({IntervalSet({0, 40}), IntervalSet({0, 23})}), odd, false), 2);
  EXPECT_EQ(cut(full, full, false), 0);  // 40 rows are 2 1/2 blocks
  EXPECT_EQ(cut(full, full, true), 4);   // where another part may follow
}

TEST(QuantizeRun, NamesTheFirstValueThatIsNotFiniteByTensorAndIndex) {
  Random random(73);
  WorkerPool pool(3, "wire");
  const codec::BlockFormat format(Format::kMxfp8);
  const WireReference whole(random, format, DType::kF32, 2, 300, 100);
  const WireTensor tensor{.whole = &whole, .shape = {2, 300, 100}};
  WireSender sender;
  const Region full = Region::full(tensor.shape);
  const Region upper({IntervalSet({0, 2}), IntervalSet({0, 150}), IntervalSet({0, 100})});
  sender.add(random, 8, tensor, full, full);
  sender.add(random, 5, tensor, full, upper);
  sender.look(pool);
  EXPECT_FALSE(sender.run_amax(pool).has_value());
  const auto spoil = [&](size_t route, const std::vector<Index>& at, float value) {
    std::memcpy(sender.source(route).at(at), &value, sizeof(value));
  };
  spoil(0, {0, 0, 0}, NAN);
  EXPECT_EQ(sender.run_amax(pool)->tensor, 8u);
  spoil(1, {0, 150, 3}, NAN);  // no rank looks there
  spoil(1, {1, 149, 99}, NAN);
  spoil(1, {1, 17, 3}, -INFINITY);
  const std::optional<NonfiniteValue> found = sender.run_amax(pool);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->tensor, 5u);
  EXPECT_EQ(found->index, 30000u + 1703u);
  EXPECT_EQ(found->value, -INFINITY);
}

TEST(QuantizeRun, AnotherAmaxIsFoundOutByTheDigestsRestAlone) {
  Random random(74);
  WorkerPool pool(1, "wire");
  const WireReference whole(random, codec::BlockFormat(Format::kNvfp4), DType::kBF16, 1, 64, 64);
  const WireTensor tensor{.whole = &whole, .shape = {64, 64}};
  WireSender sender;
  sender.add(random, 0, tensor, Region::full(tensor.shape), Region::full(tensor.shape));
  sender.look(pool);
  sender.encode(pool);
  const WirePiece piece(sender.route(0).what);
  std::vector<std::byte> bytes = sender.piece(0);
  bytes[1] ^= std::byte{1};
  Digest main, rest;
  piece.digest(bytes.data(), 0, piece.walk().all_bands(), main, rest);
  EXPECT_EQ(main, sender.main(0));
  EXPECT_NE(rest, sender.rest(0));
}

// Two ranks, one of which has the last column: too little to know the largest exponent of a block.
Digest sent_by_two(const codec::BlockFormat& format, bool agree, Digest& expected) {
  Random random(75);
  WorkerPool pool(1, "wire");
  const WireReference whole(random, format, DType::kF32, 1, 2, 16);
  const WireTensor tensor{.whole = &whole, .shape = {2, 16}};
  std::vector<WireSender> senders(2);
  Agreement agreement;
  for (size_t s = 0; s < 2; ++s) {
    const Region held({IntervalSet({0, 2}), s == 0 ? IntervalSet({0, 15}) : IntervalSet({15, 16})});
    senders[s].add(random, 0, tensor, held, held);
    senders[s].look(pool);
    senders[s].report(agreement);
  }
  Digest sum;
  for (WireSender& sender : senders) {
    if (agree) sender.agree(agreement);
    sender.encode(pool);
    sum += sender.main(0);
  }
  expected = tensor.digest();
  return sum;
}

TEST(QuantizeRun, AmaxesOfItsOwnWouldBeFoundOut) {
  for (const codec::BlockFormat& format : every_wire_format()) {
    Digest expected;
    EXPECT_EQ(sent_by_two(format, true, expected), expected);
    EXPECT_NE(sent_by_two(format, false, expected), expected) << to_string(format.spec.format);
  }
}

// With planes of random bytes, so that nothing could have computed them.
TEST(QuantizeRun, ARouteIsTakenFromItsPlanesWhereItsElementsAreNotGiven) {
  Random random(76);
  WorkerPool pool(2, "wire");
  for (const Format name : all_formats()) {
    const codec::BlockFormat format(name);
    const WireReference whole(random, format, DType::kF32, 2, 64, 160);
    const WireTensor tensor{.whole = &whole, .shape = whole.shape()};
    const Region full = Region::full(tensor.shape);
    exec_testing::ExpectedPlanes planes(whole, tensor, full, false);
    for (std::byte& code : planes.codes) code = static_cast<std::byte>(pick(random, 0, 255));
    PlaneSource source{.held = full};
    for (size_t m = 0; m < 2; ++m)
      source.matrices.push_back({.codes = planes.codes.data() + m * planes.codes.size() / 2,
                                 .scales = planes.scales.data() + m * planes.scales.size() / 2,
                                 .amax = planes.amaxes.empty() ? nullptr : planes.amaxes.data() + m * sizeof(float)});
    WireArray elements(random, full, DType::kF32);
    const QuantizeRoute route{0, tensor.region(full), elements.buffer.array, source};
    const auto program = std::make_shared<QuantizeProgram>(std::span(&route, 1));
    const auto amaxes = std::make_shared<QuantizeAmaxes>(*program);
    EXPECT_EQ(program->cut_block_count(0), 0);

    const std::vector<const std::byte*> none{nullptr};
    Completion looked;
    AmaxRun look(program, amaxes, pool, looked.callback());
    look.read_from(none);
    look.start(1);
    ASSERT_TRUE(looked.wait());
    EXPECT_EQ(look.bytes(), 0);
    EXPECT_EQ(look.bytes_done(), 0);
    EXPECT_FALSE(look.nonfinite());

    const WirePiece& piece = program->piece(0);
    std::vector<std::byte> bytes(static_cast<size_t>(piece.bytes()));
    Completion done;
    EncodeRun run(program, amaxes, {{elements.data(), bytes.data(), source.matrices}}, true, pool, done.callback());
    run.read_from(none);
    run.start(1);
    ASSERT_TRUE(done.wait());
    EXPECT_EQ(run.bytes_done(), run.bytes());
    EXPECT_TRUE(std::equal(planes.codes.begin(), planes.codes.end(), bytes.begin() + piece.code_section()))
        << to_string(name);
    Digest main, rest;
    piece.digest(bytes.data(), 0, piece.walk().all_bands(), main, rest);
    EXPECT_EQ(run.digests()[0], main);
    EXPECT_EQ(run.rest(0), rest);
  }
}

TEST(QuantizeRun, PiecesNeedNotBeMapped) {
  const Shape shape{16, 32};
  auto piece = std::make_shared<WirePiece>(WireRegion{.shape = shape, .region = Region::full(shape)});
  std::vector<std::byte> memory(static_cast<size_t>(piece->bytes()));
  std::vector<float> out(16 * 32);
  const Shape bytes{piece->bytes()};
  PullRoute route{.what = {.shape = bytes, .dtype = DType::kU8, .region = Region::full(bytes)},
                  .src = {Region::full(bytes), {1}},
                  .memory = own_range(memory.data(), memory.size()),
                  .dst = {Region::full(shape), byte_strides(DType::kF32, shape)},
                  .dst_dtype = DType::kF32,
                  .data = reinterpret_cast<std::byte*>(out.data()),
                  .wire = piece};
  const auto code = [&](const char* transport) {
    try {
      PullProgram(reach_self(transport), std::span(&route, 1), {});
    } catch (const Error& error) {
      return std::optional(error.code());
    }
    return std::optional<ErrorCode>();
  };
  EXPECT_EQ(code("shm"), std::nullopt);
  EXPECT_EQ(code("loopback"), std::nullopt);
  route.dst_dtype = DType::kI32;
  EXPECT_EQ(code("loopback"), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace tessera
