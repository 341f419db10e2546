#include "tests/fault/drill.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <optional>
#include <span>
#include <thread>

#include "base/fail.h"
#include "base/futex.h"
#include "base/log.h"

namespace tessera::test {
namespace {

constexpr Index kRows = 1024;
constexpr Index kColumns = 1024;
constexpr auto kUntouched = std::byte{0xA5};

// --- what is transferred -------------------------------------------------------------------------

// A rank's part of a tensor that takes a while. Each element has 32 bits, computed from its version and its place.
class Bulk {
 public:
  Bulk(const std::string& layout, Rank rank, bool shared)
      : layout_(Layout::parse(layout)),
        owned_(layout_.bind(shape_).owned(shape_, rank)),
        data_(static_cast<size_t>(owned_.size()) * sizeof(uint32_t) + 1, shared) {
    std::ranges::fill(data_.bytes(), kUntouched);
  }
  TensorSpec spec() {
    return {.name = "bulk", .data = data_.bytes().data(), .dtype = DType::kU32, .shape = shape_, .layout = layout_};
  }
  void fill(int64_t version) {
    for_each([&](uint32_t& element, uint32_t place) {
      element = value_of(version, place);
      return true;
    });
  }
  bool holds(int64_t version) {
    const std::span<const std::byte> bytes = data_.bytes();
    if (version == 0) return std::ranges::count(bytes, kUntouched) == std::ssize(bytes);
    return for_each([&](uint32_t element, uint32_t place) { return element == value_of(version, place); });
  }

 private:
  static uint32_t value_of(int64_t version, uint32_t place) {
    return static_cast<uint32_t>(version) * uint32_t{kRows * kColumns} + place;
  }
  template <typename Visit>
  bool for_each(Visit visit) {
    auto* element = reinterpret_cast<uint32_t*>(data_.bytes().data());
    for (const Interval& rows : owned_.dim(0).intervals())
      for (Index row = rows.begin; row < rows.end; ++row)
        for (const Interval& columns : owned_.dim(1).intervals())
          for (Index column = columns.begin; column < columns.end; ++column)
            if (!visit(*element++, static_cast<uint32_t>(row * kColumns + column))) return false;
    return true;
  }

  const Shape shape_{kRows, kColumns};
  const Layout layout_;
  const Region owned_;
  LocalData data_;
};

// Everything that a rank registers.
class Tensors {
 public:
  Tensors(const DrillPlan& plan, bool sends, Rank rank)
      : plan_(plan),
        sends_(sends),
        rank_(rank),
        bulk_(sends ? plan.bulk_src : plan.bulk_dst, rank, sends ? plan.bulk_src_shared : plan.bulk_dst_shared) {
    for (const RandomCase& a : plan_.cases) data_.push_back(sends ? source_space(a, rank) : destination_space(a, rank));
  }
  std::vector<TensorSpec> specs() {
    std::vector<TensorSpec> specs{bulk_.spec()};
    for (size_t i = 0; i < data_.size(); ++i) {
      const RandomCase& a = plan_.cases[i];
      specs.push_back({.name = a.name,
                       .data = data_[i].bytes().data() + data_[i].offset,
                       .dtype = sends_ ? a.src_dtype : a.dst_dtype,
                       .shape = a.shape,
                       .layout = sends_ ? a.src : a.dst,
                       .strides = data_[i].strides,
                       .wire = a.wire});
    }
    return specs;
  }
  void fill(int64_t version) {
    bulk_.fill(version);
    for (size_t i = 0; i < data_.size(); ++i) fill_source(plan_.cases[i], rank_, version, data_[i]);
  }
  // Empty if everything is of that version; 0 means the contents before the first one. Otherwise says what differs.
  std::string differs(int64_t version) {
    if (!bulk_.holds(version)) return "bulk";
    for (size_t i = 0; i < data_.size(); ++i) {
      const auto bytes = data_[i].bytes();
      const std::string wrong = version != 0 ? check_destination(plan_.cases[i], rank_, version, data_[i])
                                : std::ranges::count(bytes, kUntouched) == std::ssize(bytes)
                                    ? ""
                                    : plan_.cases[i].name + " was written";
      if (!wrong.empty()) return wrong;
    }
    return {};
  }

