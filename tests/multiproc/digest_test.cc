// Digests between real processes: memory that changes during a transfer is detected, and both sides report the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cinttypes>
#include <cstdlib>
#include <numeric>
#include <sstream>

#include "base/testing.h"
#include "codec/simd/digest.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::Gt;
using testing::HasSubstr;
using testing::Lt;

constexpr size_t kChanged = 17;        // an element
constexpr int kSampledVersions = 200;  // none of them has a block in its sample in 2.5 of a million runs

// One rank sends a tensor to two; it changes an element when the first has it and the second has not begun.
class Changed : public JobsTest {
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

  void start_all(bool digest) {
    start(sender(), [this](Batch& batch, std::vector<float>& tensor) { return send(batch, tensor); });
    for (const Rank rank : {0, 1})
      start("inference/" + std::to_string(rank), [=, this] {
        ::setenv("TESSERA_FORCE_PULL", "readv", 1);  // a stream would be digested as it is filled, for each receiver
        return with_batch(receiver(rank, digest), store_, [=, this](Batch& batch, std::vector<float>& tensor) {
          return rank == 0 ? receive_first(batch, tensor) : receive_second(batch, tensor, digest);
        });
      });
    first_has_it_.open();
    changed_.open();
  }

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
  start_all(true);
  expect_all_well();
  EXPECT_THAT(of("trainer/0").output, AllOf(HasSubstr("data-loss: batch policy of pair weights: inference/1: "),
                                            HasSubstr("digest of tensor weight")));
  EXPECT_THAT(of("inference/1").output,
              AllOf(HasSubstr("data-loss: batch policy of pair weights: digest of tensor weight"),
                    HasSubstr("trainer/0 sent ")));
}

TEST_F(Changed, MemoryGoesUnnoticedWhereOneSideWantsNoDigests) {
  start_all(false);
  expect_all_well();
  for (const char* name : {"trainer/0", "inference/1"}) EXPECT_THAT(of(name).output, HasSubstr("(no error)"));
}

// Likewise, version by version. The tensor has one of the sixteen blocks of which one is in the sample.
class ChangedSampled : public JobsTest {
 protected:
  void start_all() {
    Side from = trainer(0, 1);
    from.layout = "1:R";
    start(from, [this](Batch& batch, std::vector<float>& tensor) { return send(batch, tensor); });
    for (const Rank rank : {0, 1}) {
      Side to = inference(rank);
      to.layout = "2:R";
      if (rank == 1) to.digest = DigestMode::kSampled;
      start("inference/" + std::to_string(rank), [this, to, rank] {
        ::setenv("TESSERA_FORCE_PULL", "readv", 1);
        return with_batch(to, store_, [this, rank](Batch& batch, std::vector<float>& tensor) {
          return rank == 0 ? receive_first(batch, tensor) : receive_second(batch, tensor);
        });
      });
    }
  }

 private:
  int send(Batch& batch, std::vector<float>& tensor) {
    int noticed = 0;
    for (int version = 1; version <= kSampledVersions; ++version) {
      std::iota(tensor.begin(), tensor.end(), static_cast<float>(version));
      Handle handle = batch.send();
      first_has_it_.wait();
      REQUIRE_HERE(!handle.cancel());  // too late; and its digests are made by now
      tensor[kChanged] = -1;
      changed_.raise();
      noticed += error_of([&] { handle.wait(); }).find("digest of tensor weight") != std::string::npos;
    }
    std::fprintf(stderr, "%d noticed\n", noticed);
    return 0;
  }
  int receive_first(Batch& batch, std::vector<float>& tensor) {
    for (int version = 1; version <= kSampledVersions; ++version) {
      REQUIRE_HERE(batch.recv().wait() == version && tensor[kChanged] == static_cast<float>(version + kChanged));
      first_has_it_.raise();
    }
    return 0;
  }
  int receive_second(Batch& batch, std::vector<float>& tensor) {
    int noticed = 0;
    for (int version = 1; version <= kSampledVersions; ++version) {
      changed_.wait();
      const std::string error = error_of([&] { batch.recv().wait(); });
      REQUIRE_HERE(batch.torn() ? error.find("digest of tensor weight") != std::string::npos
                                : batch.version() == version && tensor[kChanged] == -1);
      noticed += batch.torn();
    }
    std::fprintf(stderr, "%d noticed\n", noticed);
    return 0;
  }

  Signal first_has_it_;
  Signal changed_;
};

