// Digests between real processes: memory that changes while it is taken is found out, and both sides tell the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cinttypes>
#include <cstdlib>
#include <numeric>

#include "base/testing.h"
#include "codec/simd/digest.h"
#include "tests/support/jobs.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr size_t kChanged = 17;  // an element

// One rank sends a tensor to two; it changes an element when the first of them has it and the second has not begun.
class Changed : public testing::Test {
 protected:
  static Side sender() {
    Side side = trainer(0, 1);
    side.layout = "1:R";
    return side;
  }
  static Side receiver(Rank rank, bool digest) {
    Side side = inference(rank);
    side.layout = "2:R";
    side.digest = digest;
    return side;
  }

  void start(bool digest) {
    group_.start("trainer/0", [this] {
      return with_batch(sender(), store_,
                        [this](Batch& batch, std::vector<float>& tensor) { return send(batch, tensor); });
    });
    for (const Rank rank : {0, 1})
      group_.start("inference/" + std::to_string(rank), [=, this] {
        ::setenv("TESSERA_FORCE_PULL", "readv", 1);  // a ring would be digested as it is filled, for each receiver
        return with_batch(receiver(rank, digest), store_, [=, this](Batch& batch, std::vector<float>& tensor) {
          return rank == 0 ? receive_first(batch, tensor) : receive_second(batch, tensor, digest);
        });
      });
    first_has_it_.open();
    changed_.open();
  }

  ProcessGroup group_;
  std::string store_ = group_.start_store();

 private:
  int send(Batch& batch, std::vector<float>& tensor) {
    std::iota(tensor.begin(), tensor.end(), 1.0f);
    Handle handle = batch.send();
    first_has_it_.pass();
    REQUIRE_HERE(!handle.cancel());  // too late; and its digests are made by now
    tensor[kChanged] += 1000;
    changed_.pass();
    std::fprintf(stderr, "%s\n", error_of([&] { handle.wait(); }).c_str());
    REQUIRE_HERE(batch.send().wait() == 2);
    return 0;
  }
  int receive_first(Batch& batch, std::vector<float>& tensor) {
    REQUIRE_HERE(batch.recv().wait() == 1 && tensor[kChanged] == 1 + kChanged);
    first_has_it_.pass();
    changed_.pass();
    REQUIRE_HERE(batch.recv().wait() == 2 && tensor[kChanged] == 1001 + kChanged);
    return 0;
  }
  int receive_second(Batch& batch, std::vector<float>& tensor, bool digest) {
    first_has_it_.pass();
    changed_.pass();
    std::fprintf(stderr, "%s\n", error_of([&] { batch.recv().wait(); }).c_str());
    REQUIRE_HERE(batch.torn() == digest && batch.version() == (digest ? 0 : 1));
    REQUIRE_HERE(batch.recv().wait() == 2 && !batch.torn() && tensor[kChanged] == 1001 + kChanged);
    return 0;
  }

  Barrier first_has_it_;
  Barrier changed_;
};

TEST_F(Changed, MemoryIsNamedOnBothSidesAndTheNextTransferHealsIt) {
  start(true);
  const std::vector<Outcome> outcomes = group_.wait(hang_limit());
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
  EXPECT_THAT(outcomes[0].output, AllOf(HasSubstr("data-loss: batch policy of pair weights: inference/1: "),
                                        HasSubstr("digest of tensor weight")));
  EXPECT_THAT(outcomes[2].output, AllOf(HasSubstr("data-loss: batch policy of pair weights: digest of tensor weight"),
                                        HasSubstr("trainer/0 sent ")));
}

TEST_F(Changed, MemoryGoesUnnoticedWhereOneSideWantsNoDigests) {
  start(false);
  const std::vector<Outcome> outcomes = group_.wait(hang_limit());
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
  for (const size_t i : {0, 2}) EXPECT_THAT(outcomes[i].output, HasSubstr("(no error)"));
}

int tell(uint64_t d0, uint64_t d1, int64_t elements) {
  std::fprintf(stderr, "%" PRIx64 " %" PRIx64 " %" PRId64 "\n", d0, d1, elements);
  return 0;
}
int tell_digest_of(const Batch& batch) {
  const std::vector<TensorDigest> digests = batch.digests();
  REQUIRE_HERE(digests.size() == 1 && digests[0].name == "weight");
  return tell(digests[0].d0, digests[0].d1, digests[0].elements);
}
// The sum of what the processes of that name have told.
Digest total(const std::vector<Outcome>& outcomes, const std::string& name) {
  Digest sum;
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
    if (outcome.name != name) continue;
    Digest part;
    const int fields =
        std::sscanf(outcome.output.c_str(), "%" SCNx64 " %" SCNx64 " %" SCNu64, &part.d[0], &part.d[1], &part.elements);
    EXPECT_EQ(fields, 3) << outcome.output;
    sum += part;
  }
  return sum;
}

TEST(Digests, AddUpToThoseOfTheWholeTensorOnBothSides) {
  ProcessGroup group;
  const std::string store = group.start_store();
  std::vector<float> whole(64 * 48);
  std::iota(whole.begin(), whole.end(), 1.0f);
  group.start("whole", [&] {
    Digest digest;
    digest_bytes(digest, 0, reinterpret_cast<const std::byte*>(whole.data()), whole.size() * sizeof(float));
    return tell(digest.d[0], digest.d[1], static_cast<int64_t>(whole.size()));
  });
  for (Rank rank = 0; rank < 2; ++rank) {
    group.start("trainer", [&, rank] {
      return with_batch(trainer(rank), store, [&](Batch& batch, std::vector<float>& tensor) {
        std::copy_n(whole.begin() + ptrdiff_t{rank} * 32 * 48, 32 * 48, tensor.begin());
        batch.send().wait();
        return tell_digest_of(batch);
      });
    });
    group.start("inference", [&, rank] {
      return with_batch(inference(rank), store, [&](Batch& batch, std::vector<float>&) {
        batch.recv().wait();
        return tell_digest_of(batch);
      });
    });
  }
  const std::vector<Outcome> outcomes = group.wait(hang_limit());
  EXPECT_EQ(total(outcomes, "trainer"), total(outcomes, "whole"));
  EXPECT_EQ(total(outcomes, "inference"), total(outcomes, "whole"));
}

}  // namespace
}  // namespace tessera::test
