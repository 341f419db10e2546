#include "bench/etp/weights.h"

#include <algorithm>
#include <cstring>

#include "base/fail.h"
#include "codec/simd/stream.h"
#include "collective/group.h"

namespace tessera::bench {
namespace {

using collective::MemoryRef;

std::byte value_of(size_t weight, int rank) {
  return static_cast<std::byte>(weight * 7 + static_cast<size_t>(rank) + 1);
}

}  // namespace

PlainWeights::PlainWeights(const Rank& rank, size_t weights, size_t shard_bytes)
    : to_(weights * shard_bytes * static_cast<size_t>(rank.size())), shard_bytes_(shard_bytes), ranks_(rank.size()) {
  collective::Group& group = rank.group();
  std::vector<MemoryRef> places;
  for (size_t i = 0; i < weights; ++i) {
    shards_.push_back(SharedHeap::process().allocate(shard_bytes));
    std::memset(shards_.back().data(), static_cast<int>(value_of(i, rank.number())), shard_bytes);
    places.push_back(group.refer(shards_.back().data(), shard_bytes));
    group.set(collective::Word::kPublished, static_cast<uint32_t>(i), 1);
  }
  const std::vector<std::string> all =
      group.exchange("shards", {reinterpret_cast<const char*>(places.data()), places.size() * sizeof(MemoryRef)});
  const auto columns = static_cast<int64_t>(std::min<size_t>(shard_bytes / 2, 1024));
  const int64_t rows = static_cast<int64_t>(shard_bytes / 2) / columns;
  for (size_t i = 0; i < weights; ++i) {
    auto weight = std::make_shared<collective::PublishedWeight>();
    weight->rows = rows * ranks_;
    weight->columns = columns;
    weight->dtype = DType::kBF16;
    for (int owner = 0; owner < ranks_; ++owner) {
      MemoryRef place;
      std::memcpy(&place, all[static_cast<size_t>(owner)].data() + i * sizeof place, sizeof place);
      weight->owners.push_back({.begin = owner * rows, .count = rows, .data = group.map(owner, place)});
    }
    parts_.push_back({.slot = static_cast<uint32_t>(i),
                      .version = 1,
                      .from = weight,
                      .to = {.data = to_.data() + i * shard_bytes * static_cast<size_t>(ranks_),
                             .dtype = DType::kBF16,
                             .rows = weight->rows,
                             .columns = columns,
                             .row_stride = columns},
                      .weight = "w"});
  }
}

void PlainWeights::check() const {
  for (size_t i = 0; i < parts_.size(); ++i)
    for (int owner = 0; owner < ranks_; ++owner) {
      const std::byte* const rows =
          to_.data() + (i * static_cast<size_t>(ranks_) + static_cast<size_t>(owner)) * shard_bytes_;
      TESSERA_CHECK(rows[0] == value_of(i, owner) && rows[shard_bytes_ - 1] == value_of(i, owner));
    }
}

CopyCeiling::CopyCeiling() : from_(SharedHeap::process().allocate(kBytes)), to_(kBytes) {
  std::memset(from_.data(), 1, kBytes);
}

void CopyCeiling::operator()() {
  copy_stream(to_.data(), from_.data(), kBytes);
  stream_fence();
}

}  // namespace tessera::bench