TEST_F(ChangedSampled, MemoryIsNoticedInVersionsThatHaveItsBlockInTheirSample) {
  start_all();
  expect_all_well();
  int noticed = 0;
  ASSERT_EQ(std::sscanf(of("inference/1").output.c_str(), "%d noticed", &noticed), 1) << of("inference/1").output;
  EXPECT_THAT(noticed, AllOf(Gt(0), Lt(60)));  // 12.5 are expected
  EXPECT_EQ(of("trainer/0").output, of("inference/1").output);
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
// The sums of what the processes of a job have reported, line by line.
std::vector<Digest> totals(const std::vector<Outcome>& outcomes, const std::string& job) {
  std::vector<Digest> sums;
  for (const Outcome& outcome : outcomes) {
    if (!outcome.name.starts_with(job)) continue;
    std::istringstream lines(outcome.output);
    size_t place = 0;
    for (std::string line; std::getline(lines, line); ++place) {
      Digest part;
      const int fields =
          std::sscanf(line.c_str(), "%" SCNx64 " %" SCNx64 " %" SCNu64, &part.d[0], &part.d[1], &part.elements);
      EXPECT_EQ(fields, 3) << line;
      if (place == sums.size()) sums.emplace_back();
      sums[place] += part;
    }
  }
  return sums;
}

using DigestSums = JobsTest;

TEST_F(DigestSums, AddUpToThoseOfTheWholeTensorOnBothSides) {
  std::vector<float> whole(64 * 48);
  std::iota(whole.begin(), whole.end(), 1.0f);
  start("whole", [&] {
    Digest digest;
    digest_bytes(digest, 0, reinterpret_cast<const std::byte*>(whole.data()), whole.size() * sizeof(float));
    return tell(digest.d[0], digest.d[1], static_cast<int64_t>(whole.size()));
  });
  for (Rank rank = 0; rank < 2; ++rank) {
    start(trainer(rank), [&](Batch& batch, std::vector<float>& tensor) {
      std::copy_n(whole.begin() + ptrdiff_t{rank} * 32 * 48, 32 * 48, tensor.begin());
      batch.send().wait();
      return tell_digest_of(batch);
    });
    start(inference(rank), [&](Batch& batch, std::vector<float>&) {
      batch.recv().wait();
      return tell_digest_of(batch);
    });
  }
  const std::vector<Outcome> outcomes = wait();
  expect_all_well();
  EXPECT_EQ(totals(outcomes, "trainer"), totals(outcomes, "whole"));
  EXPECT_EQ(totals(outcomes, "inference"), totals(outcomes, "whole"));
}

class SampledSums : public DigestSums, public testing::WithParamInterface<const char*> {};

// Both ranks of the trainer have a part of the first block, which is all that the tensor has; in the inference job it
// is cut into pieces of 96 bytes.
TEST_P(SampledSums, AreOfTheSameBlockOnBothSidesAndEachVersionChoosesIt) {
  std::vector<float> whole(64 * 48);
  std::iota(whole.begin(), whole.end(), 1.0f);
  for (Rank rank = 0; rank < 2; ++rank) {
    Side from = trainer(rank);
    from.digest = DigestMode::kSampled;
    start(from, [&, rank](Batch& batch, std::vector<float>& tensor) {
      std::copy_n(whole.begin() + ptrdiff_t{rank} * 32 * 48, 32 * 48, tensor.begin());
      for (int version = 1; version <= kSampledVersions; ++version) {
        batch.send().wait();
        if (tell_digest_of(batch) != 0) return 1;
      }
      return 0;
    });
    start("inference/" + std::to_string(rank), [this, rank] {
      ::setenv("TESSERA_FORCE_PULL", GetParam(), 1);
      return with_batch(inference(rank), store_, [](Batch& batch, std::vector<float>&) {
        for (int version = 1; version <= kSampledVersions; ++version) {
          batch.recv().wait();
          if (tell_digest_of(batch) != 0) return 1;
        }
        return 0;
      });
    });
  }
  const std::vector<Outcome> outcomes = wait();
  expect_all_well();
  std::vector<Digest> possible(2, Digest{.elements = whole.size()});
  digest_bytes(possible[0], 0, reinterpret_cast<const std::byte*>(whole.data()), whole.size() * sizeof(float));
  const std::vector<Digest> sent = totals(outcomes, "trainer");
  EXPECT_EQ(sent.size(), size_t{kSampledVersions});
  EXPECT_EQ(sent, totals(outcomes, "inference"));
  for (const Digest& digest : sent) EXPECT_THAT(possible, Contains(digest));
  for (const Digest& digest : possible) EXPECT_THAT(sent, Contains(digest));
}

INSTANTIATE_TEST_SUITE_P(Paths, SampledSums, testing::Values("readv", "stream"),
                         [](const auto& path) { return std::string(path.param); });

}  // namespace
}  // namespace tessera::test
