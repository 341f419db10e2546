// The ranks of a layout that own the same elements; independent of the tensor's shape.
//
// The mesh axes that shard a tensor dim determine the class of a rank; Replicate and Partial axes number the members of
// the class. Members of one class own equal sets, members of different classes disjoint ones. A member's number is
// replica * peers() + peer, so that the terms of one Partial sum are adjacent.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "tessera/layout.h"

namespace tessera::plan {

class Holders {
 public:
  // REQUIRES: `layout` is bound to a shape of `ndim` dims.
  Holders(const Layout& layout, int ndim);

  int classes() const { return static_cast<int>(ranks_.size()) / members_; }
  int members() const { return members_; }  // in every class
  int peers() const { return peers_; }      // ranks along the Partial axes; 1 without any

  // The members of a class, by number.
  std::span<const Rank> ranks(int cls) const {
    const auto n = static_cast<size_t>(members_);
    return ranks().subspan(static_cast<size_t>(cls) * n, n);
  }
  // All members of all classes, class by class.
  std::span<const Rank> ranks() const { return ranks_; }
  // The number of parts into which dim `dim` is cut, in partition_dim()'s numbering, and the part that a class owns.
  int parts(int dim) const { return parts_[static_cast<size_t>(dim)]; }
  int part(int cls, int dim) const { return cls / stride_[static_cast<size_t>(dim)] % parts(dim); }
  // A class is the sum over dims of part * stride.
  int stride(int dim) const { return stride_[static_cast<size_t>(dim)]; }

  struct Place {
    int cls = 0;
    int member = 0;
  };
  std::optional<Place> place_of(Rank rank) const;

  size_t memory_bytes() const { return places_.capacity() * sizeof(Place) + ranks_.capacity() * sizeof(Rank) * 2; }

 private:
  Mesh mesh_;
  std::vector<int> parts_;
  std::vector<int> stride_;
  int members_ = 1;
  int peers_ = 1;
  std::vector<Place> places_;  // by position in the mesh
  std::vector<Rank> ranks_;    // by class, then by member
};

}  // namespace tessera::plan
