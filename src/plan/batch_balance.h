// Rotates the shares of a batch's tensors so that all tensors together load the ranks evenly.
//
// A tensor's shares are equal except for the remainder: a few members of each class get one element more or, if a
// tensor is too small for all, one share each. These members are consecutive: a window that the tensor's rotation
// shifts. Each tensor takes the rotation whose windows have the least load so far.
#pragma once

#include <map>
#include <unordered_map>
#include <vector>

#include "plan/kind.h"

namespace tessera::plan {

// The load of every rank so far, in bits.
class Loads {
 public:
  size_t slot(Rank rank);
  int64_t& operator[](size_t slot) { return bits_[slot]; }
  size_t memory_bytes() const { return bits_.capacity() * sizeof(int64_t) + slots_.size() * 32; }

 private:
  std::unordered_map<Rank, size_t> slots_;
  std::vector<int64_t> bits_;
};

// The windows of one kind.
class Windows {
 public:
  Windows(const Kind& kind, const PlanOptions& options, Loads& loads);
  // The rotation of the next tensor of this kind; adds its load. O(source ranks).
  int place(Loads& loads) const;
  size_t memory_bytes() const { return classes_.capacity() * sizeof(Window) + slots_.capacity() * sizeof(size_t); }

 private:
  struct Window {
    int width = 0;     // members that get `extra`
    int64_t base = 0;  // bits that every member gets
    int64_t extra = 0;
  };
  int least_loaded(Loads& loads) const;

  int members_;
  bool shifts_ = false;  // whether any two rotations differ
  std::vector<Window> classes_;
  std::vector<size_t> slots_;  // of the sources' ranks, class by class
};

// A lower bound of the busiest rank's egress in a batch: the maximum, over all sets of ranks that form a holder class,
// of the bytes that this set and its subsets must serve, divided by the number of its ranks.
class EgressBound {
 public:
  void add(const Kind& kind, int64_t count);
  int64_t value() const;

 private:
  struct Classes {
    const Holders* sources = nullptr;
    std::vector<int64_t> needed;  // bytes, by class
  };
  std::vector<Classes> structures_;  // of distinct classes
};

}  // namespace tessera::plan
