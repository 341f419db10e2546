#include "device/record/rank_log.h"

#include <algorithm>

namespace tessera::device {

void RankLog::append(const Record& record) {
  Record& kept = records_.emplace_back(record);
  kept.rank = head_.rank;
  kept.sequence = records_.size();
  kept.name = keep(record.name);
  kept.subject = keep(record.subject);
  kept.accesses = keep(accesses_, record.accesses);
  kept.words = keep(words_, record.words);
}

std::string_view RankLog::keep(std::string_view text) {
  if (text.empty()) return {};
  return *texts_.emplace(text).first;
}

template <typename T>
std::span<const T> RankLog::keep(Blocks<T>& blocks, std::span<const T> items) {
  constexpr size_t kMostAhead = 4096;
  if (items.empty()) return {};
  if (blocks.empty() || blocks.back().capacity() - blocks.back().size() < items.size())
    blocks.emplace_back().reserve(std::max(std::min(records_.size(), kMostAhead), items.size()));
  std::vector<T>& block = blocks.back();
  const size_t at = block.size();
  block.insert(block.end(), items.begin(), items.end());
  return std::span<const T>(block).subspan(at);
}

}  // namespace tessera::device
