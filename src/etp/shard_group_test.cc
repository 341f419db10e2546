#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stop_token>

#include "base/fields.h"
#include "base/testing.h"
#include "base/thread.h"
#include "collective/group_testing.h"
#include "collective/messages.h"
#include "tessera/etp.h"
#include "tessera/store.h"

namespace tessera::etp {
namespace {

using testing::HasSubstr;

// Rank 1 gives its blob to the store, and then never connects.
TEST(GroupsOverAStore, EndAtAStopWhileTheyWaitForConnections) {
  const collective::TestRuntimeFolder folder;
  const auto server = serve_store("tcp://127.0.0.1:0");
  const auto store = open_store(server->address());
  std::stop_source stop;
  std::thread other = start_thread("rank 1", [&] {
    const auto has_own = [](const StoreView& keys) { return keys.contains("job/0/0"); };
    const StoreView keys = store->wait_for("job/0/", has_own, std::chrono::minutes(1));
    auto blob = read_message<collective::Bootstrap>(std::as_bytes(std::span(keys.at("job/0/0").value)), "own");
    blob.rank = 1;
    blob.key += 2;
    blob.socket += "-of-nobody";
    store->put("job/0/1", as_store_value(message_bytes(blob)));
    stop.request_stop();
  });
  EXPECT_THAT(error_of([&] {
                ShardGroup::over_store(*store, "job", 0, 2, {.name = "job", .timeout = std::chrono::minutes(1)},
                                       stop.get_token());
              }),
              HasSubstr("cancelled: "));
  other.join();
}

}  // namespace
}  // namespace tessera::etp
