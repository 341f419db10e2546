#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/plan.h"

namespace tessera {
namespace {

// Written without a library: plans are large, and no text in them needs an escape.
class Writer {
 public:
  template <typename... Args>
  void put(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
  }

  // [[[start,stop],...],...]: a list of intervals for each dim.
  void put_region(const Region& region) {
    const char* dim_separator = "";
    put("[");
    for (const IntervalSet& dim : region.dims()) {
      put("{}[", dim_separator);
      dim_separator = ",";
      const char* separator = "";
      for (const Interval interval : dim.intervals()) {
        put("{}[{},{}]", separator, interval.begin, interval.end);
        separator = ",";
      }
      put("]");
    }
    put("]");
  }

  std::string take() { return fmt::to_string(out_); }

 private:
  fmt::memory_buffer out_;
};

}  // namespace

std::string Plan::to_json() const {
  Writer out;
  out.put(R"({{"shape":[{}],"dtype":"{}",)", fmt::join(meta.shape, ","), tessera::to_string(meta.dtype));
  out.put("\"routes\":[");
  const char* separator = "";
  for (const Route& route : routes) {
    out.put(R"({}{{"src":{},"dsts":[{}],"kind":"{}","region":)", separator, route.src, fmt::join(dsts(route), ","),
            tessera::to_string(route.kind));
    out.put_region(route.region);
    out.put(R"(,"bytes":{}}})", route.bytes);
    separator = ",";
  }
  out.put("],\"reductions\":[");
  separator = "";
  for (const Reduction& reduction : reductions) {
    out.put(R"({}{{"op":"{}","region":)", separator, tessera::to_string(reduction.op));
    out.put_region(reduction.region);
    out.put(R"(,"owner":{},"peers":[{}]}})", reduction.owner, fmt::join(peers(reduction), ","));
    separator = ",";
  }
  out.put(R"(],"stats":{{"bytes_delivered":{},"bytes_moved":{},"bytes_lower_bound":{},"max_egress":{},)"
          R"("max_egress_lower_bound":{},"bytes_between_hosts":{},"reduction_bytes":{},"routes":{}}}}})",
          stats.bytes_delivered, stats.bytes_moved, stats.bytes_lower_bound, stats.max_egress,
          stats.max_egress_lower_bound, stats.bytes_between_hosts, stats.reduction_bytes, stats.routes);
  return out.take();
}

}  // namespace tessera
