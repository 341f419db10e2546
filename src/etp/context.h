// What the parts of a runtime share.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/group.h"
#include "device/device.h"
#include "etp/parameter.h"
#include "tessera/etp.h"

namespace tessera::etp {

// Side streams by chain: gathers and reductions apart, so that neither waits behind the other. A stream is made at its
// first use. Under the runtime's lock.
class SideStreams {
 public:
  SideStreams(collective::Group& group, const RuntimeOptions& options) : group_(group), options_(options) {}

  device::Stream& gather(Chain chain) { return of(gathers_, chain, "gather", options_.gather_bytes_per_second); }
  device::Stream& reduce(Chain chain) { return of(reductions_, chain, "reduce", options_.reduce_bytes_per_second); }
  std::vector<StreamInfo> infos() const;
  // Waits until those of a chain, or of both, are idle; throws the first one's error.
  void synchronize(std::optional<Chain> chain, bool gathers, const Deadline& deadline);
  // Those that exist.
  std::vector<device::Stream*> gathers() const { return existing(gathers_); }
  std::vector<device::Stream*> reductions() const { return existing(reductions_); }
  // Waits until all of them are idle; throws the first one's error.
  void synchronize(const Deadline& deadline);
  // Ends them.
  void close(const Deadline& deadline);

 private:
  using Streams = std::array<std::shared_ptr<device::Stream>, kChains>;
  device::Stream& of(Streams& streams, Chain chain, const char* what, std::optional<double> rate);
  static std::vector<device::Stream*> existing(const Streams& streams);

  collective::Group& group_;
  const RuntimeOptions& options_;
  Streams gathers_;
  Streams reductions_;
};

// Used under the runtime's lock.
struct RuntimeContext {
  collective::Group& group;
  device::Device& device;
  const RuntimeOptions& options;
  bool check = false;
  bool maps = false;  // weights that can be
  std::shared_ptr<device::Stream> compute;
  SideStreams streams;
  RuntimeReport counters{};  // only what counts events
  std::vector<std::unique_ptr<Parameter>> parameters{};
  std::vector<std::vector<Parameter*>> experts{};    // list n of experts is experts[n - 1]
  std::vector<std::unique_ptr<Parameter>> stacks{};  // what stands for stacks: whole_of()
  uint64_t interval = 0;                             // drains so far
  uint64_t updates = 0;
  GraphScope scope{};     // of weights that are added
  uint32_t captures = 0;  // that live

  int rank() const { return group.rank(); }
  int ranks() const { return group.size(); }
  int shards() const { return group.size() / options.replicas; }  // of a weight
  float scale() const { return options.scale == GradientScale::kMean ? 1.0F / static_cast<float>(group.size()) : 1.0F; }
  // Throws Error(kInvalidArgument) for a number that no weight has, one that has been removed, or a weight that start()
  // has not seen.
  Parameter& parameter(WeightId weight) const;
  Parameter& started(WeightId weight) const;
  // For the recorder: the host reads or writes memory of a weight now.
  void note_host_read(const char* name, const Parameter& of, const void* data, size_t bytes) const;
  void note_host_write(const char* name, const Parameter& of, const void* data, size_t bytes) const;
};

}  // namespace tessera::etp
