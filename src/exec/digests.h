// The order of a transfer's digests in one list: first one for each route; then, in the order of the routes, the rest
// of each route that travels quantised (WirePiece::digest); then that of the piece of each route that may travel as a
// delta and whose piece has a separate digest. Runs compute, and sources send, digests in this order. A value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

// The further digest of a route.
enum class SecondDigest : uint8_t { kNone, kRest, kPiece };

class DigestTable {
 public:
  DigestTable() = default;
  explicit DigestTable(std::span<const SecondDigest> routes) : second_(routes.size(), 0), size_(routes.size()) {
    for (const SecondDigest kind : {SecondDigest::kRest, SecondDigest::kPiece})
      for (size_t route = 0; route < routes.size(); ++route)
        if (routes[route] == kind) second_[route] = size_++;
  }
  // All routes have a second digest of that kind.
  DigestTable(size_t routes, SecondDigest kind) : DigestTable(std::vector<SecondDigest>(routes, kind)) {}

  size_t size() const { return size_; }
  size_t routes() const { return second_.size(); }
  bool has_second(size_t route) const { return second_[route] != 0; }
  // REQUIRES: has_second(route)
  size_t second(size_t route) const { return second_[route]; }

 private:
  std::vector<size_t> second_;  // by route; 0: none
  size_t size_ = 0;
};

}  // namespace tessera
