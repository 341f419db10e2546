#include "base/fail.h"
#include "tessera/layout.h"

namespace tessera {

std::string_view to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
  }
  return "unknown";
}

namespace {

struct Printer {
  std::string operator()(const Replicate&) const { return "R"; }
  std::string operator()(const Shard& shard) const { return fmt::format("S{}", shard.dim); }
  std::string operator()(const StridedShard& shard) const {
    return fmt::format("S{}*{}", shard.dim, shard.split_factor);
  }
  std::string operator()(const RaggedShard& shard) const {
    return fmt::format("G{}[{}]", shard.dim, fmt::join(shard.bounds, ";"));
  }
  std::string operator()(const Partial& partial) const { return fmt::format("P{}", to_string(partial.op)); }
};

}  // namespace

std::string to_string(const Placement& placement) {
  return std::visit(Printer{}, placement);
}

}  // namespace tessera
