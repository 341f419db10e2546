// A stream of a VirtualWorld: a queue that the scheduler runs.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "device/progress.h"
#include "device/stream.h"

namespace tessera::device {

class VirtualScheduler;

// Belongs to the world's thread.
class VirtualStream final : public Stream {
 public:
  VirtualStream(const StreamOptions& options, Device& device, VirtualScheduler& scheduler);
  ~VirtualStream() override;

  Status status() const override { return progress_->status(); }
  Status take_error() override;
  // Deadlines do not pass: it drops nothing, unless the world is stuck.
  void close(const Deadline& deadline) override;

  // For the scheduler: whether there is a next operation and all that it waits for has come; when it was given; and to
  // run it.
  bool ready() const;
  uint64_t head_given() const { return queue_.front().given; }
  void run_head();
  // The failure of everything that is left: a deadlock has ended the run.
  void drop();
  // A line for a deadlock's report; empty if there is nothing to run.
  std::string blocked() const;

 private:
  struct Item {
    uint64_t ticket = 0;
    uint64_t number = 0;
    uint64_t given = 0;
    std::shared_ptr<const Operation> operation{};
    Event event{};
  };

  void give(Operation&& operation, uint64_t number) override;
  void give(std::shared_ptr<const Operation> operation, uint64_t number) override;
  Event mark(uint64_t event) override { return {progress_, tickets_, event}; }
  void give_wait(const Event& event) override;

  void push(Item item);
  void run(const Item& item);

  VirtualScheduler& scheduler_;
  const std::shared_ptr<Progress> progress_;
  std::deque<Item> queue_;
  uint64_t tickets_ = 0;
};

}  // namespace tessera::device
