// Trains a byte-level language model whose weights are sharded over the processes of one job, and gathered for each
// use: an embedding, four blocks of two matrices with GELU and residuals, and an output tied to the embedding.
//
//   etp_train 2 nvfp4 60 weights.bin         2 processes, 60 steps
//
// Each step trains on four micro-batches, and 1, 2 or 4 processes share them out. The gradients are added in the
// micro-batches' order whoever computed them, so that any number of processes ends with the same weights.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tessera/etp.h"
#include "tessera/store.h"

namespace {

namespace etp = tessera::etp;

constexpr size_t kWidth = 256, kHidden = 1024, kBytes = 256, kBlocks = 4;
constexpr size_t kContext = 8;       // bytes that a prediction sees
constexpr size_t kTokens = 32;       // predictions in a micro-batch
constexpr size_t kMicroBatches = 4;  // in a step
constexpr const char* kText = "/usr/share/common-licenses/GPL-3";

// Matrices, row-major -------------------------------------------------------------------------------------------------

using Matrix = std::vector<float>;

Matrix transposed(const float* from, size_t rows, size_t columns) {
  Matrix to(rows * columns);
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < columns; ++c) to[c * rows + r] = from[r * columns + c];
  return to;
}

// c[m, n] = a[m, k] b[k, n], each element summed in k's order. m is a multiple of 4, n of 8.
void multiply(const float* a, const float* b, float* c, size_t m, size_t n, size_t k) {
  using Lanes [[gnu::vector_size(32)]] = float;
  std::vector<Lanes> panel(k);
  for (size_t j = 0; j < n; j += 8) {
    for (size_t p = 0; p < k; ++p) std::memcpy(&panel[p], &b[p * n + j], sizeof(Lanes));
    for (size_t i = 0; i < m; i += 4) {
      Lanes sum[4] = {};
      for (size_t p = 0; p < k; ++p)
        for (size_t r = 0; r < 4; ++r) sum[r] += a[(i + r) * k + p] * panel[p];
      for (size_t r = 0; r < 4; ++r) std::memcpy(&c[(i + r) * n + j], &sum[r], sizeof(Lanes));
    }
  }
}

void add_to(Matrix& to, const Matrix& from) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
}

// GELU by its tanh approximation, and its derivative.
float gelu(float x) {
  return 0.5f * x * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}
float gelu_slope(float x) {
  const float t = std::tanh(0.7978845608f * (x + 0.044715f * x * x * x));
  return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 0.134145f * x * x);
}

// The model -----------------------------------------------------------------------------------------------------------

// y = x w^T, of a weight that is gathered for each use.
struct Linear {
  etp::Runtime& runtime;
  etp::WeightId weight;
  size_t outputs, inputs;

  Matrix forward(const Matrix& x) {
    const size_t tokens = x.size() / inputs;
    Matrix y(tokens * outputs);
    const etp::FullWeight w = runtime.acquire(weight, etp::Phase::kForward);
    const Matrix wt = transposed(static_cast<const float*>(w.data()), outputs, inputs);
    multiply(x.data(), wt.data(), y.data(), tokens, outputs, inputs);
    return y;
  }

  // The gradient of x; the weight's goes to its owners.
  Matrix backward(const Matrix& x, const Matrix& dy) {
    const size_t tokens = x.size() / inputs;
    Matrix dx(x.size());
    etp::FullWeight w = runtime.acquire(weight, etp::Phase::kBackward);
    multiply(dy.data(), static_cast<const float*>(w.data()), dx.data(), tokens, inputs, outputs);
    w.release();
    etp::GradientBuffer dw = runtime.gradient_buffer(weight);
    const Matrix dyt = transposed(dy.data(), tokens, outputs);
    multiply(dyt.data(), x.data(), static_cast<float*>(dw.data()), outputs, inputs, tokens);
    runtime.produce(std::move(dw));
    return dx;
  }
};

// The last kContext bytes, each embedded and rotated by its distance.
struct Embedding {
  etp::Runtime& runtime;
  etp::WeightId weight;

  Matrix forward(const unsigned char* text) {
    const etp::FullWeight w = runtime.acquire(weight, etp::Phase::kForward);
    Matrix x(kTokens * kWidth);
    visit(text, [&, e = static_cast<const float*>(w.data())](size_t to, size_t from) { x[to] += e[from]; });
    return x;
  }
  void backward(const unsigned char* text, const Matrix& dx) {
    etp::GradientBuffer dw = runtime.gradient_buffer(weight);
    auto* const d = static_cast<float*>(dw.data());
    std::memset(d, 0, kBytes * kWidth * sizeof(float));
    visit(text, [&](size_t to, size_t from) { d[from] += dx[to]; });
    runtime.produce(std::move(dw));
  }

