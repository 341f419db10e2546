#include "base/mutation.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Mutation, IsTheOneThatIsAskedFor) {
  EXPECT_FALSE(mutated(Mutation::kLocalAmax));
  mutation() = Mutation::kLocalAmax;
  EXPECT_TRUE(mutated(Mutation::kLocalAmax));
  EXPECT_FALSE(mutated(Mutation::kStaleBase));
  mutation() = Mutation::kNone;
  EXPECT_FALSE(mutated(Mutation::kLocalAmax));
}

}  // namespace
}  // namespace tessera
