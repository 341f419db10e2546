// Numbers names in the order in which they are added; tables beside it are indexed by that number. A peer may send a
// hundred thousand names in one batch.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace tessera::bus {

// Refers to the names, which must outlive it. Thread-compatible. Both calls take time proportional to the name's
// length, whatever names a peer chooses.
class NameTable {
 public:
  explicit NameTable(size_t expected);  // number of names; there may be more

  // The name's number, from 0; an equal name has the same.
  uint32_t add(std::string_view name);
  std::optional<uint32_t> find(std::string_view name) const;
  size_t size() const { return names_.size(); }
  std::string_view name(uint32_t number) const { return names_[number]; }

 private:
  struct Slot {
    uint32_t hash = 0;
    uint32_t number = kNone;
  };
  static constexpr uint32_t kNone = UINT32_MAX;

  size_t slot_of(std::string_view name, uint64_t hash) const;  // the name's slot, or the one where it belongs
  void grow();

  std::vector<std::string_view> names_;
  std::vector<Slot> slots_;  // their count is a power of two; at least half are empty
};

}  // namespace tessera::bus