  template <typename Each>
  static void visit(const unsigned char* text, const Each& each) {
    for (size_t t = 0; t < kTokens; ++t)
      for (size_t back = 0; back < kContext; ++back)
        for (size_t d = 0; d < kWidth; ++d)
          each(t * kWidth + d, text[t + kContext - 1 - back] * kWidth + (d + back * kWidth / kContext) % kWidth);
  }
};

// Mean cross entropy of the next bytes; `logits` becomes its gradient, divided by the micro-batches of a step.
float cross_entropy(Matrix& logits, const unsigned char* next) {
  float loss = 0;
  for (size_t t = 0; t < kTokens; ++t) {
    float* const row = &logits[t * kBytes];
    const float largest = *std::max_element(row, row + kBytes);
    float sum = 0;
    for (size_t v = 0; v < kBytes; ++v) sum += std::exp(row[v] - largest);
    loss += std::log(sum) + largest - row[next[t]];
    for (size_t v = 0; v < kBytes; ++v) {
      const float p = std::exp(row[v] - largest) / sum;
      row[v] = (p - (v == next[t] ? 1.0f : 0.0f)) / static_cast<float>(kTokens * kMicroBatches);
    }
  }
  return loss / kTokens;
}

class Model {
 public:
  Model(etp::Runtime& runtime, const std::string& format) : runtime_(runtime) {
    wte_ = add("wte", kBytes, kWidth, format);
    for (size_t b = 0; b < kBlocks; ++b) {
      const std::string block = "blocks." + std::to_string(b);
      up_.push_back({runtime, add(block + ".up", kHidden, kWidth, format), kHidden, kWidth});
      down_.push_back({runtime, add(block + ".down", kWidth, kHidden, format), kWidth, kHidden});
    }
    loss_ = runtime.add_replicated("loss", 1, tessera::DType::kF32);
    runtime.start();
  }

  // Forward and backward of one micro-batch: text[kContext] is the first byte to predict. The loss.
  float train(const unsigned char* text) {
    Embedding embedding{runtime_, wte_};
    Linear output{runtime_, wte_, kBytes, kWidth};
    std::array<Matrix, kBlocks> inputs, before, hidden;
    Matrix x = embedding.forward(text);
    for (size_t b = 0; b < kBlocks; ++b) {
      inputs[b] = x;
      before[b] = hidden[b] = up_[b].forward(x);
      for (float& h : hidden[b]) h = gelu(h);
      add_to(x, down_[b].forward(hidden[b]));
    }
    Matrix logits = output.forward(x);
    const float loss = cross_entropy(logits, text + kContext);
    Matrix dx = output.backward(x, logits);
    for (size_t b = kBlocks; b-- > 0;) {
      Matrix dh = down_[b].backward(hidden[b], dx);
      for (size_t i = 0; i < dh.size(); ++i) dh[i] *= gelu_slope(before[b][i]);
      add_to(dx, up_[b].backward(inputs[b], dh));
    }
    embedding.backward(text, dx);
    return loss;
  }

  // AdamW (https://arxiv.org/abs/1711.05101, algorithm 2) on this rank's rows. The loss of all ranks.
  float update(int step, float loss) {
    float total = 0;
    runtime_.give_replicated(loss_, &loss, &total, tessera::DType::kF32);
    runtime_.update(ids_, [&] {
      const auto k = static_cast<float>(step);
      const float fix1 = 1 - std::pow(0.9f, k), fix2 = 1 - std::pow(0.95f, k);
      for (Shard& shard : shards_) {
        auto* const w = reinterpret_cast<float*>(runtime_.shard(shard.id));
        const auto* const g = static_cast<const float*>(runtime_.gradient(shard.id));
        for (size_t i = 0; i < shard.mean.size(); ++i) {
          shard.mean[i] = 0.9f * shard.mean[i] + 0.1f * g[i];
          shard.square[i] = 0.95f * shard.square[i] + 0.05f * g[i] * g[i];
          w[i] -= 2e-3f * (shard.mean[i] / fix1 / (std::sqrt(shard.square[i] / fix2) + 1e-8f) + 0.01f * w[i]);
        }
      }
    });
    runtime_.zero_gradients();
    return total;
  }

