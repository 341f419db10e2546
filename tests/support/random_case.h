// Random tensors, layouts and dtypes for transfers between two jobs, and the expected value of every element.
// Deterministic in the seed, so that all ranks of both jobs make the same cases without any exchange.
#pragma once

#include <cstddef>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "tessera/bus.h"
#include "tessera/memory.h"

namespace tessera::test {

struct RandomCase {
  std::string name;
  Shape shape;
  DType src_dtype = DType::kF32;
  DType dst_dtype = DType::kF32;
  Layout src;
  Layout dst;
  bool src_shared = false;  // whether it lies in SharedHeap memory
  bool dst_shared = false;
  uint64_t seed = 0;
  std::optional<Format> wire{};  // what it is quantised to on its way
  PlaneSet planes{};             // that are taken as they are
  PlaneSet src_planes{};         // that the source holds instead of elements: it is quantised already
  // The chances that an element changes with the second version, the third, and so on; then from the first one again.
  // Empty: 1.
  std::vector<double> chances{};
};

RandomCase random_case(std::mt19937_64& random, const std::string& name, int source_world, int destination_world);

// Floats, in shapes of two dims or more, whose amaxes differ from place to place.
RandomCase random_wire_case(std::mt19937_64& random, const std::string& name, int source_world, int destination_world,
                            Format format);

// Likewise, received into planes: edges of the destination's shards lie between blocks.
RandomCase random_planes_case(std::mt19937_64& random, const std::string& name, int source_world, int destination_world,
                              Format format);

// Sent from planes, and received into planes or dequantised.
RandomCase random_encoded_case(std::mt19937_64& random, const std::string& name, int source_world,
                               int destination_world, Format format);

// One rank's local tensor in its own memory, possibly with gaps between the elements.
class LocalData {
 public:
  LocalData(size_t bytes, bool shared);
  std::span<std::byte> bytes() { return shared_.size() > 0 ? std::span(shared_.data(), shared_.size()) : own_; }

  std::vector<Index> strides;  // elements; empty: contiguous
  size_t offset = 0;           // of the first element in bytes()

 private:
  std::vector<std::byte> own_;
  SharedBuffer shared_;
};

// What source rank `rank` holds of `a`, and the expected bytes of every destination element, for a version.
LocalData source_space(const RandomCase& a, Rank rank);
void fill_source(const RandomCase& a, Rank rank, int64_t version, LocalData& data);
LocalData destination_space(const RandomCase& a, Rank rank);
// Empty, or what is wrong with the first element that differs.
std::string check_destination(const RandomCase& a, Rank rank, int64_t version, LocalData& data);

}  // namespace tessera::test
