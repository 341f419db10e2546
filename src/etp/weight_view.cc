#include "etp/weight_view.h"

#include <utility>
#include <vector>

namespace tessera::etp {
namespace {

std::vector<device::Access> reads_of(const Parameter& p) {
  std::vector<device::Access> reads;
  const collective::PublishedWeight& published = *p.publication.row;
  for (const collective::PublishedRows& rows : published.owners)
    if (rows.count > 0)
      reads.push_back(device::read_of(rows.data,
                                      static_cast<size_t>(bytes_of(published.dtype, rows.count * published.columns)),
                                      p.publication.version));
  return reads;
}

}  // namespace

WeightView::WeightView(std::unique_ptr<JoinedView> view, std::shared_ptr<Shared> shared)
    : view_(std::move(view)), shared_(std::move(shared)) {
  shared_->mapped.fetch_add(static_cast<int64_t>(view_->bytes()), std::memory_order_relaxed);
}

WeightView::~WeightView() {
  (view_->detached() ? shared_->detached : shared_->mapped)
      .fetch_sub(static_cast<int64_t>(view_->bytes()), std::memory_order_relaxed);
}

std::shared_ptr<WeightView> WeightView::of(const Parameter& p, std::shared_ptr<Shared> shared) {
  std::vector<JoinedView::Part> parts;
  for (const device::Access& rows : reads_of(p))
    parts.push_back({.data = static_cast<const std::byte*>(rows.data), .bytes = rows.bytes});
  std::unique_ptr<JoinedView> view = JoinedView::of(parts);
  if (view == nullptr) return nullptr;
  return std::shared_ptr<WeightView>(new WeightView(std::move(view), std::move(shared)));
}

std::shared_ptr<const void> WeightView::lease(const Parameter& p) {
  std::vector<device::Access> reads;
  std::string weight;
  if (shared_->device.recorder().on()) {
    reads = reads_of(p);
    weight = p.name();
    note("use", weight, reads);
  }
  leases_.fetch_add(1, std::memory_order_relaxed);
  return {data(), [view = shared_from_this(), weight = std::move(weight), reads = std::move(reads)](const void*) {
            view->note("release", weight, reads);
            view->leases_.fetch_sub(1, std::memory_order_release);
          }};
}

void WeightView::note(const char* name, const std::string& weight, std::span<const device::Access> reads) const {
  if (!reads.empty() && !view_->detached()) shared_->device.recorder().host_access(name, weight, reads);
}

void WeightView::detach() {
  view_->detach();
  const auto bytes = static_cast<int64_t>(view_->bytes());
  shared_->mapped.fetch_sub(bytes, std::memory_order_relaxed);
  shared_->detached.fetch_add(bytes, std::memory_order_relaxed);
}

}  // namespace tessera::etp
