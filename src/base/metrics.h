// What this process counts, as one fixed table (docs/metrics.md), and its text for Prometheus.
//
// Counting costs one relaxed atomic addition on a separate cache line. It never locks, allocates or fails, so any path
// may count, once for each piece of work rather than for each byte. Series are fixed, except for one family with one
// series for each batch, kMostBatches at most. Text from a peer never becomes a label.
//
// Why not prometheus-cpp: its counters are doubles added to by compare-and-swap, its series are looked up in maps of
// strings, and its server is civetweb, whose threads receive the host program's signals. This is one file.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/mutex.h"
#include "tessera/error.h"

namespace tessera {

// Only grows. Thread-safe, like the two classes below.
class Counter {
 public:
  void add(uint64_t n = 1) { value_.fetch_add(n, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<uint64_t> value_{0};
};

class Gauge {
 public:
  void add(int64_t n) { value_.fetch_add(n, std::memory_order_relaxed); }
  void set(int64_t n) { value_.store(n, std::memory_order_relaxed); }
  int64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int64_t> value_{0};
};

// Durations, in buckets of 1, 2.5 and 5 times powers of ten, from 100 microseconds to 100 seconds.
class DurationHistogram {
 public:
  static constexpr std::array kBounds{1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1,
                                      0.25, 0.5,    1.0,  2.5,  5.0,    10.0, 25.0, 50.0,   100.0};  // seconds

  void observe(Duration duration);
  uint64_t bucket(size_t i) const { return buckets_[i].load(std::memory_order_relaxed); }  // not cumulative
  double sum() const { return to_seconds(Duration(nanoseconds_.load(std::memory_order_relaxed))); }

 private:
  alignas(64) std::array<std::atomic<uint64_t>, kBounds.size() + 1> buckets_{};
  std::atomic<int64_t> nanoseconds_{0};
};

enum class TransferSide : uint8_t { kSend, kReceive };
enum class Outcome : uint8_t { kDone, kFailed, kCancelled };
enum class QuantizePhase : uint8_t { kAmax, kAgree, kEncode };  // in a sender
Outcome outcome_of(const Status& status);

// All metrics of one process.
class Metrics {
 public:
  static constexpr size_t kMostBatches = 64;

  static Metrics& process();

  Counter& transfers(TransferSide side, Outcome outcome) { return transfers_[index(side)][index(outcome)]; }
  Counter& bytes(TransferSide side) { return bytes_[index(side)]; }
  DurationHistogram& seconds(TransferSide side) { return seconds_[index(side)]; }
  DurationHistogram& quantize_seconds(QuantizePhase phase) { return quantize_seconds_[index(phase)]; }
  Counter& registrations(Outcome outcome) { return registrations_[index(outcome)]; }

  DurationHistogram registration_seconds;
  Counter quantized_source_bytes;
  Counter quantized_bytes;
  Counter encoded_bytes;
  Counter versions_offered;
  Counter versions_withdrawn;
  Counter versions_committed;  // by staged receives
  Counter versions_aborted;    // by staged receives
  Counter versions_undecided;  // by staged receives
  Counter digest_mismatches;
  Gauge sessions;
  Counter sessions_lost;
  Gauge waits;                 // for ranks that have yet to join, register or attach
  Counter messages_malformed;  // from a peer or a client of the store
  Counter connections_refused;
  Gauge connections;  // between agents, both directions
  Counter commands;   // that came through the command queue
  Counter store_requests;
  Counter store_reconnects;
  Gauge shared_memory_bytes;  // arenas of this process, and those mapped by SharedHeap::adopt()

  // Counts one side's use of a batch while it lives: its version has its own series if there is room for one.
  class Batch {
   public:
    // The names become labels. Takes a lock; for registration.
    Batch(Metrics& metrics, std::string_view pair, std::string_view batch, TransferSide side);
    ~Batch();
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    void set_version(int64_t version) { version_.set(version); }

   private:
    friend class Metrics;
    Metrics& metrics_;
    const std::string labels_;
    Gauge version_;
  };

  // The text exposition format, version 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/).
  std::string exposition() const;

 private:
  template <typename E>
  static size_t index(E value) {
    return static_cast<size_t>(value);
  }

  std::array<std::array<Counter, 3>, 2> transfers_;
  std::array<Counter, 2> bytes_;
  std::array<DurationHistogram, 2> seconds_;
  std::array<DurationHistogram, 3> quantize_seconds_;
  std::array<Counter, 3> registrations_;

  mutable Mutex mutex_;
  std::list<const Batch*> batches_ GUARDED_BY(mutex_);
};

}  // namespace tessera
