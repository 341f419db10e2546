// What the machine itself can do, with a thread for each CPU that the cases run on. Cases are compared with this.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::bench {

// Each copies `bytes` in total, counted once, with kCpus threads that each copy a part. Returns the seconds of each of
// `repeat` repetitions after a warm-up, from the first thread's begin to the last one's end. They run in forked
// processes, which end with the call. REQUIRES: the calling process has one thread. Block for a minute at most.

// Streaming stores (codec/simd/stream.h) from shared to private memory.
std::vector<double> time_streaming_copy(int64_t bytes, int repeat);

// process_vm_readv() in large pieces, for each thread from the private memory of another process. Throws
// kPermissionDenied if the kernel refuses.
std::vector<double> time_process_vm_readv(int64_t bytes, int repeat);

}  // namespace tessera::bench
