#include "tools/doctor_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::tools {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(DoctorChecks, PrivateMemoryIsReadEachWayWhereItIsCheaper) {
  // The ring's pieces are cheap, its bytes are not: at 4 KiB readv is the way, at 2 KiB the ring.
  const PullCosts costs{.readv = {.byte = 1e-10, .piece = 4e-7}, .ring = {.byte = 2e-10, .piece = 2e-8}};
  EXPECT_THAT(private_memory_text(costs),
              HasSubstr("process_vm_readv (10.0 GB/s, 400 ns a piece) for pieces of 4.10 kB and more, "
                        "the bounce ring (5.0 GB/s, 20 ns a piece) for smaller ones"));
}

TEST(DoctorChecks, ARingThatIsCheaperAtEverySizeHasThemAll) {
  const PullCosts costs{.readv = {.byte = 4e-10, .piece = 4e-7}, .ring = {.byte = 2e-10, .piece = 2e-8}};
  EXPECT_THAT(private_memory_text(costs), HasSubstr("the bounce ring (5.0 GB/s, 20 ns a piece) for all sizes"));
  EXPECT_THAT(private_memory_text(costs), Not(HasSubstr("pieces of")));
}

}  // namespace
}  // namespace tessera::tools
