#include "bus/daemon/worker_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "memory/host/shared_arena.h"
#include "tessera/memory.h"

namespace tessera::bus {
namespace {

TEST(MemoryPlacement, LentTensorsOverlapAsTheyDoAndOthersLieApart) {
  const Identity rank{.name_space = "default", .job = "trainer", .rank = 0, .world = 1};
  std::vector<float> memory(1024);
  const SharedBuffer shared = SharedHeap::process().allocate(64);
  const auto spec = [&](const char* name, void* data, const Shape& shape, std::vector<Index> strides = {}) {
    return TensorSpec{.name = name,
                      .data = data,
                      .dtype = DType::kF32,
                      .shape = shape,
                      .layout = Layout::parse("1:R"),
                      .strides = std::move(strides)};
  };
  const std::vector<TensorSpec> specs{spec("whole", memory.data() + 16, {16}), spec("half", memory.data() + 24, {8}),
                                      spec("shared", shared.data(), {16}),
                                      spec("backwards", memory.data() + 515, {4}, {-1}),
                                      spec("next", memory.data() + 32, {4})};
  const Manifest manifest = manifest_of(rank, specs);
  const MemoryPlacement placement = place_tensors(manifest, specs, registered_tensors(manifest, specs, 0), true);
  ASSERT_EQ(placement.arenas.size(), 1u);
  const auto place = [&](size_t i) { return *placement.tensors[i].place; };
  EXPECT_EQ(place(2).arena, 0u);
  for (const size_t i : {0, 1, 3, 4}) EXPECT_EQ(place(i).arena, RegisterCall::kLent);
  EXPECT_EQ(place(1).offset - place(0).offset, 8 * sizeof(float));
  const auto address = [&](size_t i) { return reinterpret_cast<uintptr_t>(specs[i].data); };
  for (const size_t i : {0, 1, 3, 4}) EXPECT_EQ(place(i).offset % 4096, address(i) % 4096);
  std::vector<std::pair<uint64_t, uint64_t>> apart{{place(0).offset, place(0).offset + 64},
                                                   {place(3).offset - 12, place(3).offset + 4},
                                                   {place(4).offset, place(4).offset + 16}};
  std::ranges::sort(apart);
  for (size_t i = 1; i < apart.size(); ++i) EXPECT_LE(apart[i - 1].second, apart[i].first);
  EXPECT_LE(apart.back().second, placement.lent_bytes);
}

}  // namespace
}  // namespace tessera::bus
