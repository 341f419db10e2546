#include <algorithm>
#include <map>
#include <unordered_map>

#include "base/fail.h"
#include "plan/batch_balance.h"
#include "plan/bind.h"
#include "plan/builder.h"

namespace tessera {

using plan::HostMap;
using plan::Kind;
using plan::LayoutPair;

namespace {

struct Key {
  TensorMeta meta;
  Layout src;
  Layout dst;
  bool operator==(const Key&) const = default;
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    size_t hash = 0xcbf29ce484222325;
    const auto mix = [&](size_t value) { hash = (hash ^ value) * 0x100000001b3; };
    for (const Index size : key.meta.shape) mix(static_cast<size_t>(size));
    mix(static_cast<size_t>(key.meta.dtype));
    mix(LayoutHash{}(key.src));
    mix(LayoutHash{}(key.dst));
    return hash;
  }
};

// Adds up what each rank sends.
class Tally final : public plan::RouteSink {
 public:
  Tally(const HostMap& hosts, PlanStats& stats, std::map<Rank, int64_t>& egress)
      : hosts_(hosts), stats_(stats), egress_(egress) {}

  // The following routes count for `count` tensors of this kind.
  void begin(const Kind& kind, int64_t count) {
    kind_ = &kind;
    count_ = count;
  }

  void route(const plan::CellPiece& piece) override {
    const int64_t bytes = kind_->bytes(piece.elements) * count_;
    const bool local = piece.dsts.size() == 1 && piece.dsts[0] == piece.src;
    const int64_t delivered = bytes * static_cast<int64_t>(piece.dsts.size());
    stats_.bytes_delivered += delivered;
    stats_.routes += count_;
    if (local) return;
    stats_.bytes_moved += delivered;
    if (kind_->meta().wire) {
      stats_.quantized_bytes_moved += delivered;
      stats_.quantized_elements_moved += piece.elements * static_cast<int64_t>(piece.dsts.size()) * count_;
    }
    stats_.bytes_between_hosts += bytes * hosts_.crossings(piece.src, piece.dsts);
    egress_[piece.src] += bytes;
  }

  void reduction(const plan::CellPiece& piece, Rank) override {
    stats_.reduction_bytes += kind_->source_bytes(piece.elements) * count_ * (kind_->pair().sources().peers() - 1);
  }

 private:
  const HostMap& hosts_;
  PlanStats& stats_;
  std::map<Rank, int64_t>& egress_;
  const Kind* kind_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace

struct BatchPlanner::Impl {
  struct KnownKind {
    Kind kind;
    plan::Windows windows;
  };
  struct Variant {
    uint32_t kind = 0;
    int rotation = 0;
    int64_t tensors = 0;  // of this kind
  };

  explicit Impl(PlanOptions o) : options(std::move(o)), hosts(options) {}

  uint32_t kind_of(const TensorMeta& meta, const Layout& src, const Layout& dst) {
    Key key{meta, src, dst};
    if (const auto known = kind_ids.find(key); known != kind_ids.end()) return known->second;
    auto bound = plan::bind(meta, src, dst);
    const auto ndim = static_cast<int>(meta.shape.size());
    Kind kind(meta, pair_of(std::move(bound.src), std::move(bound.dst), ndim));
    plan::Windows windows(kind, options, loads);
    const auto id = static_cast<uint32_t>(kinds.size());
    kinds.push_back({std::move(kind), std::move(windows)});
    kind_ids.emplace(std::move(key), id);
    return id;
  }

  std::shared_ptr<const LayoutPair> pair_of(Layout src, Layout dst, int ndim) {
    const auto same = [&](const KnownKind& known) {
      return known.kind.ndim() == ndim && known.kind.pair().src() == src && known.kind.pair().dst() == dst;
    };
    const auto known = std::ranges::find_if(kinds, same);
    if (known != kinds.end()) return known->kind.shared_pair();
    return std::make_shared<LayoutPair>(std::move(src), std::move(dst), ndim);
  }

  std::map<Rank, int64_t> tally(PlanStats& stats) const {
    std::map<Rank, int64_t> egress;
    Tally sink(hosts, stats, egress);
    for (const Variant& variant : variants) {
      const Kind& kind = kinds[variant.kind].kind;
      sink.begin(kind, variant.tensors);
      plan::CellWalk(kind, hosts, options, variant.rotation, sink).all();
    }
    return egress;
  }

