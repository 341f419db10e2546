// The layouts of many tensors in a message: each text once, and referred to by number, since 20,000 tensors have a few
// dozen layouts (docs/formats/bus-protocol.md). The table precedes the tensors. A writer adds the layouts first, one
// for each tensor.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/fields.h"
#include "tessera/layout.h"

namespace tessera::bus {

inline constexpr uint32_t kMaxTensors = 1u << 22;
inline constexpr uint32_t kMaxLayoutText = uint32_t{1} << 20;

class LayoutTable {
 public:
  enum class Lacking : uint8_t { kRefused, kAllowed };  // for a tensor without a layout: a Layout{}, and no text

  // Errors name the message as `what`.
  explicit LayoutTable(std::string_view what, Lacking lacking = Lacking::kRefused) : what_(what), lacking_(lacking) {}

  void add(const Layout& layout);
  // Limits the texts, their count, and the ranks of all meshes together: "1048576:R" is short, and takes megabytes. A
  // reader throws Error(kInvalidArgument).
  static void fields(auto& f, auto& self) {
    f("layouts", self.texts_, kMaxTensors, kMaxLayoutText);
    if constexpr (kReads<decltype(f)>) self.parse();
  }
  // The number of a tensor's layout; tensors come in the order in which they were added. The bounds of ragged shards,
  // which are checked for every tensor, have a common limit. A reader throws Error(kInvalidArgument) if there is no
  // such layout.
  template <typename Fields, typename Of>
  void field(Fields& f, std::string_view tensor, Of& layout) {
    uint32_t number = kFills<Fields> ? kNone : numbers_[next_++];
    f("layout", number);
    if constexpr (kReads<Fields>) layout = take(number, tensor);
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  void parse();
  Layout take(uint32_t number, std::string_view tensor);

  std::string what_;
  Lacking lacking_;
  std::vector<std::string> texts_;
  std::unordered_map<Layout, uint32_t, LayoutHash> number_of_;  // for writing
  std::vector<uint32_t> numbers_;                               // one for each tensor
  size_t next_ = 0;
  std::vector<Layout> layouts_;  // from reading
  size_t bounds_ = 0;            // used so far
};

}  // namespace tessera::bus
