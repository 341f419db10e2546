#include "plan/holders.h"

#include "base/fail.h"
#include "layout/partition.h"

namespace tessera::plan {
namespace {

constexpr int kReplica = -1;
constexpr int kPeer = -2;

// The tensor dim that an axis shards, or one of the constants above.
int role_of(const Placement& placement) {
  if (const auto dim = sharded_dim(placement)) return *dim;
  return std::holds_alternative<Partial>(placement) ? kPeer : kReplica;
}

}  // namespace

Holders::Holders(const Layout& layout, int ndim)
    : mesh_(layout.mesh()), parts_(static_cast<size_t>(ndim), 1), stride_(static_cast<size_t>(ndim), 1) {
  TESSERA_CHECK(mesh_.size() > 0);
  const auto axes = mesh_.axes();
  std::vector<int> role;
  int replicas = 1;
  for (size_t a = 0; a < axes.size(); ++a) {
    role.push_back(role_of(layout.placements()[a]));
    int& extent = role[a] == kReplica ? replicas : role[a] == kPeer ? peers_ : parts_[static_cast<size_t>(role[a])];
    extent *= axes[a].size;
  }
  members_ = replicas * peers_;
  for (int d = ndim - 2; d >= 0; --d) {
    const auto i = static_cast<size_t>(d);
    stride_[i] = stride_[i + 1] * parts_[i + 1];
  }

  // What one step along each axis adds to the class and to the member number.
  std::vector<Place> step(axes.size());
  int replica_step = peers_;
  int peer_step = 1;
  std::vector<int> class_step = stride_;
  for (size_t a = axes.size(); a-- > 0;) {
    const int size = axes[a].size;
    if (role[a] == kReplica) {
      step[a].member = replica_step;
      replica_step *= size;
    } else if (role[a] == kPeer) {
      step[a].member = peer_step;
      peer_step *= size;
    } else {
      int& s = class_step[static_cast<size_t>(role[a])];
      step[a].cls = s;
      s *= size;
    }
  }

  places_.resize(static_cast<size_t>(mesh_.size()));
  ranks_.resize(places_.size());
  std::vector<int> at(axes.size(), 0);
  Place place;
  for (size_t position = 0; position < places_.size(); ++position) {
    places_[position] = place;
    ranks_[static_cast<size_t>(place.cls) * static_cast<size_t>(members_) + static_cast<size_t>(place.member)] =
        mesh_.ranks()[position];
    for (size_t a = axes.size(); a-- > 0;) {
      place.cls += step[a].cls;
      place.member += step[a].member;
      if (++at[a] < axes[a].size) break;
      place.cls -= step[a].cls * at[a];
      place.member -= step[a].member * at[a];
      at[a] = 0;
    }
  }
}

std::optional<Holders::Place> Holders::place_of(Rank rank) const {
  const auto position = mesh_.position_of(rank);
  if (!position) return std::nullopt;
  return places_[static_cast<size_t>(*position)];
}

}  // namespace tessera::plan
