#include "etp/gradients/replicated.h"

#include <algorithm>
#include <cstring>

#include "base/fail.h"
#include "codec/simd/fold.h"
#include "layout/text_reader.h"

namespace tessera::etp {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kBucketBytes = int64_t{16} << 20;

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

struct Bucket {
  size_t end = 0;
  int64_t bytes = 0;
};

// The tensors from `first` on that fit a bucket; at least one.
Bucket bucket_from(size_t first, std::span<const int64_t> tensors) {
  Bucket bucket{.end = first + 1, .bytes = aligned(tensors[first])};
  while (bucket.end < tensors.size() && bucket.bytes + aligned(tensors[bucket.end]) <= kBucketBytes)
    bucket.bytes += aligned(tensors[bucket.end++]);
  return bucket;
}

}  // namespace

int64_t largest_bucket(std::span<const int64_t> tensors) {
  int64_t most = 0;
  for (size_t first = 0; first < tensors.size();) {
    const Bucket bucket = bucket_from(first, tensors);
    most = std::max(most, bucket.bytes);
    first = bucket.end;
  }
  return most;
}

uint32_t ReplicatedGradients::add(const std::string& name, int64_t elements, DType dtype) {
  if (elements < 0)
    fail(ErrorCode::kInvalidArgument, "{} cannot have {} elements"_message, tessera::quoted(name), elements);
  if (!foldable(dtype))
    fail(ErrorCode::kInvalidArgument, "{}: gradients of {} cannot be added; use f32, bf16 or f16"_message,
         tessera::quoted(name), to_string(dtype));
  tensors_.push_back({.name = name, .elements = elements, .dtype = dtype});
  bytes_.push_back(tensors_.back().bytes());
  return static_cast<uint32_t>(tensors_.size() - 1);
}

void ReplicatedGradients::give(uint32_t replicated, const void* gradient, void* accumulated, DType accumulated_dtype) {
  if (replicated >= tensors_.size())
    fail(ErrorCode::kInvalidArgument, "there is no replicated tensor {}: {} have been added"_message, replicated,
         tensors_.size());
  Tensor& tensor = tensors_[replicated];
  tensor.gradient = gradient;
  tensor.accumulated = accumulated;
  tensor.accumulated_dtype = accumulated_dtype;
}

void ReplicatedGradients::fold() {
  for (Tensor& tensor : tensors_) tensor.ranks = 0;
  struct Forgets {
    ReplicatedGradients& gradients;
    ~Forgets() { gradients.forget(); }
  } const forgets{*this};
  for (size_t first = 0; first < tensors_.size();) {
    const size_t end = bucket_from(first, bytes_).end;
    fold_bucket(first, end);
    first = end;
  }
}

void ReplicatedGradients::forget() {
  for (Tensor& tensor : tensors_) tensor.gradient = tensor.accumulated = nullptr;
}

void ReplicatedGradients::fold_bucket(size_t first, size_t end) {
  int64_t bytes = 0;
  for (size_t i = first; i < end; ++i) bytes += aligned(tensors_[i].bytes());
  if (bucket_.bytes() < static_cast<size_t>(bytes))
    bucket_ = context_.device.allocate(device::BufferKind::kShared, static_cast<size_t>(bytes), "replicated gradients");
  std::vector<collective::SumPart> parts;
  std::byte* to = bucket_.data();
  for (size_t i = first; i < end; ++i) {
    const Tensor& tensor = tensors_[i];
    collective::SumPart part{.gradient_dtype = tensor.dtype,
                             .accumulated = tensor.accumulated,
                             .accumulated_dtype = tensor.accumulated_dtype,
                             .elements = tensor.elements,
                             .scale = context_.scale(),
                             .first = tensor.accumulated == tensor.gradient,
                             .name = tensor.name};
    if (tensor.gradient != nullptr) {
      std::memcpy(to, tensor.gradient, static_cast<size_t>(tensor.bytes()));
      part.gradient = to;
    }
    parts.push_back(part);
    to += aligned(tensor.bytes());
  }
  const std::vector<int> ranks = context_.group.sum_exchange(parts);
  for (size_t i = first; i < end; ++i) tensors_[i].ranks = ranks[i - first];
}

std::vector<int> ReplicatedGradients::ranks() const {
  std::vector<int> ranks;
  for (const Tensor& tensor : tensors_) ranks.push_back(tensor.ranks);
  return ranks;
}

int64_t ReplicatedGradients::forecast() const {
  return largest_bucket(bytes_);
}

int64_t ReplicatedGradients::bytes() const {
  return static_cast<int64_t>(bucket_.bytes());
}

}  // namespace tessera::etp
