#include "bus/sender/receiver_links.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "base/message.h"

namespace tessera::bus {

bool reading(const ReceiverLinks& links) {
  return std::ranges::any_of(links, [](const auto& entry) {
    const SourceLink& link = *entry.second;
    return link.running() || (link.open() && link.taking() != 0);
  });
}

bool begun(const ReceiverLinks& links, int64_t version) {
  return std::ranges::any_of(links, [&](const auto& entry) {
    return entry.second->taking() == version || entry.second->done_version() == version;
  });
}

std::string who_has_not_taken(const ReceiverLinks& links, int64_t version) {
  std::vector<std::string> absent;
  std::vector<std::string> slow;
  for (const auto& [rank, link] : links) {
    if (link->done_version() == version) continue;
    (link->taking() == version ? slow : absent).push_back(link->name());
  }
  std::string text;
  if (!absent.empty()) text = fmt::format("{} did not come to take it"_message, fmt::join(absent, ", "));
  if (!slow.empty()) text += fmt::format("{}{} did not finish", text.empty() ? "" : "; ", fmt::join(slow, ", "));
  return text;
}

std::string awaited(const ReceiverLinks& links, int64_t version) {
  std::vector<std::string> names;
  for (const auto& [rank, link] : links)
    if (link->done_version() != version) names.push_back(link->name());
  return fmt::format("{} to take version {}", fmt::join(names, ", "), version);
}

Progress progress(const ReceiverLinks& links) {
  Progress progress;
  for (const auto& [rank, link] : links) {
    progress.bytes_total += link->bytes();
    progress.bytes_done += link->progress();
  }
  return progress;
}

void take_back(const ReceiverLinks& links, int64_t version, const Status& status) {
  for (const auto& [rank, link] : links) {
    if (link->open()) link->withdraw(version);
    if (link->open() && link->taking() != 0) link->revoke(status);
    link->abort_run(status);
  }
}

}  // namespace tessera::bus
