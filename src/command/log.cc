#include "command/log.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/bytes.h"
#include "base/fail.h"

namespace tessera {
namespace {

constexpr uint16_t kResult = 1;
constexpr uint16_t kFailure = 2;

}  // namespace

uint16_t write_outcome(const CommandOutcome& outcome, std::vector<std::byte>& payload) {
  if (outcome.status.ok()) {
    payload = outcome.result;
    return kResult;
  }
  const std::string_view text = outcome.status.message();
  const auto shown = std::as_bytes(std::span(text.substr(0, kMaxRecordPayload - 1)));
  payload.assign(1, static_cast<std::byte>(outcome.status.code()));
  payload.insert(payload.end(), shown.begin(), shown.end());
  return kFailure;
}

CommandOutcome read_outcome(const Record& reply) {
  const auto payload = reply.payload();
  if (reply.head.type == kResult) return {.status = {}, .result = {payload.begin(), payload.end()}};
  if (reply.head.type != kFailure) fail(ErrorCode::kInvalidArgument, "a reply of type {}"_message, reply.head.type);
  ByteReader in(payload, "a reply");
  const auto code = static_cast<ErrorCode>(in.get<uint8_t>());
  if (code == ErrorCode::kOk || code > ErrorCode::kInternal)
    fail(ErrorCode::kInvalidArgument, "a reply with error code {}"_message, static_cast<int>(code));
  const auto text = payload.subspan(1);
  return {.status = Status(code, std::string(reinterpret_cast<const char*>(text.data()), text.size())), .result = {}};
}

size_t CommandLog::running() const {
  const MutexLock lock(mutex_);
  return running_.size();
}

bool CommandLog::begin(uint64_t id, const std::shared_ptr<ReplySink>& sink) {
  CommandOutcome outcome;
  {
    const MutexLock lock(mutex_);
    const auto finished = finished_.find(id);
    if (finished != finished_.end()) {
      outcome = finished->second;
    } else if (const auto running = running_.find(id); running != running_.end()) {
      running->second.push_back(sink);
      return false;
    } else if (running_.size() >= kMostRunning) {
      outcome.status =
          failed(ErrorCode::kResourceExhausted, "{} commands are being executed already"_message, kMostRunning);
    } else if (id > forgotten_) {
      running_[id].push_back(sink);
      return true;
    } else {
      outcome.status = failed(
          ErrorCode::kNotFound,
          "command {} may have come before, but too many others came since: its outcome is forgotten"_message, id);
    }
  }
  sink->reply(id, outcome);
  return false;
}

void CommandLog::finish(uint64_t id, CommandOutcome outcome) {
  std::vector<std::weak_ptr<ReplySink>> sinks;
  {
    const MutexLock lock(mutex_);
    const auto running = running_.extract(id);
    TESSERA_CHECK(!running.empty());
    sinks = std::move(running.mapped());
    finished_.emplace(id, outcome);
    order_.push_back(id);
    if (order_.size() > remembered_) {
      forgotten_ = std::max(forgotten_, order_.front());
      finished_.erase(order_.front());
      order_.pop_front();
    }
  }
  for (const auto& weak : sinks)
    if (const auto sink = weak.lock()) sink->reply(id, outcome);
}

}  // namespace tessera
