// Random schedules against a brute force: the transitive closure of all edges, and every pair of accesses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bitset>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "device/record/check.h"
#include "device/record/logs_testing.h"

namespace tessera::device {
namespace {

constexpr size_t kMostNodes = 256;

using SideKey = std::tuple<int, uint64_t, bool>;                        // rank, record, whether it writes
using PairKey = std::tuple<SideKey, SideKey, int, uint64_t, uint64_t>;  // both, the owner and the bytes

PairKey key_of(SideKey a, SideKey b, int owner, uint64_t begin, uint64_t end) {
  if (b < a) std::swap(a, b);
  return {a, b, owner, begin, end};
}

// A schedule that some run could have had, with its edges.
class RandomSchedule {
 public:
  explicit RandomSchedule(uint64_t seed) : random_(seed), ranks_(below(3) + 1), logs_(ranks_) {
    for (int rank = 0; rank < ranks_; ++rank) {
      actors_.push_back({HandLogs::host(rank), 100 + actors_.size()});
      hosts_.push_back(actors_.size() - 1);
      for (int stream = below(4); stream > 0; --stream)
        actors_.push_back({logs_.stream(rank, "s"), 100 + actors_.size()});
    }
    for (int steps = 5 + below(35); steps > 0; --steps) step();
    std::ranges::shuffle(late_, random_);
    for (const Late& late : late_) write(late);
    std::ranges::shuffle(logs_.all(), random_);
  }

  std::vector<RankLog>& logs() { return logs_.all(); }

  std::set<PairKey> unordered_pairs() {
    for (size_t to = 0; to < nodes_; ++to)  // edges lead from lower to higher numbers
      for (size_t from = 0; from < to; ++from)
        if (before_[to][from]) before_[to] |= before_[from];
    std::set<PairKey> pairs;
    for (const Accessed& a : accesses_)
      for (const Accessed& b : accesses_) {
        if (a.node >= b.node || before_[b.node][a.node] || !(a.access.write || b.access.write)) continue;
        const uint64_t begin = std::max(a.access.offset, b.access.offset);
        const uint64_t end = std::min(a.access.offset + a.access.bytes, b.access.offset + b.access.bytes);
        if (a.access.region != b.access.region || begin >= end) continue;
        pairs.insert(key_of({a.rank, a.record, a.access.write}, {b.rank, b.record, b.access.write},
                            a.access.region.owner, begin, end));
      }
    return pairs;
  }

 private:
  struct Actor {
    HandLogs::Actor actor;
    uint64_t word;  // that only it sets
    std::optional<size_t> last{};
  };
  struct Event {
    int rank;
    uint64_t event;
    size_t node;
  };
  struct Late {
    HandLogs::Actor actor;
    uint64_t operation;
    std::vector<WordEdge> words;
  };
  struct Accessed {
    size_t node;
    int rank;
    uint64_t record;
    RecordedAccess access;
  };
  struct WordWrite {
    WordEdge word;
    size_t node;
  };

  int below(int end) { return static_cast<int>(random_() % static_cast<uint64_t>(end)); }
  size_t index_below(size_t end) { return random_() % end; }

  // The actor's next record, behind all that it follows.
  size_t node_of(size_t index) {
    Actor& actor = actors_[index];
    const size_t node = nodes_++;
    const Actor& host = actors_[hosts_[static_cast<size_t>(actor.actor.rank)]];
    if (host.last) before_[node].set(*host.last);
    if (actor.last) before_[node].set(*actor.last);
    actor.last = node;
    return node;
  }

  void step() {
    if (nodes_ + 8 > kMostNodes) return;
    const size_t actor = index_below(actors_.size());
    switch (below(10)) {
      case 0:
        return record(actor);
      case 1:
      case 2:
        return wait(actor);
      case 3:
        return actors_[actor].actor.number == 0 ? set(actor) : operation(actor);
      case 4:
        return actors_[actor].actor.number == 0 ? see(actor) : operation(actor);
      case 5:
        return below(4) == 0 ? collective() : operation(actor);
      default:
        return operation(actor);
    }
  }

  RecordedAccess draw_access() {
    const uint64_t begin = index_below(24);
    RecordedAccess access = reads(below(ranks_), begin, begin + 1 + index_below(12));
    access.write = below(3) == 0;
    return access;
  }

