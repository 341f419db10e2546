#include "peer/identity.h"

#include <gtest/gtest.h>

#include "tessera/error.h"

namespace tessera {
namespace {

TEST(Identity, NamesThatCannotBePartsOfKeysAreRefused) {
  for (const char* name : {"", "a/b", "a b", "\xff", "!failed"}) EXPECT_THROW(check_name("job", name), Error) << name;
  EXPECT_THROW(check_name("job", std::string(65, 'a')), Error);
  EXPECT_NO_THROW(check_name("job", "trainer-0.v1_x"));
}

TEST(Identity, RanksAreListedInRanges) {
  EXPECT_EQ(rank_list("t", {0, 1, 2, 5}), "t/0-2, t/5");
  EXPECT_EQ(rank_list("t", {}), "");
}

}  // namespace
}  // namespace tessera
