#include "bus/prepare/preparation.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"

namespace tessera::bus {

Preparation::Preparation(const SessionSetup& setup, const SourceOf& source_of, Events events)
    : setup_(setup), events_(std::move(events)) {
  if (!setup_.routes.reductions.empty()) {
    reducer_ =
        std::make_unique<Reducer>(*setup_.agent, setup_,
                                  Reducer::Events{.ready_changed = events_.ready_changed,
                                                  .lost = events_.lost,
                                                  .reduced = [this](const Status& status) { end(kReduce, status); },
                                                  .ahead = events_.ahead});
    setup_.on_allocation();
  }
  if (setup_.agreement.delta) {
    deltas_ = std::make_unique<DeltaEncoder>(*setup_.agent, setup_, source_of,
                                             [this](const Status& status) { end(kCompare, status); });
    setup_.on_allocation();
  }
  if (Quantizer::wanted(setup_.agreement.match)) {
    quantizer_ = std::make_unique<Quantizer>(
        *setup_.agent, setup_, source_of,
        Quantizer::Events{.ready_changed = events_.ready_changed,
                          .lost = events_.lost,
                          .quantized = [this](const Status& status) { end(kQuantise, status); }});
    setup_.on_allocation();
  }
  stages_[kReduce].step = reducer_.get();
  stages_[kQuantise].step = quantizer_.get();
  stages_[kCompare].step = deltas_.get();
}

Preparation::~Preparation() = default;

void Preparation::start(int64_t version, uint32_t slot, bool copied) {
  version_ = version;
  slot_ = slot;
  active_ = true;
  copied_ = copied;
  for (Stage& stage : stages_) stage = {.step = stage.step, .begun = false, .done = stage.step == nullptr};
  if (reducer_)
    begin(stages_[kReduce]);
  else
    advance();
}

void Preparation::begin(Stage& stage) {
  if (stage.step != nullptr && !std::exchange(stage.begun, true)) stage.step->start(version_, slot_);
}

void Preparation::end(StepName name, const Status& status) {
  if (!active_) return events_.stopped();
  if (!status.ok()) return events_.failed(status);
  stages_[name].done = true;
  advance();
}

void Preparation::copied() {
  copied_ = true;
  advance();
}

void Preparation::advance() {
  if (!stages_[kReduce].done) return;
  if (complete()) return events_.prepared();
  if (!copied_) return;
  begin(stages_[kQuantise]);
  begin(stages_[kCompare]);
}

void Preparation::abort(const Status& status) {
  active_ = false;
  Stage& quantise = stages_[kQuantise];
  if (quantizer_ && !std::exchange(quantise.begun, true)) quantizer_->give_up(version_, status);
  for (const Stage& stage : stages_)
    if (stage.step != nullptr) stage.step->abort(status);
}

bool Preparation::busy() const {
  return std::ranges::any_of(stages_, [](const Stage& stage) { return stage.step != nullptr && stage.step->busy(); });
}

bool Preparation::complete() const {
  return std::ranges::all_of(stages_, &Stage::done);
}

bool Preparation::compared(int64_t version, uint32_t slot) const {
  return deltas_ && stages_[kCompare].done && version == version_ && slot == slot_ && deltas_->stamp(slot) != 0;
}

void Preparation::passed(int64_t version) {
  if (quantizer_ && version > 0) quantizer_->exchange().passed(version);
}

// The step that holds the version up: the last in their order.
const Preparation::Stage* Preparation::present() const {
  const Stage& quantise = stages_[kQuantise];
  if (quantise.done && stages_[kCompare].begun) return &stages_[kCompare];
  return quantise.begun ? &quantise : &stages_[kReduce];
}

std::string Preparation::missing() const {
  const PreparationStep* step = present()->step;
  return step == nullptr ? "it was still being copied" : step->missing();
}

std::string Preparation::awaited() const {
  const PreparationStep* step = present()->step;
  return step == nullptr ? fmt::format("version {} to be copied"_message, version_) : step->awaited(version_);
}

std::vector<Link*> Preparation::links() const {
  std::vector<Link*> links;
  if (reducer_)
    for (const auto& link : reducer_->links())
      if (link->connection() != nullptr) links.push_back(link->connection());
  if (quantizer_)
    for (Link* link : quantizer_->exchange().links()) links.push_back(link);
  return links;
}

void Preparation::detach(const Status& why) {
  if (reducer_) reducer_->detach(why);
  if (quantizer_) quantizer_->exchange().detach(why);
}

}  // namespace tessera::bus
