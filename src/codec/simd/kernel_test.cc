#include "codec/simd/kernel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "codec/codec_testing.h"
#include "codec/simd/cast.h"
#include "codec/simd/kernel_set.h"
#include "tessera/error.h"

namespace tessera {
namespace {

TEST(KernelTest, TheBestVariantIsActiveAndScalarIsAlwaysThere) {
  const auto names = available_kernels();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(names.back(), "scalar");
  EXPECT_EQ(std::set(names.begin(), names.end()).size(), names.size());
#if defined(__aarch64__)
  EXPECT_THAT(names, testing::Contains(testing::StartsWith("NEON"))) << "every CPU of these has it";
#elif defined(__x86_64__)
  EXPECT_GT(names.size(), 1U) << "a CPU of these has SIMD";
#endif
}

TEST(KernelTest, EveryFamilyOfAForcedVariantWasCompiledForIt) {
  for (const std::string_view name : available_kernels()) {
    const ForcedKernel forced(name);
    EXPECT_EQ(active_kernel(), name);
    const codec::KernelSet& kernels = codec::active_kernels();
    EXPECT_EQ(kernels.cast->target, name);
    EXPECT_EQ(kernels.stream->target, name);
    EXPECT_EQ(kernels.digest->target, name);
    EXPECT_EQ(kernels.reduce->target, name);
    EXPECT_EQ(kernels.fold->target, name);
    EXPECT_EQ(kernels.amax->target, name);
    EXPECT_EQ(kernels.scale->target, name);
    EXPECT_EQ(kernels.quantize->target, name);
    EXPECT_EQ(kernels.decode->target, name);
    EXPECT_EQ(kernels.transpose->target, name);
    EXPECT_EQ(kernels.changes->target, name);
    EXPECT_EQ(kernels.squares->target, name);
  }
}

TEST(KernelTest, VariantsAreDifferentCode) {
  std::set<CastRow> casts;
  std::set<decltype(codec::DigestKernels::rows)> digests;
  for (const std::string_view name : available_kernels()) {
    const ForcedKernel forced(name);
    casts.insert(cast_row(DType::kF32, DType::kBF16));
    digests.insert(codec::active_kernels().digest->rows);
  }
  EXPECT_EQ(casts.size(), available_kernels().size());
  EXPECT_EQ(digests.size(), available_kernels().size());
}

TEST(KernelTest, ForcingNestsAndEnds) {
  const std::string before(active_kernel());
  {
    const ForcedKernel outer("SCALAR");
    EXPECT_EQ(active_kernel(), "scalar") << "in any case";
    {
      const ForcedKernel inner(available_kernels().front());
      EXPECT_EQ(active_kernel(), available_kernels().front());
    }
    EXPECT_EQ(active_kernel(), "scalar");
  }
  EXPECT_EQ(active_kernel(), before);
}

TEST(KernelTest, AnUnknownVariantIsAnErrorThatListsThoseThereAre) {
  try {
    const ForcedKernel forced("MMX");
    FAIL() << "MMX was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), testing::HasSubstr("'MMX'"));
    for (const std::string_view name : available_kernels())
      EXPECT_THAT(error.what(), testing::HasSubstr(std::string(name)));
  }
}

// Each process reads the environment once, so these tests run in separate processes.
class KernelEnvironmentDeathTest : public testing::Test {
 protected:
  void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(KernelEnvironmentDeathTest, TheVariableForcesAVariant) {
  EXPECT_EXIT(
      {
        setenv("TESSERA_FORCE_KERNEL", "scalar", 1);
        std::_Exit(active_kernel() == "scalar" ? 42 : 1);
      },
      testing::ExitedWithCode(42), "");
}

TEST_F(KernelEnvironmentDeathTest, AnUnknownNameInTheVariableIsAnErrorThatNamesIt) {
  EXPECT_EXIT(
      {
        setenv("TESSERA_FORCE_KERNEL", "avx9", 1);
        try {
          active_kernel();
        } catch (const Error& error) {
          const std::string_view what = error.what();
          std::_Exit(what.find("TESSERA_FORCE_KERNEL") != what.npos && what.find("scalar") != what.npos ? 42 : 2);
        }
        std::_Exit(1);
      },
      testing::ExitedWithCode(42), "");
}

}  // namespace
}  // namespace tessera
