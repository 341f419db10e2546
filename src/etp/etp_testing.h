// Ranks of one process, each on its own thread, for the tests of this layer.
#pragma once

#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/thread.h"
#include "tessera/etp.h"

namespace tessera::etp {

inline ShardGroup::Options test_group() {
  return {.name = "test", .timeout = std::chrono::seconds(60), .slots = 1024};
}

// Runs `body` for each rank and waits for all. Rethrows the lowest rank's error.
inline void run_ranks(int size, const std::function<void(ShardGroup group)>& body,
                      const ShardGroup::Options& options = test_group()) {
  std::vector<ShardGroup> groups = ShardGroup::in_process(size, options);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < errors.size(); ++rank)
    threads.push_back(start_thread("tessera-rank", [&, rank] {
      try {
        body(groups[rank]);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    }));
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error != nullptr) std::rethrow_exception(error);
}

// Options under which everything that is predicted is prefetched on a stream.
inline RuntimeOptions prefetching() {
  return {.prefetch = PrefetchMode::kOn, .inline_bytes = 0, .check = true};
}

inline float weight_value(uint32_t weight, int64_t row, int64_t column, int64_t version) {
  return static_cast<float>((weight * 131 + row * 17 + column * 3) % 31) * 0.25F + static_cast<float>(version);
}

// This rank's rows of a version.
inline void fill_shard(Runtime& runtime, WeightId weight, int64_t version) {
  const RowRange rows = runtime.rows(weight);
  const int64_t columns = runtime.spec(weight).columns;
  auto* to = reinterpret_cast<float*>(runtime.shard(weight));
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t column = 0; column < columns; ++column) *to++ = weight_value(weight, row, column, version);
}

// How many elements of a gathered f32 weight are not those of the version.
inline int64_t wrong_elements(const FullWeight& full, WeightId weight, int64_t version) {
  const auto* at = static_cast<const float*>(full.data());
  int64_t wrong = 0;
  for (int64_t row = 0; row < full.rows(); ++row)
    for (int64_t column = 0; column < full.columns(); ++column)
      wrong += *at++ == weight_value(weight, row, column, version) ? 0 : 1;
  return wrong;
}

inline void produce_ones(Runtime& runtime, WeightId weight, float value = 1, int micro_batch = 0) {
  GradientBuffer gradient = runtime.gradient_buffer(weight, micro_batch);
  std::fill_n(static_cast<float*>(gradient.data()), gradient.rows() * gradient.columns(), value);
  runtime.produce(std::move(gradient));
}

}  // namespace tessera::etp
