#include <algorithm>
#include <cmath>

#include "base/fail.h"
#include "tessera/quantize.h"

namespace tessera {

AmaxHistory::AmaxHistory(size_t length, Algorithm algorithm, int margin)
    : length_(length), algorithm_(algorithm), margin_(margin) {
  if (length == 0) fail(ErrorCode::kInvalidArgument, "a history of 0 amaxes: give its length, 1 or more"_message);
  check_spec({.format = Format::kFp8E4M3, .margin = margin});
}

void AmaxHistory::push(float amax) {
  if (!(amax >= 0))
    fail(ErrorCode::kInvalidArgument, "amax {} in a history: it is a magnitude, 0 or more"_message, amax);
  if (values_.size() < length_) {
    values_.push_back(amax);
  } else {
    values_[next_] = amax;
  }
  next_ = (next_ + 1) % length_;
}

float AmaxHistory::amax() const {
  if (values_.empty()) return 0;
  if (algorithm_ == Algorithm::kMostRecent) return values_[(next_ + length_ - 1) % length_];
  return *std::ranges::max_element(values_);
}

std::vector<float> AmaxHistory::values() const {
  std::vector<float> newest_first;
  for (size_t i = 1; i <= values_.size(); ++i) newest_first.push_back(values_[(next_ + length_ - i) % length_]);
  return newest_first;
}

}  // namespace tessera
