#include "collective/movement/memory_reader.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "collective/group_testing.h"
#include "tessera/memory.h"

namespace tessera::collective {
namespace {

std::byte pattern(int rank, size_t at) {
  return static_cast<std::byte>(at * 31 + static_cast<size_t>(rank) * 7 + 1);
}

std::vector<std::byte> filled(int rank, size_t bytes) {
  std::vector<std::byte> memory(bytes);
  for (size_t at = 0; at < bytes; ++at) memory[at] = pattern(rank, at);
  return memory;
}

std::vector<MemoryRef> exchange_refs(Group& group, const MemoryRef& own) {
  std::vector<MemoryRef> refs;
  for (const std::string& blob : group.exchange("places", {reinterpret_cast<const char*>(&own), sizeof(own)})) {
    EXPECT_EQ(blob.size(), sizeof(MemoryRef));
    std::memcpy(&refs.emplace_back(), blob.data(), sizeof(MemoryRef));
  }
  return refs;
}

// Ranks, whether as processes would be, threads that copy.
class MemoryReaders : public testing::TestWithParam<std::tuple<int, bool, int>> {
 protected:
  static TestRanks ranks() { return {.size = std::get<0>(GetParam()), .sockets = std::get<1>(GetParam())}; }
  static int threads() { return std::get<2>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(All, MemoryReaders,
                         testing::Combine(testing::Values(1, 2, 4), testing::Bool(), testing::Values(1, 3)),
                         [](const auto& test) {
                           return fmt::format("{}ranks{}{}threads", std::get<0>(test.param),
                                              std::get<1>(test.param) ? "sockets" : "", std::get<2>(test.param));
                         });

TEST_P(MemoryReaders, ReadPrivateAndSharedMemory) {
  constexpr size_t kBytes = (size_t{9} << 20) + 77;  // more than a thread's part
  // Outlives the ranks: a barrier over sockets orders reads and the end of what is read, but no sanitizer knows.
  std::vector<std::vector<std::byte>> memories(static_cast<size_t>(ranks().size));
  std::vector<SharedBuffer> buffers(static_cast<size_t>(ranks().size));
  run_ranks_well(ranks(), [&](Group& group) {
    MemoryReader reader(group.shared_from_this(), threads());
    EXPECT_EQ(reader.refused(), "");
    std::vector<std::byte>& own = memories[static_cast<size_t>(group.rank())];
    SharedBuffer& shared = buffers[static_cast<size_t>(group.rank())];
    own = filled(group.rank(), kBytes);
    shared = SharedHeap::process().allocate(4096);
    std::ranges::copy(std::span(own).first(4096), shared.data());
    const std::vector<MemoryRef> whole = exchange_refs(group, reader.refer(own.data(), own.size()));
    const std::vector<MemoryRef> others = exchange_refs(group, group.refer(shared.data(), 4096));

    std::vector<std::vector<std::byte>> got(static_cast<size_t>(group.size()));
    std::vector<MemoryRead> reads;
    for (int rank = 0; rank < group.size(); ++rank) {
      auto& to = got[static_cast<size_t>(rank)];
      to.resize(kBytes + 4096 + 10);
      const MemoryRef& from = whole[static_cast<size_t>(rank)];
      reads.push_back({.rank = rank, .from = from, .to = to.data()});
      reads.push_back({.rank = rank, .from = others[static_cast<size_t>(rank)], .to = to.data() + kBytes});
      const MemoryRef part{.arena = from.arena, .offset = from.offset + 5, .bytes = 10};
      reads.push_back({.rank = rank, .from = part, .to = to.data() + kBytes + 4096});
      reads.push_back({.rank = rank, .from = {.arena = from.arena, .offset = from.offset, .bytes = 0}});
    }
    reader.read(reads);
    for (int rank = 0; rank < group.size(); ++rank) {
      std::vector<std::byte> expected = filled(rank, kBytes);
      expected.insert(expected.end(), expected.begin(), expected.begin() + 4096);
      expected.insert(expected.end(), expected.begin() + 5, expected.begin() + 15);
      EXPECT_TRUE(got[static_cast<size_t>(rank)] == expected) << "of rank " << rank;
    }
    reader.read({});
    group.barrier("read");
  });
}

TEST_P(MemoryReaders, RefuseWhatIsNoRank) {
  run_ranks_well(ranks(), [](Group& group) {
    MemoryReader reader(group.shared_from_this(), threads());
    std::byte to{};
    for (const int rank : {-1, group.size()}) {
      const MemoryRead read{.rank = rank, .from = reader.refer(&to, 1), .to = &to};
      EXPECT_EQ(status_of([&] { reader.read({&read, 1}); }).code(), ErrorCode::kInvalidArgument);
    }
  });
}

}  // namespace
}  // namespace tessera::collective
