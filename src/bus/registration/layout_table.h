// The layouts of many tensors in a message: each text once, and referred to by number, as 20,000 tensors have a few
// dozen (docs/formats/bus-protocol.md). It goes before the tensors. Where it is written, the layouts are added first,
// one a tensor.
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
  enum class Lacking : uint8_t { kRefused, kAllowed };  // of a tensor without a layout: a Layout{}, and no text

  // `what` names the message in errors.
  explicit LayoutTable(std::string_view what, Lacking lacking = Lacking::kRefused) : what_(what), lacking_(lacking) {}

  void add(const Layout& layout);
  // Texts and their count are limited, and the ranks of all meshes together: "1048576:R" is short, and takes megabytes.
  // A reader throws Error(kInvalidArgument).
  static void fields(auto& f, auto& self) {
    f("layouts", self.texts_, kMaxTensors, kMaxLayoutText);
    if constexpr (kReads<decltype(f)>) self.parse();
  }
  // The number of a tensor's layout, tensors in the order in which they were added. Bounds of ragged shards, which
  // are checked for every tensor, are limited together. A reader throws Error(kInvalidArgument) where there is no such
  // layout.
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
  std::unordered_map<Layout, uint32_t, LayoutHash> number_of_;  // what is written
  std::vector<uint32_t> numbers_;                               // of each tensor
  size_t next_ = 0;
  std::vector<Layout> layouts_;  // what was read
  size_t bounds_ = 0;            // taken
};

}  // namespace tessera::bus
