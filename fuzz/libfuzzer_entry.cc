// The entry of one target's executable: TESSERA_FUZZ_TARGET is its function.
#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tessera::fuzz::TESSERA_FUZZ_TARGET(std::as_bytes(std::span(data, size)));
  return 0;
}
