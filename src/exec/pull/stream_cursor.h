// How the routes of a stream follow one another in its frames. A function of only their sizes, so that both ends
// agree.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "transport/byte_stream.h"

namespace tessera {

// The parts of a stream, one behind the other, each at a multiple of kAlignment, so that no element lies across two
// frames.
class StreamLayout {
 public:
  static constexpr int64_t kAlignment = 16;

  void clear() {
    begins_.clear();
    ends_.clear();
    end_ = 0;
  }
  void add(int64_t bytes) {
    begins_.push_back((end_ + kAlignment - 1) / kAlignment * kAlignment);
    end_ = begins_.back() + bytes;
    ends_.push_back(end_);
  }
  int64_t bytes() const { return end_; }

  // Goes through a stream frame by frame.
  class Cursor {
   public:
    explicit Cursor(const StreamLayout& stream) : stream_(&stream) {}
    bool at_end() const { return at_ >= stream_->end_; }
    size_t frame_bytes() const {
      return static_cast<size_t>(std::min<int64_t>(stream_->end_ - at_, ByteStream::kFrameBytes));
    }
    // Calls visit(part, first_byte, last_byte, offset_in_frame) for what the current frame holds of each part that is
    // not empty; moves on.
    template <typename Visit>
    void visit_frame(Visit visit) {
      const int64_t frame_end = at_ + static_cast<int64_t>(frame_bytes());
      while (part_ < stream_->begins_.size() && stream_->begins_[part_] < frame_end) {
        const int64_t begin = stream_->begins_[part_];
        const int64_t end = stream_->ends_[part_];
        const int64_t from = std::max(begin, at_);
        const int64_t to = std::min(end, frame_end);
        if (from < to) visit(part_, from - begin, to - begin, static_cast<size_t>(from - at_));
        if (end > frame_end) break;
        ++part_;
      }
      at_ = frame_end;
    }

   private:
    const StreamLayout* stream_;
    int64_t at_ = 0;
    size_t part_ = 0;
  };

 private:
  std::vector<int64_t> begins_;
  std::vector<int64_t> ends_;
  int64_t end_ = 0;
};

}  // namespace tessera
