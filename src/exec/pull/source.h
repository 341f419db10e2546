// The sender's side: the same routes, walked over the sender's own memory: to digest them while the receiver reads, or
// to pack them into a byte stream.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "exec/delta/delta_run.h"
#include "exec/delta/delta_stream.h"
#include "exec/pull/compiler.h"
#include "exec/pull/stream_cursor.h"
#include "exec/transfer_run.h"
#include "exec/walk/route.h"
#include "transport/byte_stream.h"

namespace tessera {

struct SourceOptions {
  bool digest = true;
};

// Compiled once at registration. Immutable, hence thread-safe; the memory it names must outlive its runs.
class SourceProgram {
 public:
  SourceProgram(std::span<const SourceRoute> routes, const SourceOptions& options);
  ~SourceProgram();

  bool fills_stream() const;
  int64_t bytes() const;
  size_t routes() const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<const Impl> impl_;
};

// One pass over a program. With a stream it takes up a thread of `pool` until the receiver has drained it, so that a
// stream needs a pool of its own.
class SourceRun final : public TransferRun {
 public:
  // REQUIRES: a stream exactly if program->fills_stream(). `peer` names the receiver ("inference/1") in messages.
  SourceRun(std::shared_ptr<const SourceProgram> program, WorkerPool& pool, Done done, std::string peer,
            std::shared_ptr<ByteStream> stream = {}, const RunOptions& options = {});
  ~SourceRun() override;

  // Before start(), which routes the stream carries as deltas from now on, and of how many bytes: one a route,
  // DeltaRun::kFull for those in full; empty if all are. The digest of a route that is a delta is 0.
  void travel(std::span<const int64_t> deltas);

  int64_t bytes() const override;

 private:
  size_t units() const override;
  void run_unit(size_t index, std::span<std::byte> scratch) override;
  void prepare(uint32_t epoch) override;
  void interrupt(const Status& status) override;
  void fill_stream();
  bool is_delta(uint32_t route) const { return !deltas_.empty() && deltas_[route] != DeltaRun::kFull; }
  bool fill(size_t index, int64_t first, std::span<std::byte> out);

  std::shared_ptr<const SourceProgram> program_;
  std::string peer_;
  const std::shared_ptr<ByteStream> stream_;
  const RunOptions options_;
  std::vector<int64_t> deltas_;  // empty: none
  StreamLayout layout_;          // of what the stream carries, if any of it is a delta
  std::optional<DeltaPacker> packer_;
};

}  // namespace tessera