 private:
  const DrillPlan& plan_;
  const bool sends_;
  const Rank rank_;
  Bulk bulk_;
  std::vector<LocalData> data_;
};

// --- what a rank does ----------------------------------------------------------------------------

bool is_loss(ErrorCode code) {
  return code == ErrorCode::kPeerLost || code == ErrorCode::kDeadlineExceeded || code == ErrorCode::kUnavailable;
}

// A rank's bus, pair and batch. They are made again until there is a batch, which the rank keeps, whoever is lost.
class Member {
 public:
  Member(const DrillPlan& plan, const std::string& store, bool sends, Rank rank)
      : plan_(plan), sends_(sends), tensors(plan, sends, rank) {
    options_ = {.job = sends ? "trainer" : "inference",
                .rank = rank,
                .world = sends ? plan.senders : plan.receivers,
                .store = store,
                .agent = (sends ? plan.sender_agents : plan.receiver_agents) ? "daemon" : "embedded",
                .threads = 1,
                .timeout = plan.patience};
  }
  Batch& batch() {
    if (!bus_) bus_.emplace(options_);
    if (!batch_) {
      pair_.reset();
      pair_.emplace(
          bus_->pair({.name = "weights", .peer = sends_ ? "inference" : "trainer", .timeout = plan_.patience}));
      const std::vector<TensorSpec> specs = tensors.specs();
      batch_.emplace(sends_ ? pair_->offer("policy", specs, plan_.patience, plan_.sender)
                            : pair_->accept("policy", specs, plan_.patience, plan_.receiver));
    }
    return *batch_;
  }
  // Closes the batch. The next call of batch() registers again.
  void leave() {
    batch_.reset();
    renewed_ = true;
  }
  // Whether its agent was lost. Then everything is made again, and what the tensors hold is no longer known.
  bool lost_agent() {
    if (!bus_ || bus_->alive()) return false;
    batch_.reset();
    pair_.reset();
    bus_.reset();
    renewed_ = true;
    return true;
  }
  // Whether the batch is new, so that it cannot know what the tensors hold.
  bool renewed() const { return renewed_; }
  void took() { renewed_ = false; }

 private:
  const DrillPlan& plan_;
  const bool sends_;
  BusOptions options_;

 public:
  Tensors tensors;  // they outlive the batch

 private:
  std::optional<Bus> bus_;
  std::optional<Pair> pair_;
  std::optional<Batch> batch_;
  bool renewed_ = false;
};

// Calls `operation` once; false if it ended with a loss.
bool went_well(Board& board, RankBoard& mine, const std::function<void()>& operation) {
  ++board.operations;
  board.changed();
  try {
    operation();
    return true;
  } catch (const Error& error) {
    if (!is_loss(error.code())) throw;
    log().info("it said: {}", error.what());
    ++mine.losses;
    return false;
  }
}

void succeed(Board& board, RankBoard& mine, int64_t version) {
  const Footprint print = Footprint::now();
  mine.fds = print.fds;
  mine.threads = print.threads;
  mine.mappings = print.mappings;
  mine.good = version;
  board.changed();
}

// Runs `body` and checks that the process uses no more descriptors, threads and mappings afterwards than before.
int without_leaks(Board& board, const std::function<void()>& body) {
  const auto fails = [&] {
    board.failed = true;
    board.changed();
  };
  try {
    SharedHeap::process().allocate(1);  // the heap keeps an arena from now on, even an empty one
    const Footprint before = Footprint::now();
    body();
    Footprint after = Footprint::now();
    // A thread that was joined stays visible in /proc for a moment.
    for (const Deadline soon = Deadline::after(hang_limit()); after != before && !soon.passed();) {
      std::this_thread::yield();
      after = Footprint::now();
    }
    if (after == before) return 0;
    std::fprintf(stderr, "before: %s; after: %s\n", before.to_string().c_str(), after.to_string().c_str());
  } catch (...) {
    fails();
    throw;
  }
  fails();
  return 5;
}

// The senders go from step to step together, as a training job does. One that has come back joins at the next step.
int64_t next_step(const Board& board, const RankBoard& mine) {
  board.await([&] { return board.stop || board.step > mine.reported; }, Deadline::after(std::chrono::hours(1)));
  return board.stop ? 0 : board.step.load();
}
void report(const DrillPlan& plan, Board& board, RankBoard& mine, int64_t step) {
  mine.reported = std::max(mine.reported.load(), step);
  const auto done = [&](const RankBoard& one) { return one.reported >= step; };
  if (std::all_of(board.senders.begin(), board.senders.begin() + plan.senders, done))
    board.step.compare_exchange_strong(step, step + 1);
  board.changed();
}

// Checks what `batch` says about the tensors after an operation that ended with a loss.
void check_after_loss(const Batch& batch, Tensors& tensors, RankBoard& mine) {
  const std::string wrong = tensors.differs(batch.version());
  if (wrong.empty()) return;
  if (!batch.torn()) fail_internal("not torn, version {} is held, and it is not whole: {}", batch.version(), wrong);
  ++mine.torn;
}

int64_t take(const DrillPlan& plan, Batch& batch, Tensors& tensors, bool renewed) {
  if (!plan.stages || batch.undecided()) return batch.recv({}, plan.patience).wait();
  const int64_t before = batch.version();
  try {
    batch.stage({}, plan.patience).wait();
  } catch (const Error& error) {  // an undecided version has been settled in the meantime
    if (error.code() != ErrorCode::kInvalidArgument) throw;
  }
  if (const std::string wrong = renewed ? "" : tensors.differs(before); !wrong.empty())
    fail_internal("staging has written to version {}: {}", before, wrong);
  return batch.commit();
}

void send(const DrillPlan& plan, Batch& batch, int64_t version) {
  try {
    batch.send(version, plan.patience).wait();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument || batch.version() < version) throw;
    fail(ErrorCode::kPeerLost, "the others had sent version {} without this rank"_message, version);
  }
}

}  // namespace

