// What the machine itself can do, with a thread for each CPU that the cases run on: the measure of everything else.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::bench {

// Each returns the seconds that `repeat` repetitions took, after a warm-up, to copy `bytes` in all, which count once:
// kCpus threads, each with its own part, timed from the first one's begin to the last one's end. They run in
// forked processes, which end with the call. REQUIRES: the calling process has one thread. Block for a minute at most.

// Streaming stores (codec/simd/stream.h) out of shared into private memory.
std::vector<double> time_streaming_copy(int64_t bytes, int repeat);

// process_vm_readv() in large pieces, out of the private memory of another process for each thread. Throws
// kPermissionDenied where the kernel refuses.
std::vector<double> time_process_vm_readv(int64_t bytes, int repeat);

}  // namespace tessera::bench
