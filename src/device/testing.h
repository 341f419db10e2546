// Conditions and helpers for tests of streams.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/futex.h"
#include "base/testing.h"
#include "device/condition.h"
#include "device/operation.h"

namespace tessera::device {

// A word that grows, as a rank's page has them. Thread-safe.
class TestWord {
 public:
  void set(uint64_t value) {
    value_.store(value);
    bell_.fetch_add(1);
    futex_wake(bell_);
  }
  void add(uint64_t by) { set(value_.load() + by); }
  uint64_t get() const { return value_.load(); }
  // At least `value`.
  std::shared_ptr<const Condition> reaches(uint64_t value, std::string what, WordEdge edge = {}) const;

 private:
  friend class TestCondition;
  std::atomic<uint64_t> value_{0};
  std::atomic<uint32_t> bell_{0};
};

class TestCondition final : public Condition {
 public:
  TestCondition(const TestWord& word, uint64_t value, std::string what, WordEdge edge)
      : word_(word), value_(value), what_(std::move(what)), edge_(edge) {}
  bool met() const override { return word_.get() >= value_; }
  void sleep(const Deadline& deadline) const override {
    const uint32_t rung = word_.bell_.load();
    if (!met()) futex_wait(word_.bell_, rung, deadline);
  }
  std::string to_string() const override { return what_; }
  void note(WaitNotes& notes) const override {
    notes.edges.push_back(edge_);
    notes.text = what_;
  }

 private:
  const TestWord& word_;
  const uint64_t value_;
  const std::string what_;
  const WordEdge edge_;
};

inline std::shared_ptr<const Condition> TestWord::reaches(uint64_t value, std::string what, WordEdge edge) const {
  return std::make_shared<TestCondition>(*this, value, std::move(what), edge);
}

inline Operation call(std::function<void()> body) {
  return {.name = "run", .body = std::move(body)};
}

// One that can never become true, as when a peer is lost.
class LostCondition final : public Condition {
 public:
  bool met() const override { throw Error(ErrorCode::kPeerLost, "rank 2 is gone"); }
  void sleep(const Deadline&) const override {}
  std::string to_string() const override { return "rank 2"; }
};

}  // namespace tessera::device
