#include "device/record/check.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "base/escape.h"
#include "base/fail.h"
#include "device/record/access_history.h"
#include "device/record/missing_edge.h"
#include "device/record/order.h"

namespace tessera::device {
namespace {

class ScheduleCheck {
 public:
  ScheduleCheck(std::span<const RankLog> logs, const CheckOptions& options)
      : options_(options),
        order_(logs),
        history_([this](AccessHistory::Id a, AccessHistory::Id b) { return found(a, b); }) {
    for (const RankLog& log : logs) {
      report_.records += log.records().size();
      for (const Record& record : log.records())
        if (record.kind == RecordKind::kRegion) add_region(record);
    }
  }

  CheckReport run() {
    order_.run([this](const Record& record, OrderPoint point, VectorClock clock) {
      for (const RecordedAccess& access : record.accesses) visit(record, access, point, clock);
    });
    for (const auto& [a, b] : found_) report_.conflicts.push_back(conflict_of(accesses_[a], accesses_[b]));
    std::ranges::sort(report_.conflicts, {}, [](const Conflict& c) {
      return std::tuple(c.first.rank, c.first.sequence, c.second.rank, c.second.sequence, c.region, c.begin, c.end);
    });
    report_.accesses = accesses_.size();
    report_.unreached = order_.unreached();
    report_.unfinished = order_.unfinished();
    report_.faults.insert(report_.faults.end(), order_.faults().begin(), order_.faults().end());
    return std::move(report_);
  }

 private:
  struct Accessed {
    const Record* record;
    const RecordedAccess* access;
    OrderPoint point;
  };
  struct Region {
    uint64_t bytes = 0;
    std::string_view label;
  };

  void add_region(const Record& record) {
    Region& region = regions_[record.region];
    region.bytes = std::max(region.bytes, record.bytes);
    if (record.rank == record.region.owner || region.label.empty()) region.label = record.name;
  }

  void add_fault(std::string text) {
    if (report_.faults.size() < ScheduleOrder::kMostFaults) report_.faults.push_back(std::move(text));
  }

  void visit(const Record& record, const RecordedAccess& access, OrderPoint point, VectorClock clock) {
    if (access.bytes == 0) return;
    if (access.bytes > UINT64_MAX - access.offset)
      return add_fault(fmt::format("rank {}: record {} accesses {} B from byte {} on: no range"_message, record.rank,
                                   record.sequence, access.bytes, access.offset));
    if (access.region.number != RegionId::kPrivate) {
      const auto region = regions_.find(access.region);
      if (region == regions_.end() || access.offset + access.bytes > region->second.bytes)
        return add_fault(
            fmt::format("rank {}: record {} accesses bytes {} to {} of region {} of rank {}, which has {}"_message,
                        record.rank, record.sequence, access.offset, access.offset + access.bytes, access.region.number,
                        access.region.owner, region == regions_.end() ? 0 : region->second.bytes));
    }
    accesses_.push_back({&record, &access, point});
    history_.add(access, point, clock);
  }

  bool found(AccessHistory::Id earlier, AccessHistory::Id later) {
    report_.more = found_.size() >= options_.most_conflicts;
    if (!report_.more) found_.emplace_back(earlier, later);
    return !report_.more;
  }

  // Whether `a`, which came first here by chance, was meant to.
  static bool meant_first(const Accessed& a, const Accessed& b) {
    if (a.record->rank == b.record->rank) return a.record->sequence < b.record->sequence;
    const uint64_t versions[] = {a.access->version, b.access->version};
    if (versions[0] == 0 || versions[1] == 0) return true;
    if (versions[0] != versions[1]) return versions[0] < versions[1];
    return a.access->write;
  }

  ConflictSide side_of(const Accessed& accessed) const {
    const Record& record = *accessed.record;
    std::string operation = printable(record.name);
    if (!record.subject.empty()) operation += ' ' + printable(record.subject);
    return {.rank = record.rank,
            .sequence = record.sequence,
            .actor = order_.actor(accessed.point.actor).to_string(),
            .operation = std::move(operation),
            .write = accessed.access->write,
            .version = accessed.access->version};
  }

  Conflict conflict_of(const Accessed& a, const Accessed& b) const {
    const bool in_order = meant_first(a, b);
    const Accessed& first = in_order ? a : b;
    const Accessed& second = in_order ? b : a;
    const RegionId id = first.access->region;
    const auto region = regions_.find(id);
    return {.first = side_of(first),
            .second = side_of(second),
            .region = id,
            .memory = id.number == RegionId::kPrivate || region == regions_.end()
                          ? fmt::format("private memory of rank {}", id.owner)
                          : fmt::format("region {} of rank {}", printable(region->second.label), id.owner),
            .begin = std::max(first.access->offset, second.access->offset),
            .end = std::min(first.access->offset + first.access->bytes, second.access->offset + second.access->bytes),
            .missing = missing_edge(order_, {first.record, first.point}, {second.record, second.point})};
  }

  const CheckOptions options_;
  ScheduleOrder order_;
  AccessHistory history_;
  std::map<RegionId, Region> regions_;
  std::vector<Accessed> accesses_;  // by their ids in the history
  std::vector<std::pair<AccessHistory::Id, AccessHistory::Id>> found_;
  CheckReport report_;
};

std::string side_text(const ConflictSide& side) {
  return fmt::format("{} in record {} of {}{}", side.operation, side.sequence, side.actor,
                     side.version == 0 ? "" : fmt::format(", version {}", side.version));
}

}  // namespace

std::string Conflict::to_string() const {
  const auto verb = [](const ConflictSide& side) { return side.write ? "writes" : "reads"; };
  return fmt::format("bytes {} to {} of {}:\n  {} {}\n  {} {}\n  missing: {}", begin, end, memory, verb(first),
                     side_text(first), verb(second), side_text(second), missing);
}

CheckReport check_schedule(std::span<const RankLog> logs, const CheckOptions& options) {
  return ScheduleCheck(logs, options).run();
}

}  // namespace tessera::device
