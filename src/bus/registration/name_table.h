// Names, numbered as they come: what is known of each is kept in a list beside it. A batch has a hundred thousand of
// them, from a peer.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace tessera::bus {

// Refers to the names, which must outlive it. Thread-compatible. Both calls are O(the name's length), whatever a peer
// chooses its names to be.
class NameTable {
 public:
  explicit NameTable(size_t expected);  // names; more may come

  // Its number, from 0; that of an equal one if there was one.
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

  size_t slot_of(std::string_view name, uint64_t hash) const;  // of that name, or where it belongs
  void grow();

  std::vector<std::string_view> names_;
  std::vector<Slot> slots_;  // a power of two of them, half of them empty at least
};

}  // namespace tessera::bus
