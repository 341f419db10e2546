#include "codec/simd/changes.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>

#include "codec/codec_testing.h"

namespace tessera {
namespace {

class ChangesTest : public EveryKernelTest {};

// Flips one bit in some atoms of `now`, each with a probability of 1 / `every`. Returns which atoms.
std::vector<size_t> change_some(std::mt19937_64& random, size_t atom_bytes, size_t every, GuardedBytes& now, size_t n) {
  std::vector<size_t> places;
  for (size_t i = 0; i < n; ++i) {
    if (random() % every != 0) continue;
    now.data()[i * atom_bytes + random() % atom_bytes] ^= std::byte{1} << (random() % 8);
    places.push_back(i);
  }
  return places;
}

TEST_P(ChangesTest, EveryChangedBitIsFoundPackedAndPutBack) {
  std::mt19937_64 random(1);
  std::vector<size_t> lengths(200);
  for (size_t n = 0; n < lengths.size(); ++n) lengths[n] = n;
  lengths.push_back(4096);
  lengths.push_back(4999);
  for (const size_t atom_bytes : {1, 2, 4, 8}) {
    for (const size_t n : lengths) {
      for (const size_t every : {1, 3, 100, 1 << 20}) {
        const std::vector<std::byte> old = random_bytes(n * atom_bytes, static_cast<uint32_t>(n));
        GuardedBytes before(n * atom_bytes, n % 64);
        GuardedBytes now(n * atom_bytes, n * 5 % 64);
        std::copy_n(old.data(), old.size(), before.data());
        std::copy_n(old.data(), old.size(), now.data());
        const std::vector<size_t> places = change_some(random, atom_bytes, every, now, n);

        std::vector<uint64_t> changed((n + 63) / 64 + 1, 0xAAAA);
        ASSERT_EQ(find_changes(atom_bytes, now.data(), before.data(), n, changed.data()), places.size());
        std::vector<uint64_t> expected(changed.size(), 0);
        for (const size_t place : places) expected[place / 64] |= uint64_t{1} << (place % 64);
        expected.back() = 0xAAAA;
        ASSERT_EQ(changed, expected) << n << " atoms of " << atom_bytes;

        GuardedBytes values(places.size() * atom_bytes, n % 8);
        ASSERT_EQ(pack_changes(atom_bytes, now.data(), before.data(), n, changed.data(), values.data()),
                  values.data() + values.size());
        for (size_t p = 0; p < places.size(); ++p)
          ASSERT_EQ(std::memcmp(values.data() + p * atom_bytes, now.data() + places[p] * atom_bytes, atom_bytes), 0);
        ASSERT_EQ(std::memcmp(before.data(), now.data(), n * atom_bytes), 0);

        GuardedBytes again(n * atom_bytes);
        std::copy_n(old.data(), old.size(), again.data());
        const size_t half = n / 3;
        const std::byte* taken = unpack_changes(atom_bytes, changed.data(), 0, half, values.data(), again.data(),
                                                static_cast<ptrdiff_t>(atom_bytes));
        taken = unpack_changes(atom_bytes, changed.data(), half, n - half, taken, again.data() + half * atom_bytes,
                               static_cast<ptrdiff_t>(atom_bytes));
        ASSERT_EQ(taken, values.data() + values.size());
        ASSERT_EQ(std::memcmp(again.data(), now.data(), n * atom_bytes), 0);
        ASSERT_TRUE(before.intact() && now.intact() && values.intact() && again.intact());
      }
    }
  }
}

TEST_P(ChangesTest, AtomsGoToTheirPlacesBackwardsToo) {
  std::vector<std::byte> before = random_bytes(300 * 4, 2);
  std::vector<std::byte> now = random_bytes(300 * 4, 3);
  std::vector<uint64_t> changed(5);
  const size_t count = find_changes(4, now.data(), before.data(), 300, changed.data());
  std::vector<std::byte> values(count * 4);
  std::vector<std::byte> reversed(300 * 4);
  for (size_t i = 0; i < 300; ++i) std::memcpy(reversed.data() + (299 - i) * 4, before.data() + i * 4, 4);
  pack_changes(4, now.data(), before.data(), 300, changed.data(), values.data());
  unpack_changes(4, changed.data(), 0, 300, values.data(), reversed.data() + 299 * 4, -4);
  for (size_t i = 0; i < 300; ++i) ASSERT_EQ(std::memcmp(reversed.data() + (299 - i) * 4, now.data() + i * 4, 4), 0);
}

// Only bits count, even if two values are equal as numbers, or one is unequal to itself.
TEST_P(ChangesTest, BitsCountAndNotValues) {
  const float now[] = {-0.0F, std::bit_cast<float>(0x7FC00001U), std::bit_cast<float>(0x7FC00000U), 1.0F};
  const float before[] = {0.0F, std::bit_cast<float>(0x7FC00000U), std::bit_cast<float>(0x7FC00000U), 1.0F};
  uint64_t changed = 0;
  EXPECT_EQ(
      find_changes(4, reinterpret_cast<const std::byte*>(now), reinterpret_cast<const std::byte*>(before), 4, &changed),
      2U);
  EXPECT_EQ(changed, 0b0011U);
}

INSTANTIATE_TEST_SUITE_P(Kernels, ChangesTest, every_kernel(), kernel_name);

}  // namespace
}  // namespace tessera
