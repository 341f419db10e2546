// Jobs of real processes whose versions travel as deltas.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/fixture.h"
#include "tests/support/random_case.h"

namespace tessera::test {

inline constexpr int kWrong = 3;  // exit status of a receiver that has found a wrong element

struct DeltaJobs {
  int sources = 1;
  int destinations = 1;
  bool staged = false;
  bool digest = true;
  const char* pull = "";
  const char* agent = "embedded";
  bool sender_asks = true;
  bool receiver_asks = true;
};

// One rank of either job, its batch and its tensors.
class Member {
 public:
  Member(const DeltaJobs& jobs, const std::vector<RandomCase>& cases, const std::string& store, bool sends, Rank rank)
      : cases_(cases), rank_(rank) {
    if (!sends) ::setenv("TESSERA_FORCE_PULL", jobs.pull, 1);
    bus_ = std::make_unique<Bus>(BusOptions{.job = sends ? "trainer" : "inference",
                                            .rank = rank,
                                            .world = sends ? jobs.sources : jobs.destinations,
                                            .store = store,
                                            .agent = jobs.agent,
                                            .threads = 1,
                                            .digest = jobs.digest});
    pair_ = std::make_unique<Pair>(bus_->pair({.name = "weights", .peer = sends ? "inference" : "trainer"}));
    std::vector<TensorSpec> specs;
    data_.reserve(cases.size());
    for (const RandomCase& a : cases) {
      data_.push_back(sends ? source_space(a, rank) : destination_space(a, rank));
      specs.push_back({.name = a.name,
                       .data = data_.back().bytes().data() + data_.back().offset,
                       .dtype = sends ? a.src_dtype : a.dst_dtype,
                       .shape = a.shape,
                       .layout = sends ? a.src : a.dst,
                       .strides = data_.back().strides,
                       .wire = a.wire});
    }
    const BatchOptions options{.mode = jobs.staged ? Mode::kStaged : Mode::kInPlace,
                               .delta = sends ? jobs.sender_asks : jobs.receiver_asks};
    batch_ = std::make_unique<Batch>(sends ? pair_->offer("policy", specs, kRendezvousTimeout, options)
                                           : pair_->accept("policy", specs, kRendezvousTimeout, options));
  }

  Batch& batch() { return *batch_; }
  BatchStats stats() const { return batch_->stats(); }
  std::vector<LocalData>& data() { return data_; }

  // For a sender: sends as `version` the contents that RandomCase has for `contents`.
  Handle send(int64_t version, int64_t contents, Timeout timeout = kPatience) {
    for (size_t i = 0; i < cases_.size(); ++i) fill_source(cases_[i], rank_, contents, data_[i]);
    return batch_->send(version, timeout);
  }
  Handle send(int64_t version) { return send(version, version); }

  // For a receiver: whether it holds those contents; reports a wrong element.
  bool holds(int64_t contents) {
    for (size_t i = 0; i < cases_.size(); ++i) {
      const std::string wrong = check_destination(cases_[i], rank_, contents, data_[i]);
      if (wrong.empty()) continue;
      std::fprintf(stderr, "contents %ld: %s\n", static_cast<long>(contents), wrong.c_str());
      return false;
    }
    return true;
  }

 private:
  const std::vector<RandomCase> cases_;
  const Rank rank_;
  std::vector<LocalData> data_;
  std::unique_ptr<Bus> bus_;
  std::unique_ptr<Pair> pair_;
  std::unique_ptr<Batch> batch_;
};

class Deltas : public JobsTest {
 protected:
  // What a rank of one of these jobs does with its tensors.
  using MemberBody = std::function<int(Member& member)>;

  pid_t start_member(bool sends, Rank rank, const MemberBody& body) {
    return start((sends ? "trainer/" : "inference/") + std::to_string(rank), [=, this] {
      Member member(jobs_, cases_, store_, sends, rank);
      return body(member);
    });
  }
  void start_all(const MemberBody& sender, const MemberBody& receiver) {
    for (Rank rank = 0; rank < jobs_.sources; ++rank) start_member(true, rank, sender);
    for (Rank rank = 0; rank < jobs_.destinations; ++rank) start_member(false, rank, receiver);
  }
  void expect_success() { expect_all_well(6 * hang_limit()); }

  DeltaJobs jobs_;
  std::vector<RandomCase> cases_;
};

// A matrix of which one hundredth changes with each version.
inline RandomCase small_changes(DType src_dtype = DType::kF32, DType dst_dtype = DType::kF32) {
  return {.name = "w",
          .shape = {96, 64},
          .src_dtype = src_dtype,
          .dst_dtype = dst_dtype,
          .src = Layout::parse("1:R"),
          .dst = Layout::parse("1:R"),
          .seed = 7,
          .chances = {0.01}};
}

inline RandomCase rows_to_columns(RandomCase a = small_changes()) {
  a.src = Layout::parse("2:S0");
  a.dst = Layout::parse("2:S1");
  return a;
}

}  // namespace tessera::test
