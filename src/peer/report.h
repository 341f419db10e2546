// An agent's report to `tessera top` and other processes of the user (docs/formats/bus-protocol.md). They send Inspect
// instead of Hello; the answer is a Report.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/message.h"
#include "base/process.h"
#include "peer/handshake.h"
#include "peer/message.h"
#include "tessera/layout.h"

namespace tessera {

inline constexpr uint16_t kReportVersion = 1;
inline constexpr uint32_t kMaxReportBytes = 64u << 20;
inline constexpr uint32_t kMaxReportName = 64;
inline constexpr uint32_t kMaxReportText = 1024;
inline constexpr uint32_t kMaxReportPeers = 256;
inline constexpr uint32_t kMaxReportWaits = 256;

enum class ReportMessage : uint16_t {
  kInspect = 25,
  kReport,
};

struct Inspect {
  static constexpr auto kType = ReportMessage::kInspect;
  uint16_t newest = kReportVersion;  // newest version of a Report that the sender of this reads
  static void fields(auto& f, auto& self) { f("newest", self.newest); }
};

// "inference/1 to take version 7", and for how long it has lasted.
struct Wait {
  std::string text{};
  int64_t microseconds = 0;
  static void fields(auto& f, auto& self) {
    f.cut("text", self.text, kMaxReportText);
    f("microseconds", self.microseconds);
  }
};

struct BatchReport {
  struct Peer {
    std::string job{};
    int32_t world = 0;  // 0: unknown
    bool attached = false;
    static void fields(auto& f, auto& self) {
      f("job", self.job, kMaxReportName);
      f("world", self.world);
      f("attached", self.attached);
    }
  };
  std::string pair{};
  std::string id{};
  bool sends = false;
  bool staged = false;
  bool torn = false;
  bool undecided = false;
  int64_t version = 0;    // the last one sent, or the one that is held
  int64_t newest = 0;     // the newest on offer
  int64_t transfers = 0;  // versions sent or taken
  int64_t bytes = 0;      // total moved to or from this rank
  std::vector<Peer> peers{};

  std::string operation{};  // in progress: "send", "recv", "stage", "commit"; empty: none
  std::string phase{};      // the current step
  int64_t operation_version = 0;
  int64_t operation_microseconds = 0;
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;
  std::vector<Wait> waits{};

  static void fields(auto& f, auto& self) {
    f("pair", self.pair, kMaxReportName);
    f("id", self.id, kMaxReportName);
    f("sends", self.sends);
    f("staged", self.staged);
    f("torn", self.torn);
    f("undecided", self.undecided);
    f("version", self.version);
    f("newest", self.newest);
    f("transfers", self.transfers);
    f("bytes", self.bytes);
    f.cut("peers", self.peers, kMaxReportPeers);
    f.cut("operation", self.operation, kMaxReportText);
    f.cut("phase", self.phase, kMaxReportText);
    f("operation_version", self.operation_version);
    f("operation_microseconds", self.operation_microseconds);
    f("bytes_done", self.bytes_done);
    f("bytes_total", self.bytes_total);
    f.cut("waits", self.waits, kMaxReportWaits);
  }
};

// The worker's command queue, if the agent is a daemon.
struct CommandQueueReport {
  uint32_t queued = 0;    // commands that the agent has not taken yet
  uint32_t capacity = 0;  // 0: there is no queue
  static void fields(auto& f, auto& self) {
    f("queued", self.queued);
    f("capacity", self.capacity);
    f.require(self.queued <= self.capacity, "Report: {} commands in a queue of {}"_message, self.queued, self.capacity);
  }
};

// Entries beyond the limits are left out, and texts that are too long are cut. Reading throws kMismatch for another
// version.
struct Report {
  static constexpr auto kType = ReportMessage::kReport;
  std::string release{};
  std::string name_space{};
  std::string job{};
  Rank rank = 0;
  int32_t world = 0;
  Incarnation incarnation{};
  CommandQueueReport commands{};
  std::vector<Wait> waits{};  // those outside of batches, or for a batch that is not registered yet
  std::vector<BatchReport> batches{};
  static void fields(auto& f, auto& self) {
    uint16_t version = kReportVersion;
    f("report", version);
    f.require(ErrorCode::kMismatch, version == kReportVersion, "Report: version {}, this release reads {}"_message,
              version, kReportVersion);
    f("release", self.release, kMaxReportName);
    f("name_space", self.name_space, kMaxNameSpaceBytes);
    f("job", self.job, kMaxReportName);
    f("rank", self.rank);
    f("world", self.world);
    f("incarnation", self.incarnation);
    f("commands", self.commands);
    f.cut("waits", self.waits, kMaxReportWaits);
    f.cut("batches", self.batches, 4096);
  }
};

using ReportMessages = MessageList<Inspect, Report>;

}  // namespace tessera
