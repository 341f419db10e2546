// The words that a rank shows to its peers, and how a weight's rounds are counted in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera::collective {

// A rank writes only its own words; all of them only grow.
enum class Word : uint8_t {
  // One for each slot (a weight has one slot in its group, the same on all ranks):
  kPublished,  // the weight's version that peers may read
  kProduced,   // round_word(interval, gradients produced in it)
  kFolded,     // round_word(interval, rounds folded in it), by an owner of rows
  // One for the rank, at kWholeRank:
  kRetired,   // intervals whose published versions this rank will read no more
  kClosed,    // intervals in which this rank will produce nothing more
  kLeftPlan,  // how often this rank has left its planned order
  kDone,      // 1: this rank reads nothing of the others' any more
};
inline constexpr Word kLastSlotWord = Word::kFolded;
inline constexpr Word kLastWord = Word::kDone;
inline constexpr uint32_t kWholeRank = UINT32_MAX;

std::string_view to_string(Word word);  // "published", "left plan"

// An *interval* lies between two updates. Round j of a weight is the j-th gradient (from 0) that a rank produces for it
// in an interval.
inline constexpr int kRoundBits = 24;
inline constexpr uint64_t kMaxRounds = (uint64_t{1} << kRoundBits) - 1;
inline constexpr uint64_t kMaxIntervals = (uint64_t{1} << 38) - 1;
inline constexpr uint64_t kMaxWordValue = (kMaxIntervals << kRoundBits) | kMaxRounds;  // of any word

// What kProduced and kFolded say after `rounds` rounds of an interval. kProduced of (k, j + 1) shows round j of k.
constexpr uint64_t round_word(uint64_t interval, uint64_t rounds) {
  return interval << kRoundBits | rounds;
}
constexpr uint64_t interval_of(uint64_t word) {
  return word >> kRoundBits;
}
constexpr uint64_t rounds_of(uint64_t word) {
  return word & kMaxRounds;
}

// The gradients of a slot that a rank can show at the same time: those of rounds j, j + 1, ... j + kShownRounds - 1.
inline constexpr uint64_t kShownRounds = 4;

}  // namespace tessera::collective
