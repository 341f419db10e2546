#include "codec/simd/kernel.h"

#include <hwy/targets.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "base/config.h"
#include "base/fail.h"
#include "codec/float/same_name.h"
#include "codec/simd/kernel_set.h"

namespace tessera {
namespace codec {
namespace {

std::vector<KernelSet> make_sets() {
  std::vector<KernelSet> sets;
  // The better a target, the lower its bit.
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (target == HWY_SCALAR || target == HWY_EMU128) continue;
    sets.push_back({.target = hwy::TargetName(target),
                    .cast = &simd_cast(target),
                    .stream = &simd_stream(target),
                    .digest = &simd_digest(target),
                    .reduce = &simd_reduce(target),
                    .fold = &simd_fold(target),
                    .amax = &simd_amax(target),
                    .scale = &simd_scale(target),
                    .quantize = &simd_quantize(target),
                    .decode = &simd_decode(target),
                    .transpose = &simd_transpose(target),
                    .changes = &simd_changes(target),
                    .squares = &simd_squares(target)});
  }
  sets.push_back({.target = "scalar",
                  .cast = &scalar_cast(),
                  .stream = &scalar_stream(),
                  .digest = &scalar_digest(),
                  .reduce = &scalar_reduce(),
                  .fold = &scalar_fold(),
                  .amax = &scalar_amax(),
                  .scale = &scalar_scale(),
                  .quantize = &scalar_quantize(),
                  .decode = &scalar_decode(),
                  .transpose = &scalar_transpose(),
                  .changes = &scalar_changes(),
                  .squares = &scalar_squares()});
  return sets;
}

const std::vector<KernelSet>& kernel_sets() {
  static const std::vector<KernelSet> sets = make_sets();
  return sets;
}

const KernelSet& find_set(std::string_view name, std::string_view who) {
  for (const KernelSet& set : kernel_sets())
    if (same_name(set.target, name)) return set;
  fail(ErrorCode::kInvalidArgument, "{}: no codec kernel '{}' in this build on this CPU: use one of {}"_message, who,
       name, fmt::join(available_kernels(), ", "));
}

// The only place that knows which variant is active.
std::atomic<const KernelSet*>& active_set() {
  static std::atomic<const KernelSet*> active = [] {
    const std::string& forced = Config::get().force_kernel;
    return forced.empty() ? &kernel_sets().front() : &find_set(forced, "TESSERA_FORCE_KERNEL");
  }();
  return active;
}

}  // namespace

const KernelSet& active_kernels() {
  return *active_set().load(std::memory_order_acquire);
}

}  // namespace codec

std::vector<std::string_view> available_kernels() {
  std::vector<std::string_view> names;
  for (const codec::KernelSet& set : codec::kernel_sets()) names.push_back(set.target);
  return names;
}

std::string_view active_kernel() {
  return codec::active_kernels().target;
}

ForcedKernel::ForcedKernel(std::string_view name)
    : previous_(codec::active_set().exchange(&codec::find_set(name, "ForcedKernel"))) {}

ForcedKernel::~ForcedKernel() {
  codec::active_set().store(static_cast<const codec::KernelSet*>(previous_));
}

}  // namespace tessera
