// Publishing: what a rank shows of its shards, in three phases for a list of weights: the amax of its rows, one
// exchange of the largest for all scalars of the list, the cast. Weights that are read in place take none of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "etp/context.h"

namespace tessera::etp {

// Under the runtime's lock. Each phase can be called by itself.
class Publisher {
 public:
  explicit Publisher(RuntimeContext& context) : context_(context) {}

  // Whether all ranks make this call with these weights.
  enum class Together : uint8_t { kYes, kNo };

  // Collective where a weight of the list needs an amax. Their next version is shown when it returns. While `*noop` is
  // not 0 planes stay as they are, and the version grows. Throws Error(kDataLoss) on all ranks for a value that is not
  // finite, before anything is published, unless RuntimeOptions::nonfinite lets it through; the rank that has it names
  // the row. Where ranks are not `together`, only weights that need an amax are looked at.
  void publish(std::span<Parameter* const> weights, const float* noop = nullptr, Together together = Together::kYes);

  // Of this rank's rows. Nothing is found in a native weight without a master.
  std::vector<Amax> amax(std::span<Parameter* const> weights, const float* noop) const;
  // Collective; sets Publication::amax where the format needs it.
  void agree(std::span<Parameter* const> weights, std::span<const Amax> own);
  // This rank's rows to its planes, with the agreed amax.
  void cast(Parameter& parameter, const float* noop) const;

  // In check mode: throws Error(kDataLoss), with weight and row, for a published shard that has been written since.
  void check_unwritten() const;

  // Shows the next version of weights, whose rows or planes are there.
  void show(std::span<Parameter* const> weights);

 private:
  void note_digests(Parameter& parameter) const;

  RuntimeContext& context_;
};

}  // namespace tessera::etp