  // Each rank writes its rows where they belong in the file of all weights.
  void save(const std::string& path) const {
    const int file = ::open(path.c_str(), O_WRONLY | O_CREAT, 0644);
    for (const Shard& shard : shards_) {
      const size_t bytes = shard.mean.size() * sizeof(float);
      const ssize_t written = ::pwrite(file, runtime_.shard(shard.id), bytes, shard.place);
      if (written != static_cast<ssize_t>(bytes)) throw std::runtime_error(path + ": " + std::strerror(errno));
    }
    ::close(file);
  }

 private:
  struct Shard {  // this rank's rows of a weight
    etp::WeightId id;
    int64_t place;  // in the file of all weights, in bytes
    Matrix mean, square;
  };

  // Initial values depend on nothing but the element's place among all weights.
  etp::WeightId add(const std::string& name, int64_t rows, int64_t columns, const std::string& format) {
    const etp::WeightId id = runtime_.add(
        {.name = name, .rows = rows, .columns = columns, .format = format, .compute = tessera::DType::kF32});
    const auto [begin, end] = runtime_.rows(id);
    const int64_t first = elements_ + begin * columns, count = (end - begin) * columns;
    auto* const w = reinterpret_cast<float*>(runtime_.shard(id));
    for (int64_t i = 0; i < count; ++i) {
      uint64_t z = static_cast<uint64_t>(first + i + 1) * 0x9E3779B97F4A7C15u;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;  // splitmix64 (https://prng.di.unimi.it/splitmix64.c)
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
      w[i] = (static_cast<float>((z ^ (z >> 31)) >> 40) * 0x1p-23f - 1) / std::sqrt(static_cast<float>(columns));
    }
    ids_.push_back(id);
    shards_.push_back(
        {id, first * int64_t{sizeof(float)}, Matrix(static_cast<size_t>(count)), Matrix(static_cast<size_t>(count))});
    elements_ += rows * columns;
    return id;
  }

  etp::Runtime& runtime_;
  std::vector<etp::WeightId> ids_;
  std::vector<Shard> shards_;
  int64_t elements_ = 0;
  etp::WeightId wte_ = 0;
  uint32_t loss_ = 0;  // a replicated tensor
  std::vector<Linear> up_, down_;
};

void train(int rank, int ranks, const std::string& format, int steps, const std::string& save, const std::string& url) {
  std::ifstream file(kText, std::ios::binary);
  const std::vector<unsigned char> text{std::istreambuf_iterator<char>(file), {}};
  if (text.size() < 4096) throw std::runtime_error(std::string(kText) + " is missing, or too short");
  const std::unique_ptr<tessera::Store> store = tessera::open_store(url);
  etp::ShardGroup group = etp::ShardGroup::over_store(*store, "etp_train", rank, ranks, {});
  etp::Runtime runtime(group, {.scale = etp::GradientScale::kSum});
  Model model(runtime, format);
  for (int step = 1; step <= steps; ++step) {
    float loss = 0;
    for (size_t m = static_cast<size_t>(rank); m < kMicroBatches; m += static_cast<size_t>(ranks)) {
      const size_t batch = static_cast<size_t>(step - 1) * kMicroBatches + m;
      loss += model.train(&text[batch * 7919 % (text.size() - kContext - kTokens)]) / kMicroBatches;
    }
    loss = model.update(step, loss);
    if (rank == 0 && (step == 1 || step % 10 == 0)) std::printf("step %3d: loss %.4f\n", step, loss);
  }
  model.save(save);
  group.close();
}

}  // namespace

// Starts the ranks, as a launcher would, and serves the store in which they find each other.
int main(int count, char** arguments) try {
  const int ranks = count == 5 ? std::atoi(arguments[1]) : 0;
  if (ranks != 1 && ranks != 2 && ranks != 4) throw std::runtime_error("usage: etp_train 1|2|4 FORMAT STEPS SAVE");
  const std::string url = "unix:///tmp/etp_train." + std::to_string(::getpid());
  for (int rank = 0; rank < ranks; ++rank)
    if (::fork() == 0) return train(rank, ranks, arguments[2], std::atoi(arguments[3]), arguments[4], url), 0;
  const auto server = tessera::serve_store(url);
  bool failed = false;
  for (int status = 0; ::wait(&status) > 0;) failed |= status != 0;
  return failed ? 1 : 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "etp_train: %s\n", error.what());
  return 1;
}
