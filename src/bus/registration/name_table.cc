#define XXH_INLINE_ALL
#include "bus/registration/name_table.h"

#include <xxhash.h>

#include <bit>
#include <random>

namespace tessera::bus {
namespace {

uint64_t hash_of(std::string_view name) {
  static const uint64_t seed = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return XXH3_64bits_withSeed(name.data(), name.size(), seed);
}

}  // namespace

NameTable::NameTable(size_t expected) : slots_(std::bit_ceil(2 * expected + 2)) {
  names_.reserve(expected);
}

size_t NameTable::slot_of(std::string_view name, uint64_t hash) const {
  const size_t mask = slots_.size() - 1;
  for (size_t at = hash & mask;; at = (at + 1) & mask) {
    const Slot& slot = slots_[at];
    if (slot.number == kNone || (slot.hash == hash >> 32 && names_[slot.number] == name)) return at;
  }
}

uint32_t NameTable::add(std::string_view name) {
  const uint64_t hash = hash_of(name);
  Slot* slot = &slots_[slot_of(name, hash)];
  if (slot->number != kNone) return slot->number;
  if (2 * (names_.size() + 1) > slots_.size()) {
    grow();
    slot = &slots_[slot_of(name, hash)];
  }
  *slot = {static_cast<uint32_t>(hash >> 32), static_cast<uint32_t>(names_.size())};
  names_.push_back(name);
  return slot->number;
}

std::optional<uint32_t> NameTable::find(std::string_view name) const {
  const uint32_t number = slots_[slot_of(name, hash_of(name))].number;
  return number == kNone ? std::nullopt : std::optional(number);
}

void NameTable::grow() {
  slots_.assign(2 * slots_.size(), {});
  for (uint32_t number = 0; number < names_.size(); ++number) {
    const uint64_t hash = hash_of(names_[number]);
    slots_[slot_of(names_[number], hash)] = {static_cast<uint32_t>(hash >> 32), number};
  }
}

}  // namespace tessera::bus
