// The memory of one command queue: a memfd with a header, a ring of commands and one of replies
// (docs/formats/command-ring.md). Either side may create it; the other opens the descriptor that came over a socket.
//
// A queue belongs to one incarnation of the client. When either side dies, it is discarded, never repaired.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "base/fd.h"
#include "command/ring.h"

namespace tessera {

using CommandRing = BasicRing<ProcessSync>;
using CommandProducer = RingProducer<ProcessSync>;
using CommandConsumer = RingConsumer<ProcessSync>;

// How long an end polls before it sleeps: zero unless this process has two CPUs, otherwise about the cost of one
// wake-up.
Duration command_spin();

class CommandMemory {
 public:
  // At most `replies` commands are in progress at a time, from their push to the pop of their reply, so that there is
  // always room for a reply. At most kMaxSlots of each.
  struct Slots {
    uint32_t commands = 64;
    uint32_t replies = 256;
  };
  static constexpr uint32_t kMaxSlots = 4096;

  // Throws Error(kResourceExhausted).
  static std::shared_ptr<CommandMemory> create(uint64_t incarnation, Slots slots);
  static std::shared_ptr<CommandMemory> create(uint64_t incarnation) { return create(incarnation, Slots{}); }
  // Opens the memory that `owner` created. Throws Error(kInvalidArgument) unless it is sealed against shrinking and
  // matches its header; kMismatch for another version of the format.
  static std::shared_ptr<CommandMemory> open(UniqueFd fd, std::string_view owner);
  ~CommandMemory();
  CommandMemory(const CommandMemory&) = delete;
  CommandMemory& operator=(const CommandMemory&) = delete;

  int fd() const { return fd_.get(); }  // for the other side; empty if it was opened
  uint64_t incarnation() const { return incarnation_; }
  const CommandRing& commands() const { return commands_; }
  const CommandRing& replies() const { return replies_; }

 private:
  CommandMemory(UniqueFd fd, std::span<std::byte> data) : fd_(std::move(fd)), data_(data) {}
  void find_rings(uint64_t incarnation, Slots slots);

  UniqueFd fd_;
  const std::span<std::byte> data_;  // mapped
  uint64_t incarnation_ = 0;
  CommandRing commands_;
  CommandRing replies_;
};

}  // namespace tessera
