// A weight that uses read where its owners keep it: one mapping of all ranks' rows, into which nothing is copied.
//
// It shows what the owners write. So before they may, on a rank's way to its `retired` word, detach() gives what is
// still leased there memory of its own, and the next use gets another mapping. Nobody waits for a lease to end.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "device/device.h"
#include "etp/parameter.h"
#include "memory/host/joined_view.h"

namespace tessera::etp {

// lease(), detach() and of() under the runtime's lock. Leases end on any thread, also after the runtime.
class WeightView : public std::enable_shared_from_this<WeightView> {
 public:
  // What all views of a runtime have in common. Outlives it.
  struct Shared {
    std::shared_ptr<const void> keeper;  // of the device
    device::Device& device;
    std::atomic<int64_t> mapped{0};    // bytes of views,
    std::atomic<int64_t> detached{0};  // and of those that have memory of their own
  };

  // Null where JoinedView::of() is. REQUIRES: peers know the weight.
  static std::shared_ptr<WeightView> of(const Parameter& parameter, std::shared_ptr<Shared> shared);
  ~WeightView();
  WeightView(const WeightView&) = delete;
  WeightView& operator=(const WeightView&) = delete;

  const std::byte* data() const { return view_->data(); }
  // Of the present version, which all owners have published. It ends when the last copy goes.
  std::shared_ptr<const void> lease(const Parameter& parameter);
  bool leased() const { return leases_.load(std::memory_order_acquire) > 0; }  // who was has read all it will read
  // Throws Error(kResourceExhausted).
  void detach();

 private:
  WeightView(std::unique_ptr<JoinedView> view, std::shared_ptr<Shared> shared);
  // For the recorder, which knows the owners' memory by its own addresses.
  void note(const char* name, const std::string& weight, std::span<const device::Access> reads) const;

  const std::unique_ptr<JoinedView> view_;
  const std::shared_ptr<Shared> shared_;
  std::atomic<int> leases_{0};
};

}  // namespace tessera::etp