  void add(uint32_t kind) {
    const int rotation = kinds[kind].windows.place(loads);
    const auto next = static_cast<uint32_t>(variants.size());
    const auto [known, is_new] = variant_ids.try_emplace(uint64_t{kind} << 32 | static_cast<uint32_t>(rotation), next);
    if (is_new) variants.push_back({.kind = kind, .rotation = rotation});
    ++variants[known->second].tensors;
    tensors.push_back(known->second);
  }

  uint32_t variant_of(uint32_t ordinal) const {
    if (ordinal >= tensors.size())
      fail(ErrorCode::kInvalidArgument, "tensor {} of a batch of {}"_message, ordinal, tensors.size());
    return tensors[ordinal];
  }

  Plan build(uint32_t ordinal, std::optional<Rank> rank) const {
    const Variant& variant = variants[variant_of(ordinal)];
    return plan::build_plan(kinds[variant.kind].kind, hosts, options, variant.rotation, rank);
  }

  PlanOptions options;
  HostMap hosts;
  std::unordered_map<Key, uint32_t, KeyHash> kind_ids;
  std::vector<KnownKind> kinds;
  std::unordered_map<uint64_t, uint32_t> variant_ids;  // by kind and rotation
  std::vector<Variant> variants;
  std::vector<uint32_t> tensors;  // their variants
  plan::Loads loads;
};

BatchPlanner::BatchPlanner(PlanOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
BatchPlanner::~BatchPlanner() = default;
BatchPlanner::BatchPlanner(BatchPlanner&&) noexcept = default;
BatchPlanner& BatchPlanner::operator=(BatchPlanner&&) noexcept = default;

uint32_t BatchPlanner::add(const TensorMeta& meta, const Layout& src, const Layout& dst) {
  const uint32_t kind = impl_->kind_of(meta, src, dst);
  const auto ordinal = static_cast<uint32_t>(impl_->tensors.size());
  impl_->add(kind);
  return ordinal;
}

uint32_t BatchPlanner::size() const {
  return static_cast<uint32_t>(impl_->tensors.size());
}
uint32_t BatchPlanner::kinds() const {
  return static_cast<uint32_t>(impl_->kinds.size());
}

Plan BatchPlanner::plan(uint32_t ordinal) const {
  return impl_->build(ordinal, std::nullopt);
}

Plan BatchPlanner::plan_for(uint32_t ordinal, Rank rank) const {
  return impl_->build(ordinal, rank);
}

uint32_t BatchPlanner::variant(uint32_t ordinal) const {
  return impl_->variant_of(ordinal);
}

PlanStats BatchPlanner::stats() const {
  PlanStats stats;
  for (const auto& [rank, bytes] : impl_->tally(stats)) stats.max_egress = std::max(stats.max_egress, bytes);
  plan::EgressBound bound;
  std::vector<int64_t> counts(impl_->kinds.size(), 0);
  for (const Impl::Variant& variant : impl_->variants) counts[variant.kind] += variant.tensors;
  for (size_t i = 0; i < counts.size(); ++i) {
    stats.bytes_lower_bound += impl_->kinds[i].kind.lower_bound() * counts[i];
    bound.add(impl_->kinds[i].kind, counts[i]);
  }
  stats.max_egress_lower_bound = bound.value();
  return stats;
}

std::vector<std::pair<Rank, int64_t>> BatchPlanner::egress() const {
  PlanStats ignored;
  const auto by_rank = impl_->tally(ignored);
  return {by_rank.begin(), by_rank.end()};
}

size_t BatchPlanner::memory_bytes() const {
  size_t bytes = sizeof(Impl) + impl_->tensors.capacity() * sizeof(uint32_t) +
                 impl_->variants.capacity() * sizeof(Impl::Variant) + impl_->loads.memory_bytes();
  std::vector<const LayoutPair*> pairs;
  for (const auto& known : impl_->kinds) {
    bytes += known.kind.memory_bytes() + known.windows.memory_bytes();
    pairs.push_back(&known.kind.pair());
  }
  std::ranges::sort(pairs);
  pairs.erase(std::ranges::unique(pairs).begin(), pairs.end());
  for (const LayoutPair* pair : pairs) bytes += pair->memory_bytes();
  return bytes;
}

}  // namespace tessera
