// Uses of weights that are read where they lie: this rank's own, or all owners' through one mapping.
#include "base/log.h"
#include "base/message.h"
#include "collective/movement/gather.h"
#include "etp/consumption.h"

namespace tessera::etp {

void Consumptions::note_use_in_place(const Parameter& p) const {
  ++context_.counters.in_place;
  if (context_.compute->runs_inline()) context_.note_host_read("use", p, p.shard->data(), p.shard->bytes());
}

void Consumptions::use_in_place(Parameter& p, FullWeight& out) {
  out.keeper_ = p.shard;
  out.data_ = p.shard->data();
  out.dtype_ = p.weight.compute;
  out.rows_ = p.weight.spec.rows;
  out.columns_ = p.weight.columns();
  out.version_ = static_cast<int64_t>(version_of(p));
}

void Consumptions::map(std::span<Parameter* const> weights) {
  bool all = true;
  for (Parameter* p : weights)
    if (p->weight.mapped) all = make_view(*p) && all;
  if (!all) rebuild();  // those cost buffers
}

bool Consumptions::make_view(Parameter& p) {
  p.view = WeightView::of(p, views_);
  if (p.view == nullptr) {
    log_event(LogLevel::info, "weight.copied", {}, "{} is copied at each gather: its rows cannot be mapped", p.name());
    p.weight.mapped = false;
  }
  return p.view != nullptr;
}

bool Consumptions::use_mapped(Unit& unit, Exposure exposure, FullWeight& out) {
  Parameter& p = *unit.weights.front();
  if (p.view == nullptr && !make_view(p)) return false;
  exposure.publisher = unpublished_owner(unit);
  const bool late = exposure.publisher >= 0;
  exposure.cause = ExposureCause::kNotPublished;
  exposure.began = late ? Clock::steady().now() : TimePoint();
  if (late || context_.device.recorder().on()) await_published(unit);
  for (int q = 0; q < context_.ranks(); ++q)
    if (p.weight.reads(q)) collective::is_published(context_.group, q, part_of(p, Plane::kRow, nullptr));
  note_exposure(exposure, unit_of({unit.weights.data(), 1}), Plane::kRow);
  ++context_.counters.mapped;
  use_in_place(p, out);
  out.keeper_ = p.view->lease(p);
  out.data_ = p.view->data();
  return true;
}

void Consumptions::detach(std::span<Parameter* const> weights) {
  for (Parameter* p : weights) {
    if (p->view == nullptr || !p->view->leased()) continue;
    p->view->detach();
    p->view = nullptr;
  }
}

void Consumptions::close() {
  for (const auto& p : context_.parameters) {
    Parameter* const weight = p.get();
    try {
      detach({&weight, 1});
    } catch (const Error& error) {
      log_event(LogLevel::warn, "weight.undetached", {}, "{}: {}"_message, p->name(), error.what());
    }
    p->view = nullptr;
  }
}

}  // namespace tessera::etp
