#include "bus/daemon/messages.h"

#include <gtest/gtest.h>

#include "base/fields_testing.h"

namespace tessera::bus {
namespace {

template <typename... Messages>
void expect_each_holds() {
  (expect_fields_hold<Messages>(), ...);
}

TEST(AgentMessages, ComeBackAsTheyAreDrawn) {
  expect_fields_hold<OpenSession>(true);  // a later version may have more
  expect_each_holds<SessionOpened, CallFailed, PairCall, Paired, ManifestCall, Offered, AllGatherCall, Gathered,
                    GiveUpCall, Arenas, RegisterCall, Registered, ObjectCall, Number, DigestList, WaitPeersCall,
                    PeerList, BatchClosed>();
}

TEST(AgentCommands, ComeBackAsTheyAreDrawn) {
  expect_each_holds<TransferCommand, CommandId, OperationState, BatchNumber, BatchState, BatchFigures>();
}

}  // namespace
}  // namespace tessera::bus
