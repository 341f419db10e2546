#include "device/virtual/virtual_stream.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "device/device.h"
#include "device/virtual/scheduler.h"

namespace tessera::device {

VirtualStream::VirtualStream(const StreamOptions& options, Device& device, VirtualScheduler& scheduler)
    : Stream(options.name, device, device.recorder().add_actor(options.name)),
      scheduler_(scheduler),
      progress_(std::make_shared<Progress>(options.name)) {
  scheduler_.add(*this);
}

VirtualStream::~VirtualStream() {
  close(Deadline::at(TimePoint::max()));
  scheduler_.remove(*this);
}

void VirtualStream::close(const Deadline&) {
  if (queue_.empty()) return;
  try {
    scheduler_.block({.ready = [this] { return queue_.empty(); },
                      .what = [this] { return fmt::format("the end of stream {}", name()); }});
  } catch (...) {  // stuck: the run reports it, with this stream's operations
    drop();
  }
}

Status VirtualStream::take_error() {
  if (!progress_->poisoned()) return {};
  Status status = progress_->forget(tickets_);
  push({});  // later events have a later ticket than the poison's last
  return status;
}

void VirtualStream::push(Item item) {
  item.ticket = ++tickets_;
  item.given = scheduler_.next();
  queue_.push_back(std::move(item));
  scheduler_.perhaps_yield();
}

void VirtualStream::give(Operation&& operation, uint64_t number) {
  push({.number = number, .operation = std::make_shared<const Operation>(std::move(operation))});
}

void VirtualStream::give(std::shared_ptr<const Operation> operation, uint64_t number) {
  push({.number = number, .operation = std::move(operation)});
}

void VirtualStream::give_wait(const Event& event) {
  push({.event = event});
}

bool VirtualStream::ready() const {
  if (queue_.empty()) return false;
  const Item& head = queue_.front();
  if (progress_->skips(head.ticket)) return true;
  if (head.operation == nullptr) return head.event.done();
  try {
    return std::ranges::all_of(head.operation->after, [](const auto& condition) { return condition->met(); });
  } catch (...) {  // it can never become true: the operation fails when it is run
    return true;
  }
}

void VirtualStream::run_head() {
  Item item = std::move(queue_.front());
  queue_.pop_front();
  if (!progress_->skips(item.ticket)) run(item);
  item.operation.reset();
  progress_->end(item.ticket);
}

void VirtualStream::run(const Item& item) {
  if (item.operation == nullptr) {
    if (Status status = item.event.status(); !status.ok()) progress_->fail(item.ticket, std::move(status));
    return;
  }
  const Operation& operation = *item.operation;
  try {
    for (const auto& condition : operation.after) {
      if (!condition->met()) fail_internal("{} is no longer met", condition->to_string());
      note_wait(operation, item.number, *condition);
    }
    if (operation.body) operation.body();
  } catch (...) {
    progress_->fail(item.ticket, failure_of(operation));
  }
}

void VirtualStream::drop() {
  while (!queue_.empty()) {
    const Item item = std::move(queue_.front());
    queue_.pop_front();
    progress_->fail(item.ticket, VirtualScheduler::cancelled());
    progress_->end(item.ticket);
  }
}

std::string VirtualStream::blocked() const {
  if (queue_.empty()) return {};
  const Item& head = queue_.front();
  std::string text = fmt::format("\n  rank {}, stream {}: ", device().recorder().rank(), name());
  if (head.operation == nullptr) {
    text += fmt::format("waits for an event of {}", head.event.source()->to_string());
  } else {
    text += fmt::format("{}{}{} waits for ", head.operation->name, head.operation->subject.empty() ? "" : " ",
                        head.operation->subject);
    const char* separator = "";
    for (const auto& condition : head.operation->after) {
      if (condition->met()) continue;
      text += separator + condition->to_string();
      separator = ", ";
    }
  }
  if (queue_.size() > 1) text += fmt::format("; {} more behind it", queue_.size() - 1);
  return text;
}

}  // namespace tessera::device