int run_sender(const DrillPlan& plan, Board& board, const std::string& store, Rank rank) {
  RankBoard& mine = board.senders[static_cast<size_t>(rank)];
  return without_leaks(board, [&] {
    Member member(plan, store, true, rank);
    report(plan, board, mine, board.step);
    while (!board.stop) {
      Batch* batch = nullptr;
      if (!went_well(board, mine, [&] { batch = &member.batch(); })) {
        member.lost_agent();
        continue;
      }
      const int64_t step = next_step(board, mine);
      if (step == 0) break;
      member.tensors.fill(step);
      if (went_well(board, mine, [&] { send(plan, *batch, step); }))
        succeed(board, mine, step);
      else
        member.lost_agent();
      report(plan, board, mine, step);
    }
    ++board.senders_gone;
    board.changed();
  });
}

int run_receiver(const DrillPlan& plan, Board& board, const std::string& store, Rank rank) {
  RankBoard& mine = board.receivers[static_cast<size_t>(rank)];
  return without_leaks(board, [&] {
    ::setenv("TESSERA_FORCE_PULL", plan.pull.c_str(), 1);
    Member member(plan, store, false, rank);
    for (uint32_t renewals = 0; board.senders_gone < plan.senders;) {
      if (std::exchange(renewals, board.renewals.load()) != board.renewals) member.leave();
      Batch* batch = nullptr;
      if (!went_well(board, mine, [&] { batch = &member.batch(); })) {
        member.lost_agent();
        continue;
      }
      int64_t version = 0;
      int64_t held = 0;
      bool torn = false;
      const auto receive = [&] {
        version = take(plan, *batch, member.tensors, member.renewed());
        held = batch->version();
        torn = batch->torn();
      };
      if (!went_well(board, mine, receive)) {
        const auto check = [&] {
          if (!member.renewed()) check_after_loss(*batch, member.tensors, mine);
        };
        if (member.lost_agent() || !went_well(board, mine, check)) mine.log(RankBoard::kKilled);
        continue;
      }
      const std::string wrong = member.tensors.differs(version);
      if (!wrong.empty() || torn || held != version)
        fail_internal("took version {}, holds {}{}: {}", version, held, torn ? ", torn" : "", wrong);
      member.took();
      mine.log(version);
      succeed(board, mine, version);
    }
  });
}

// --- plans ---------------------------------------------------------------------------------------

DrillPlan DrillPlan::random(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto any = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
  };
  const auto flip = [&] { return random() % 2 == 0; };
  DrillPlan plan;
  plan.seed = seed;
  plan.senders = any(1, kMostRanks);
  plan.receivers = any(1, kMostRanks);
  plan.auto_store = any(1, 3) == 1;
  plan.sender.mode = flip() ? Mode::kStaged : Mode::kInPlace;
  plan.sender.snapshots = any(2, 3);
  plan.receiver.mode = flip() ? Mode::kStaged : Mode::kInPlace;
  plan.stages = plan.receiver.mode == Mode::kStaged && flip();
  plan.pull = std::array{"", "stream", "readv"}[static_cast<size_t>(any(0, 2))];
  plan.bulk_src = fmt::format("{}:{}", plan.senders, flip() ? "S0" : "S1");
  plan.bulk_dst = fmt::format("{}:{}", plan.receivers, std::array{"S0", "S1", "R"}[static_cast<size_t>(any(0, 2))]);
  plan.bulk_src_shared = flip();
  plan.bulk_dst_shared = flip();
  for (int i = any(1, 4); i > 0; --i)
    plan.cases.push_back(random_case(random, fmt::format("t{}", i), plan.senders, plan.receivers));
  plan.sender_agents = any(1, 3) == 1;
  plan.receiver_agents = any(1, 3) == 1;
  return plan;
}

std::string DrillPlan::to_string() const {
  const auto mode = [](const BatchOptions& options) { return options.mode == Mode::kStaged ? "staged" : "in place"; };
  return fmt::format("seed {}: {} -> {}, {} store, {} -> {}{}{}, {}, {} tensors", seed, senders, receivers,
                     auto_store ? "auto" : "tcp", mode(sender), mode(receiver), stages ? " by stage and commit" : "",
                     sender_agents && receiver_agents ? ", agents"
                     : sender_agents                  ? ", senders' agents"
                     : receiver_agents                ? ", receivers' agents"
                                                      : "",
                     pull.empty() ? "any way of reading" : pull, 1 + cases.size());
}

// --- the board -----------------------------------------------------------------------------------

void RankBoard::log(int64_t version) {
  if (taken_count >= kMostTaken) fail_internal("more than {} versions", kMostTaken);
  taken[taken_count] = version;
  ++taken_count;
}

std::vector<int64_t> RankBoard::taken_so_far() const {
  return {taken.begin(), taken.begin() + taken_count};
}

void Board::changed() {
  ++changes;
  futex_wake(changes);
}

void Board::wait_for_change(uint32_t seen, const Deadline& deadline) const {
  futex_wait(changes, seen, deadline);
}

}  // namespace tessera::test
