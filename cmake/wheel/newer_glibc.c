// What the C++ runtime of GCC 12 asks of glibc 2.32 and 2.36, for wheels that shall run on older ones: scripts/wheel.sh
// links it. Hidden, so that no other library of the process takes them for glibc's.
#include <stdint.h>
#include <sys/random.h>

#define HIDDEN __attribute__((visibility("hidden")))

// <sys/single_threaded.h>: 0 says that there may be other threads, so that reference counts are always atomic.
HIDDEN char __libc_single_threaded = 0;

// <stdlib.h>: std::random_device draws with it.
HIDDEN uint32_t arc4random(void) {
  uint32_t number = 0;
  while (getrandom(&number, sizeof number, 0) != sizeof number) {
  }
  return number;
}