  void operation(size_t index) {
    const Actor& actor = actors_[index];
    std::vector<RecordedAccess> accesses(index_below(3));
    for (RecordedAccess& access : accesses) access = draw_access();
    Late late{actor.actor, 0, {}};
    std::vector<size_t> after;
    for (int waits = actor.actor.number == 0 ? 0 : below(3); waits > 0 && !words_.empty(); --waits)
      late.words.push_back(draw_wait(after));
    std::vector<WordEdge> sets;
    if (below(3) == 0) sets.push_back(next_value(index));
    const size_t node = node_of(index);
    for (const size_t write : after) before_[node].set(write);
    for (const WordEdge& word : sets) words_.push_back({word, node});
    Record record{.kind = RecordKind::kOperation, .name = "o", .accesses = accesses, .words = sets};
    if (actor.actor.number != 0) record.operation = late.operation = ++operations_[index];
    record.waits = late.words.empty() ? 0 : 1;
    logs_.add(actor.actor, record);
    const uint64_t sequence = logs_[actor.actor.rank].records().size();
    for (const RecordedAccess& access : accesses) accesses_.push_back({node, actor.actor.rank, sequence, access});
    if (late.words.empty()) return;
    if (below(2) == 0)
      write(late);
    else
      late_.push_back(late);
  }

  void write(const Late& late) {
    logs_.add(late.actor, {.kind = RecordKind::kWordWait, .operation = late.operation, .words = late.words});
  }

  // A value that a word has reached or was about to skip, and the write that a wait for it comes after.
  WordEdge draw_wait(std::vector<size_t>& after) {
    WordEdge wanted = words_[index_below(words_.size())].word;
    wanted.value -= index_below(3);
    const auto first = std::ranges::find_if(words_, [&](const WordWrite& write) {
      return write.word.rank == wanted.rank && write.word.word == wanted.word && write.word.value >= wanted.value;
    });
    after.push_back(first->node);
    return wanted;
  }

  WordEdge next_value(size_t index) {
    uint64_t& value = values_[index];
    value += 2 + index_below(3);
    return {actors_[index].actor.rank, actors_[index].word, value};
  }

  void record(size_t index) {
    const size_t node = node_of(index);
    const HandLogs::Actor actor = actors_[index].actor;
    events_.push_back({actor.rank, logs_.record(actor), node});
  }

  void wait(size_t index) {
    const HandLogs::Actor actor = actors_[index].actor;
    std::vector<Event> known;
    std::ranges::copy_if(events_, std::back_inserter(known), [&](const Event& e) { return e.rank == actor.rank; });
    if (known.empty()) return;
    const Event& event = known[index_below(known.size())];
    const size_t node = node_of(index);
    before_[node].set(event.node);
    logs_.wait(actor, event.event);
  }

  void set(size_t index) {
    const WordEdge word = next_value(index);
    words_.push_back({word, node_of(index)});
    logs_.set(word.rank, word.word, word.value);
  }

  void see(size_t index) {
    if (words_.empty()) return;
    std::vector<size_t> after;
    const WordEdge wanted = draw_wait(after);
    before_[node_of(index)].set(after[0]);
    logs_.see(actors_[index].actor.rank, wanted);
  }

  void collective() {
    ++collectives_;
    std::vector<size_t> entries;
    for (const size_t host : hosts_) entries.push_back(node_of(host));
    for (size_t rank = 0; rank < hosts_.size(); ++rank) {
      const size_t exit = node_of(hosts_[rank]);
      for (const size_t entry : entries) before_[exit].set(entry);
      logs_.collective(static_cast<int>(rank), collectives_);
    }
  }

  std::mt19937_64 random_;
  const int ranks_;
  HandLogs logs_;
  std::vector<Actor> actors_;
  std::vector<size_t> hosts_;  // of actors_, by rank
  std::vector<Event> events_;
  std::vector<WordWrite> words_;
  std::vector<Late> late_;
  std::vector<Accessed> accesses_;
  std::map<size_t, uint64_t> operations_, values_;  // by actor
  uint64_t collectives_ = 0;
  size_t nodes_ = 0;
  std::bitset<kMostNodes> before_[kMostNodes];  // by node: what happens before it
};

std::set<PairKey> reported_pairs(const CheckReport& report) {
  std::set<PairKey> pairs;
  for (const Conflict& c : report.conflicts)
    pairs.insert(key_of({c.first.rank, c.first.sequence, c.first.write},
                        {c.second.rank, c.second.sequence, c.second.write}, c.region.owner, c.begin, c.end));
  return pairs;
}

TEST(RandomSchedules, HaveExactlyTheConflictsOfABruteForce) {
  size_t with = 0;
  size_t without = 0;
  for (uint64_t seed = 0; seed < 20'000; ++seed) {
    SCOPED_TRACE(seed);
    RandomSchedule schedule(seed);
    const CheckReport report = check_schedule(schedule.logs(), {.most_conflicts = 100'000});
    ASSERT_THAT(report.faults, testing::IsEmpty());
    ASSERT_EQ(report.unreached, 0u);
    const std::set<PairKey> expected = schedule.unordered_pairs();
    ASSERT_EQ(reported_pairs(report), expected);
    ++(expected.empty() ? without : with);
  }
  EXPECT_GT(with, 4000u);  // neither answer is always right
  EXPECT_GT(without, 1000u);
}

}  // namespace
}  // namespace tessera::device
