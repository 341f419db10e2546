// The layouts of many tensors in a message: each text once, and referred to by number, as 20,000 tensors have a few
// dozen (docs/formats/bus-protocol.md).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/bytes.h"
#include "tessera/layout.h"

namespace tessera::bus {

class LayoutTableWriter {
 public:
  // The number of `layout`.
  uint32_t add(const Layout& layout);
  void write(ByteWriter& out) const;

 private:
  std::unordered_map<std::string, uint32_t> numbers_;
  std::vector<std::string> texts_;
};

class LayoutTable {
 public:
  // `what` names the message in errors. Texts and their count are limited, and the ranks of all meshes together:
  // "1048576:R" is short, and takes megabytes. Throws Error(kInvalidArgument).
  static LayoutTable read(ByteReader& in, std::string_view what);
  // That of `tensor`, to be copied: bounds of ragged shards, which every copy has, are limited together. Throws
  // Error(kInvalidArgument) where there is no such layout.
  const Layout& take(uint32_t number, std::string_view tensor);

 private:
  std::string what_;
  std::vector<Layout> layouts_;
  size_t bounds_ = 0;  // taken
};

}  // namespace tessera::bus
