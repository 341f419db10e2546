// What an agent says of itself to whoever asks, as `tessera top` does (docs/formats/bus-protocol.md). Inspect comes
// instead of Hello; the answer is a Report.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/process.h"
#include "peer/message.h"
#include "tessera/layout.h"

namespace tessera {

inline constexpr uint16_t kReportVersion = 1;
inline constexpr uint32_t kMaxReportBytes = 64u << 20;

enum class ReportMessage : uint16_t {
  kInspect = 25,
  kReport,
};

struct Inspect {
  static constexpr auto kType = ReportMessage::kInspect;
  uint16_t newest = kReportVersion;  // version of a Report that the asker reads
  void write(ByteWriter& out) const;
  static Inspect read(ByteReader& in);
};

// "inference/1 to take version 7", and since when.
struct Wait {
  std::string text{};
  int64_t microseconds = 0;
};

struct BatchReport {
  struct Peer {
    std::string job{};
    int32_t world = 0;  // 0: unknown
    bool attached = false;
  };
  std::string pair{};
  std::string id{};
  bool sends = false;
  bool staged = false;
  bool torn = false;
  bool undecided = false;
  int64_t version = 0;    // sent last, or held
  int64_t newest = 0;     // on offer
  int64_t transfers = 0;  // that were done
  int64_t bytes = 0;      // moved to or from this rank in all
  std::vector<Peer> peers{};

  std::string operation{};  // under way: "send", "recv", "stage", "commit"; empty: none
  std::string phase{};      // what it does now
  int64_t operation_version = 0;
  int64_t operation_microseconds = 0;
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;
  std::vector<Wait> waits{};
};

// Of the worker's command queue, where the agent is a daemon.
struct CommandQueueReport {
  uint32_t queued = 0;    // commands that the agent has not taken yet
  uint32_t capacity = 0;  // 0: there is no queue
};

// More than the limits allow is left out, texts that are too long are cut.
struct Report {
  static constexpr auto kType = ReportMessage::kReport;
  std::string release{};
  std::string name_space{};
  std::string job{};
  Rank rank = 0;
  int32_t world = 0;
  Incarnation incarnation{};
  CommandQueueReport commands{};
  std::vector<Wait> waits{};  // that concern no batch, or one that is not registered yet
  std::vector<BatchReport> batches{};
  void write(ByteWriter& out) const;
  static Report read(ByteReader& in);  // throws kMismatch for another version
};

using ReportMessages = MessageList<Inspect, Report>;

}  // namespace tessera
