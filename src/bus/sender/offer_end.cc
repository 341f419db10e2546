// How an offer ends: every receiver has it, it fails or is taken back, its readers do not stop; and who it waits for.
#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "bus/sender/sender_session.h"

namespace tessera::bus {
namespace {

constexpr Duration kRevokeGrace = seconds(5);  // for receivers to stop reading

}  // namespace

bool SenderSession::idle() const {
  if (phase_ != Phase::kIdle) return false;
  const bool digesting = std::ranges::any_of(slots_, &Slot::running);
  return !digesting && !(staged() && (reading() || held_ != 0));
}

void SenderSession::check_ended() {
  if (staged()) {
    // A thread that fills a stream may still have to say so when the peer has drained it.
    const auto reads = [&](const auto& entry) {
      const SourceLink& link = *entry.second;
      if (link.running()) return true;
      return phase_ == Phase::kFailing ? link.open() && link.taking() != 0 : link.ended_version() != offering_;
    };
    const bool read = std::ranges::any_of(owners_, reads);
    const bool prepared = phase_ != Phase::kPreparing || (reduced_ && quantised_ && compared_);
    if (phase_ != Phase::kIdle && !read && prepared && !preparing())
      end(phase_ == Phase::kFailing ? failure_ : Status());
    else if (retires())
      owner_.on_sender_retired(*this);
    if (!leaving_.ok() && idle()) owner_.on_unpinned(*this);
    return;
  }
  if (phase_ == Phase::kIdle || phase_ == Phase::kPreparing) return;
  if (slots_.front().running || preparing() || reading()) return;
  if (phase_ == Phase::kOffered)
    for (const auto& [rank, link] : receivers_)
      if (link->done_version() != offering_) return;
  slots_.front().version = 0;
  end(phase_ == Phase::kOffered ? Status() : failure_);
}

void SenderSession::end(const Status& status) {
  phase_ = Phase::kIdle;
  if (!staged()) {
    held_ = 0;
    loop().cancel_timer(std::exchange(revoke_timer_, 0));
    owner_.on_offer_over(*this, status);
  } else {
    owner_.on_prepared(*this, status);
  }
  if (retires()) owner_.on_sender_retired(*this);
}

// --- failing -------------------------------------------------------------------------------------

// Staged: what is on offer already stays.
void SenderSession::fail_offer(const Status& status) {
  if (phase_ == Phase::kIdle) return;
  if (phase_ == Phase::kFailing) return check_ended();  // whoever it waited for to stop reading may be lost
  phase_ = Phase::kFailing;
  failure_cause_ = status;
  failure_ = Status(status.code(), fmt::format("{}: {} while {} sent version {}", describe(), status.message(),
                                               identity().name(), offering_));
  if (reducer_) reducer_->abort(status);
  if (quantizer_ && !std::exchange(quantising_, true)) quantizer_->give_up(offering_, status);
  if (quantizer_) quantizer_->abort(status);
  if (delta_) delta_->abort(status);
  const auto take_back = [&](const auto& links) {
    for (const auto& [rank, link] : links) {
      if (link->open()) link->withdraw(offering_);
      if (link->open() && link->taking() != 0) link->revoke(status);
      link->abort_run(status);
    }
  };
  take_back(owners_);
  if (!staged()) {
    if (slots_.front().running) slots_.front().run->abort(status);
    take_back(receivers_);
  }
  if (revoke_timer_ == 0) revoke_timer_ = loop().add_timer_after(kRevokeGrace, [this] { stop_waiting_for_readers(); });
  check_ended();
}

void SenderSession::leave(const Status& why) {
  leaving_ = why;
  for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
    clear(slot);
    if (slots_[slot].running) slots_[slot].run->abort(why);
  }
  held_ = 0;
  for (const auto& [rank, link] : receivers_) {
    if (link->open() && link->taking() != 0) link->revoke(why);
    link->abort_run(why);
  }
  if (revoke_timer_ == 0) revoke_timer_ = loop().add_timer_after(kRevokeGrace, [this] { stop_waiting_for_readers(); });
}

// A receiver that was asked to stop reading does not answer: cut it off, which it sees as the end of this session.
void SenderSession::stop_waiting_for_readers() {
  revoke_timer_ = 0;
  for (const auto* links : {&receivers_, &owners_}) {
    for (const auto& [rank, link] : *links) {
      if (link->taking() == 0 || !link->open()) continue;
      if (staged() && !broken() && leaving_.ok() && is_receiver(*link)) continue;  // it was not asked
      log_event(LogLevel::warn, "connection.closed", {{"peer", link->name()}},
                "{}: {} does not stop reading; its connection is closed", describe(), link->name());
      const Status reason = failed(ErrorCode::kPeerLost, "{} did not answer", link->name());
      link->detach(reason);
      break_session(reason);
    }
  }
  if (broken()) held_ = 0;
  check_ended();
}

bool SenderSession::flows_since(TimePoint then) const {
  const auto taking = [&](const auto& entry) {
    return entry.second->taking() == offering_ || entry.second->done_version() == offering_;
  };
  return phase_ == Phase::kOffered && std::ranges::all_of(receivers_, taking) && last_activity_ > then;
}

