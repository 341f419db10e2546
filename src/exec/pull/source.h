// The sender's side: the same routes, walked over the sender's own memory: to digest them while the receiver reads, or
// to pack them into a byte stream.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "exec/pull/compiler.h"
#include "exec/transfer_run.h"
#include "exec/walk/route.h"
#include "transport/byte_stream.h"

namespace tessera {

struct SourceOptions {
  bool digest = true;
  // Fill a stream with the routes whose memory is private (describe_memory), in the order given:
  // PullProgram::wants_stream().
  bool stream = false;
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
            std::unique_ptr<ByteStream> stream = {}, const RunOptions& options = {});
  ~SourceRun() override;

  int64_t bytes() const override;

 private:
  size_t units() const override;
  void run_unit(size_t index, std::span<std::byte> scratch) override;
  void prepare(uint32_t epoch) override;
  void interrupt(const Status& status) override;
  void fill_stream();

  std::shared_ptr<const SourceProgram> program_;
  std::string peer_;
  std::unique_ptr<ByteStream> stream_;
  RunOptions options_;
};

}  // namespace tessera
