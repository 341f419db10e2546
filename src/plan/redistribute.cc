#include <memory>
#include <utility>

#include "plan/bind.h"
#include "plan/builder.h"

namespace tessera {

Plan redistribute(const TensorMeta& meta, const Layout& src, const Layout& dst, const PlanOptions& options) {
  auto bound = plan::bind(meta, src, dst);
  const plan::HostMap hosts(options);
  const auto ndim = static_cast<int>(meta.shape.size());
  const plan::Kind kind(meta, std::make_shared<plan::LayoutPair>(std::move(bound.src), std::move(bound.dst), ndim));
  return plan::build_plan(kind, hosts, options, 0);
}

}  // namespace tessera
