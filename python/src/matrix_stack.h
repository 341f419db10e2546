// Tensors [..., M, K] from Python for the codec: one matrix after another.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/fail.h"
#include "base/mutex.h"
#include "codec/parallel.h"
#include "tessera/layout.h"
#include "tessera/quantize.h"

namespace tessera::python {

inline constexpr Parallel kAllCpus{.threads = 0};

// A tensor [..., M, K]: matrices whose rows are dense.
class MatrixStack {
 public:
  MatrixStack(uintptr_t address, const std::string& dtype, Shape shape, std::vector<Index> strides)
      : data_(reinterpret_cast<const std::byte*>(address)),
        dtype_(parse_dtype(dtype)),
        shape_(std::move(shape)),
        strides_(std::move(strides)) {
    TESSERA_CHECK_LE(size_t{2}, shape_.size());
    TESSERA_CHECK_EQ(shape_.size(), strides_.size());
    size_ = std::accumulate(shape_.begin(), shape_.end() - 2, Index{1}, std::multiplies<>());
  }

  size_t size() const { return static_cast<size_t>(size_); }
  size_t dims() const { return shape_.size() - 2; }  // of the stack
  Index rows() const { return shape_[dims()]; }
  Index columns() const { return shape_[dims() + 1]; }
  Index elements() const { return rows() * columns(); }  // of a matrix
  size_t bytes() const { return static_cast<size_t>(bytes_of(dtype_, size_ * elements())); }

  std::vector<Index> position(size_t i) const {
    std::vector<Index> position(dims());
    auto rest = static_cast<Index>(i);
    for (size_t dim = dims(); dim-- > 0; rest /= shape_[dim]) position[dim] = rest % shape_[dim];
    return position;
  }

  MatrixView operator[](size_t i) const {
    const std::vector<Index> at = position(i);
    const Index offset = std::inner_product(at.begin(), at.end(), strides_.begin(), Index{0});
    return {.data = data_ + offset * bytes_of(dtype_, 1),
            .dtype = dtype_,
            .rows = rows(),
            .columns = columns(),
            .row_stride = strides_[dims()]};
  }

  std::vector<MatrixView> matrices() const {
    std::vector<MatrixView> all;
    for (size_t i = 0; i < size(); ++i) all.push_back((*this)[i]);
    return all;
  }

 private:
  const std::byte* data_;
  DType dtype_;
  Shape shape_;
  std::vector<Index> strides_;  // in elements
  Index size_ = 1;
};

// Calls body(i, threads) for each of n matrices: large ones use all threads, one after another; small ones use one
// thread each. The first error is passed to `failed`, which throws.
template <typename Body, typename Failed>
void for_each_matrix(size_t n, size_t bytes, const Body& body, const Failed& failed) {
  constexpr size_t kLarge = 16 * codec::kBytesPerThread;
  Mutex mutex;
  size_t first = n;
  std::exception_ptr error;
  const auto guarded = [&](size_t i, Parallel parallel) {
    try {
      body(i, parallel);
    } catch (...) {
      const MutexLock lock(mutex);
      if (i < first) {
        first = i;
        error = std::current_exception();
      }
    }
  };
  if (n == 1 || bytes / std::max<size_t>(n, 1) >= kLarge) {
    for (size_t i = 0; i < n && !error; ++i) guarded(i, kAllCpus);
  } else {
    codec::for_each(n, bytes, kAllCpus, [&](size_t i) { guarded(i, Parallel{}); });
  }
  if (error) failed(first, error);
}

[[noreturn]] inline void rethrow(size_t, const std::exception_ptr& error) {
  std::rethrow_exception(error);
}

}  // namespace tessera::python
