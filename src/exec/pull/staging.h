// Where pieces go that cannot be read where they lie, until they are whole. For pull*.cc only.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "exec/delta/delta_stream.h"
#include "exec/pull/pull_program.h"

namespace tessera {

// Rooms of one size for threads that fetch. Thread-safe.
class FetchRooms {
 public:
  FetchRooms(size_t count, size_t bytes) : rooms_(bytes == 0 ? 0 : count, std::vector<std::byte>(bytes)) {}

  // One of them, until this object goes. REQUIRES: no more at once than there are
  class Room {
   public:
    explicit Room(FetchRooms& rooms) : rooms_(rooms), bytes_(rooms.take()) {}
    ~Room() { rooms_.give_back(std::move(bytes_)); }
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;
    std::span<std::byte> bytes() { return bytes_; }

   private:
    FetchRooms& rooms_;
    std::vector<std::byte> bytes_;
  };

 private:
  std::vector<std::byte> take() {
    const MutexLock lock(mutex_);
    std::vector<std::byte> room = std::move(rooms_.back());
    rooms_.pop_back();
    return room;
  }
  void give_back(std::vector<std::byte> room) {
    const MutexLock lock(mutex_);
    rooms_.push_back(std::move(room));
  }

  Mutex mutex_;
  std::vector<std::vector<std::byte>> rooms_ GUARDED_BY(mutex_);
};

// Of one run. All but `rooms` belongs to the thread that drains the stream.
struct PullStaging {
  PullStaging(const PullProgram::Impl& program, size_t threads)
      : rooms(threads, program.fetch_bytes), delta_bytes(program.routes), wire(program.streamed_wire) {
    for (const StreamPart& part : program.stream_parts)
      if (part.delta != StreamPart::kNone) delta.reserve(program.delta[part.delta].reader.piece());
  }

  FetchRooms rooms;
  StreamLayout layout;               // of what the stream carries, if any of it is a delta
  std::vector<int64_t> delta_bytes;  // by route
  std::vector<std::byte> wire;       // a wire piece
  DeltaUnpacker delta;
  Digest digest;  // of the delta that is being unpacked
};

// One-sided get of bytes [offset, offset + out.size()) of `from`.
Status fetch(const Connection& peer, const Bytes& from, int64_t offset, std::span<std::byte> out);
// A segment of a delta into `room`, of max_segment_bytes().
Status fetch_segment(const Connection& peer, const DeltaPart& part, int64_t number, std::span<std::byte> room,
                     DeltaSegment& segment);

}  // namespace tessera