std::string SenderSession::who_has_not_taken() const {
  if (phase_ == Phase::kPreparing && quantised_ && comparing_) return "it was still being compared with the last one";
  if (phase_ == Phase::kPreparing && quantising_) {
    const std::string names = quantizer_->waits_for();
    return names.empty() ? "it was still being quantised"
                         : fmt::format("{} have not told the amaxes of what is quantised", names);
  }
  if (phase_ == Phase::kPreparing)
    return fmt::format("{} have not offered their terms of the Partial tensors",
                       fmt::join(reducer_ ? reducer_->waiting_for() : std::vector<std::string>{}, ", "));
  std::vector<std::string> absent;
  std::vector<std::string> slow;
  for (const auto& [rank, link] : receivers_) {
    if (link->done_version() == offering_) continue;
    (link->taking() == offering_ ? slow : absent).push_back(link->name());
  }
  std::string text;
  if (!absent.empty()) text = fmt::format("{} did not come to take it", fmt::join(absent, ", "));
  if (!slow.empty()) text += fmt::format("{}{} did not finish", text.empty() ? "" : "; ", fmt::join(slow, ", "));
  return text;
}

std::string SenderSession::awaited() const {
  if (phase_ == Phase::kPreparing && quantised_ && comparing_)
    return fmt::format("version {} to be compared with the last one", offering_);
  if (phase_ == Phase::kPreparing && quantising_) {
    const std::string names = quantizer_->waits_for();
    return names.empty() ? fmt::format("version {} to be quantised", offering_)
                         : fmt::format("{} to tell the amaxes of version {}", names, offering_);
  }
  if (phase_ == Phase::kPreparing)
    return fmt::format("{} to offer terms of version {}",
                       fmt::join(reducer_ ? reducer_->waiting_for() : std::vector<std::string>{}, ", "), offering_);
  std::vector<std::string> names;
  for (const auto& [rank, link] : receivers_)
    if (link->done_version() != offering_) names.push_back(link->name());
  return fmt::format("{} to take version {}", fmt::join(names, ", "), offering_);
}

bool SenderSession::begun(int64_t version) const {
  const auto at_it = [&](const auto& entry) {
    return entry.second->taking() == version || entry.second->done_version() == version;
  };
  return version != 0 && std::ranges::any_of(receivers_, at_it);
}

bool SenderSession::undecided(int64_t version) const {
  if (version == 0 || broken() || begun(version)) return false;
  const auto reads_terms = [&](const auto& entry) { return entry.second->ended_version() != version; };
  const bool reduces = phase_ == Phase::kPreparing || std::ranges::any_of(owners_, reads_terms);
  return held_ == version || (!staged() && version == offering_ && phase_ != Phase::kFailing && reduces);
}

void SenderSession::on_source_detached(SourceLink& link, const Status& reason) {
  if (!broken()) left_ = link.left();
  link.abort_run(reason);
  break_session(reason);
}

void SenderSession::on_source_lost(SourceLink& link, const Status& status) {
  link.abort_run(status);
  break_session(status);
}

void SenderSession::on_source_broken(SourceLink& link, const Status& status) {
  break_session(status);
  if (link.done_version() != offering_) fail_offer(status);  // it will not take this version any more
}

void SenderSession::on_broken(const Status& latest) {
  if (held_ != 0 && !begun(held_)) owner_.on_begun(held_);
  // Nobody has to be told: whoever can see this peer is connected to it.
  // A receiver that has all it wanted may go while others are still at it.
  const auto gone = [&](const auto& entry) {
    return !entry.second->open() && entry.second->done_version() != offering_;
  };
  if (!staged() && phase_ == Phase::kOffered && std::ranges::none_of(receivers_, gone)) return check_ended();
  fail_offer(latest);
  if (staged()) {
    // Others may go on with what they have chosen; they choose nothing any more.
    check_taken();
    for (const auto& [rank, link] : receivers_)
      for (const Slot& slot : slots_)
        if (link->open() && slot.version != 0 && slot.version != held_) link->withdraw(slot.version);
    if (!idle() && revoke_timer_ == 0)
      revoke_timer_ = loop().add_timer_after(setup_.stall, [this] { stop_waiting_for_readers(); });
    owner_.on_unpinned(*this);
  }
  if (retires()) owner_.on_sender_retired(*this);
}

Progress SenderSession::sample() const {
  Progress progress;
  for (const auto& [rank, link] : receivers_) {
    progress.bytes_total += link->bytes();
    progress.bytes_done += link->progress();
  }
  return progress;
}

void SenderSession::detach_all(const Status& why) {
  loop().cancel_timer(std::exchange(revoke_timer_, 0));
  for (const auto& [rank, link] : receivers_)
    if (link->open()) link->detach(why);
  for (const auto& [rank, link] : owners_)
    if (link->open()) link->detach(why);
  if (reducer_) reducer_->detach(why);
  if (quantizer_) quantizer_->exchange().detach(why);
}

}  // namespace tessera::bus
