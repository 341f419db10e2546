// A rank's page: what it shows to its peers (docs/formats/etp-pages.md). Only the rank writes it; peers map it
// read-only and believe nothing in it. And the bell page of a group, which all write.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "collective/group.h"
#include "collective/words.h"
#include "tessera/error.h"

namespace tessera::collective {

inline constexpr uint64_t kPageMagic = 0x3147505054455354;  // "TSETPPG1"
inline constexpr uint32_t kPageVersion = 5;
inline constexpr int kMaxRanks = 1024;
inline constexpr uint32_t kMaxSlots = 1 << 24;

// How far a rank has come. It only grows. kFinal: its words change no more, though it still calls collectives.
enum class RankState : uint64_t { kForming, kHere, kFinal, kLeft, kFailed };

// The calls that all ranks make together.
// kRefused answers whatever call the other ranks make under that number.
enum class CallKind : uint32_t { kExchange, kMax, kSum, kSumDone, kBarrier, kRefused };
inline constexpr CallKind kLastCallKind = CallKind::kRefused;
std::string_view to_string(CallKind kind);  // "exchange", "max_exchange", ...

// What a rank says of a call, before its bytes.
struct MailHeader {
  static constexpr size_t kWhatBytes = 64;
  uint64_t number = 0;
  CallKind kind = CallKind::kExchange;
  uint32_t what_bytes = 0;
  std::array<char, kWhatBytes> what{};
  uint64_t bytes = 0;      // of the whole call
  uint32_t code = 0;       // ErrorCode of a refusal, whose text is the mail
  uint32_t forwarded = 0;  // 1: the text names the rank that has refused, which is another one
};

inline constexpr size_t kMailBytes = size_t{64} << 10;  // of one step of a call
inline constexpr uint64_t kMails = 4;                   // steps that a page keeps
inline constexpr size_t kMaxRefusalBytes = 2048;        // of a refusal's text
struct Mail {
  MailHeader header;  // of a call's first step
  alignas(64) std::array<std::byte, kMailBytes> bytes;
};

// One gradient on show. `key` is round_word(interval, round + 1), stored last.
struct GradientEntry {
  std::atomic<uint64_t> key;
  std::atomic<uint32_t> arena;
  std::atomic<uint32_t> dtype;
  std::atomic<uint64_t> offset;
  std::atomic<uint64_t> bytes;
};

struct PageHeader {
  static constexpr size_t kFailureBytes = 2048;
  uint64_t magic;
  uint32_t version;
  uint32_t rank;
  uint32_t size;
  uint32_t slots;
  alignas(64) std::atomic<uint64_t> state;     // RankState
  alignas(64) std::atomic<uint64_t> words[4];  // of the whole rank
  alignas(64) std::atomic<uint64_t> step;      // of numbered calls: mails so far
  alignas(64) std::atomic<uint32_t> failure_code;
  std::atomic<uint32_t> failure_bytes;
  char failure[kFailureBytes];  // stored before `state` says kFailed
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint64_t>) == 8 && sizeof(GradientEntry) == 32 && sizeof(PageHeader) <= 4096);

// A page in memory, not owned. Thread-safe as the words are.
class Page {
 public:
  static size_t bytes_for(uint32_t slots);

  // A page that this process writes, over zeroed memory of bytes_for(slots).
  static Page create(std::byte* memory, uint32_t rank, uint32_t size, uint32_t slots);
  // A peer's. Throws Error(kMismatch), naming `owner`, unless the header is that of such a page.
  static Page open(const std::byte* memory, size_t bytes, uint32_t rank, uint32_t size, uint32_t slots,
                   std::string_view owner);

  uint32_t slots() const { return slots_; }
  std::atomic<uint64_t>& word(Word word, uint32_t slot) const;  // REQUIRES: has(word, slot)
  bool has(Word word, uint32_t slot) const;
  GradientEntry& gradient(uint32_t slot, uint64_t round) const;

  RankState state() const;  // kFailed for a value that no honest rank stores
  void set_state(RankState state) const;
  void set_failure(const Status& status) const;  // and the state
  // Returns why its rank has failed. The text is printable, and names `owner` if the page gives none.
  // REQUIRES: state() == kFailed
  Status failure(std::string_view owner) const;

  std::atomic<uint64_t>& step() const { return header().step; }
  Mail& mail(uint64_t step) const;

 private:
  Page(std::byte* memory, uint32_t slots) : memory_(memory), slots_(slots) {}
  PageHeader& header() const;

  std::byte* memory_;  // a peer's is never written
  uint32_t slots_;
};

}  // namespace tessera::collective
