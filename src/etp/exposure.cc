#include "etp/exposure.h"

#include <fmt/format.h>

#include <cmath>

namespace tessera::etp {
namespace {

std::string remedy(const Exposure& e, const RuntimeOptions& options) {
  switch (e.cause) {
    case ExposureCause::kNotSeen:
      return "nothing was known about what follows; its second pass in this order is prefetched";
    case ExposureCause::kMispredicted:
      return "another weight was expected here; keep the order of uses from step to step";
    case ExposureCause::kOff:
      return "prefetching is off; set prefetch to \"on\"";
    case ExposureCause::kCap:
      return fmt::format("its prefetch did not fit; set cap_bytes to {} or more", e.needed_cap);
    case ExposureCause::kNotPublished:
      return fmt::format("rank {} had not published it; make that rank's update earlier or shorter", e.publisher);
    case ExposureCause::kFirstUse:
      return "its first use publishes it; publish() the weights of the next layers earlier, or publish at the update";
    case ExposureCause::kUnderWay: {
      const double needed = e.head_start + e.seconds;
      const double steps = e.head_start > 0 ? needed / e.head_start : 2;
      const int distance = std::max(options.distance + 1, static_cast<int>(std::ceil(steps * options.distance)));
      return fmt::format("its gather began {:.0f} us before and takes {:.0f} us; set distance to {}",
                         e.head_start * 1e6, needed * 1e6, std::min(distance, 64));
    }
  }
  return {};
}

}  // namespace

void ExposureLog::add(const Exposure& exposure) {
  std::vector<Exposure>& now = kept_[static_cast<size_t>(steps_ % 3)];
  if (now.size() < kMostPerStep) now.push_back(exposure);
}

void ExposureLog::end_step() {
  ++steps_;
  kept_[static_cast<size_t>(steps_ % 3)].clear();
}

const std::vector<Exposure>* ExposureLog::step(int64_t step) const {
  if (step < 0) step = steps_ - 1;
  if (step < 0 || step > steps_ || steps_ - step > 2) return nullptr;
  return &kept_[static_cast<size_t>(step % 3)];
}

std::string to_string(const Exposure& e, std::string_view weight, const RuntimeOptions& options) {
  return fmt::format("{}.{} (micro-batch {}, {} bytes) waited {:.0f} us: {}", weight, to_string(e.phase), e.micro_batch,
                     e.bytes, e.seconds * 1e6, remedy(e, options));
}

}  // namespace tessera::etp
