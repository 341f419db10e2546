// Peers that have registered but cannot be connected to. The receiver says why the two are not on one host, and what to
// do. The tests forge the sender's records.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing.h"
#include "bus/registration/local_tensors.h"
#include "bus/registration/records.h"
#include "tessera/store.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class Reach : public JobsTest {
 protected:
  // Starts a sender that registers a forged record and does nothing else. Returns how the receiver ends.
  Outcome receive_from(const std::function<void(bus::RankRecord&)>& forge) {
    const Signal over;
    start("trainer/0", [&] {
      const Side side = trainer(0, 1);
      bus::RankRecord record{
          .incarnation = Incarnation::self(), .world = 1, .address = "", .release = "test", .worker = {}};
      forge(record);
      const bus::Registration of{.incarnation = record.incarnation, .attempt = 1};
      std::vector<float> tensor = local_tensor(side);
      const TensorSpec spec = spec_of(side, tensor.data());
      const bus::Manifest manifest =
          bus::manifest_of({.name_space = "default", .job = side.job, .rank = 0, .world = 1}, {&spec, 1});
      const auto store = open_store(store_);
      const std::string meeting = bus::meeting_prefix("default", "weights", "policy", side.job, side.peer);
      store->put(bus::pair_key("default", "weights", side.job, 0),
                 bus::write_record(bus::PairRecord{.rank = record, .peers = {side.peer}}));
      store->put(bus::manifest_key(meeting, side.job), bus::write_manifest(of, manifest));
      store->put(bus::batch_key(meeting, side.job, 0), bus::write_record(bus::BatchRecord{.of = of,
                                                                                          .sends = true,
                                                                                          .digest = true,
                                                                                          .version = 0,
                                                                                          .newest = 0,
                                                                                          .hash = manifest.hash(),
                                                                                          .diff = {}}));
      over.wait();
      return 0;
    });
    const pid_t receiver = start(inference(0, 1), receive_once);
    const Outcome outcome = of(receiver);
    over.raise();
    expect_all_well();
    return outcome;
  }
};

TEST_F(Reach, APeerWithAnotherBootIdIsOnAnotherHost) {
  const Outcome outcome = receive_from([](bus::RankRecord& record) {
    record.incarnation.boot_id = "another host's";
    record.address = "/tmp/tessera-0/p-0123456789abcdef/agent";
  });
  EXPECT_EQ(outcome.status, status_of(ErrorCode::kUnavailable)) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("trainer/0 runs on another host (their boot ids differ)"));
}

TEST_F(Reach, ALivingPeerWhoseRuntimeFolderIsNotHereNamesTheVariable) {
  const Outcome outcome = receive_from(
      [this](bus::RankRecord& record) { record.address = group_.folder() + "/elsewhere/p-0123456789abcdef/agent"; });
  EXPECT_EQ(outcome.status, status_of(ErrorCode::kUnavailable)) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("trainer/0 runs on this host, but its socket does not open"),
                                    HasSubstr("elsewhere"), HasSubstr("TESSERA_RUNTIME_DIR")));
}

// The folder has the same path, but in another container.
TEST_F(Reach, APeerOfAnotherPidNamespaceNamesTheVariableToo) {
  const Outcome outcome = receive_from([this](bus::RankRecord& record) {
    record.incarnation.pid_namespace += 1;
    record.address = group_.folder() + "/run/p-0123456789abcdef/agent";
  });
  EXPECT_EQ(outcome.status, status_of(ErrorCode::kUnavailable)) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("its socket does not open"), HasSubstr("TESSERA_RUNTIME_DIR")));
}

// A peer does so that has closed its bus in the meantime.
TEST_F(Reach, APeerThatHasTakenItsFolderAwayIsLost) {
  const Outcome outcome = receive_from(
      [this](bus::RankRecord& record) { record.address = group_.folder() + "/run/p-0123456789abcdef/agent"; });
  EXPECT_EQ(outcome.status, kPeerLost) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("cannot reach trainer/0"));
}

}  // namespace
}  // namespace tessera::test
