#include "bus/lending/messages.h"
#include "fuzz/frames.h"
#include "fuzz/targets.h"
#include "peer/messages.h"
#include "peer/report.h"

namespace tessera::fuzz {
namespace {

using namespace bus;

template <typename Message>
void check(std::span<const std::byte> payload) {
  const auto write = [](const Message& message) {
    ByteWriter out;
    message.write(out);
    return out.take();
  };
  const Message message = parse<Message>(payload);
  TESSERA_CHECK_LE(write(message).size(), payload.size());
  expect_round_trip(message, [](const auto& bytes) { return parse<Message>(bytes); }, write);
}

void check_message(const Frame& frame) {
  switch (static_cast<MessageType>(frame.type)) {  // no default: the compiler names a type that is missing
    case MessageType::kHello:
      return check<Hello>(frame.payload);
    case MessageType::kWelcome:
      return check<Welcome>(frame.payload);
    case MessageType::kReject:
      return check<Reject>(frame.payload);
    case MessageType::kAttach:
      return check<Attach>(frame.payload);
    case MessageType::kAttached:
      return check<Attached>(frame.payload);
    case MessageType::kPrepare:
      return check<Prepare>(frame.payload);
    case MessageType::kPrepared:
      return check<Prepared>(frame.payload);
    case MessageType::kOffer:
      return check<Offer>(frame.payload);
    case MessageType::kWithdraw:
      return check<Withdraw>(frame.payload);
    case MessageType::kTake:
      return check<Take>(frame.payload);
    case MessageType::kGrant:
      return check<Grant>(frame.payload);
    case MessageType::kRefuse:
      return check<Refuse>(frame.payload);
    case MessageType::kRevoke:
      return check<Revoke>(frame.payload);
    case MessageType::kDigests:
      return check<Digests>(frame.payload);
    case MessageType::kProgress:
      return check<ProgressReport>(frame.payload);
    case MessageType::kDone:
      return check<Done>(frame.payload);
    case MessageType::kChosen:
      return check<Chosen>(frame.payload);
    case MessageType::kDetach:
      return check<Detach>(frame.payload);
    case MessageType::kBroken:
      return check<Broken>(frame.payload);
    case MessageType::kHold:
      return check<Hold>(frame.payload);
    case MessageType::kHeld:
      return check<Held>(frame.payload);
    case MessageType::kRelease:
      return check<Release>(frame.payload);
    case MessageType::kGot:
      return check<Got>(frame.payload);
    case MessageType::kDecided:
      return check<Decided>(frame.payload);
    case MessageType::kInspect:
      return check<Inspect>(frame.payload);
    case MessageType::kReport:
      return check<Report>(frame.payload);
    case MessageType::kLendArenas:
      return check<LendArenas>(frame.payload);
    case MessageType::kMakeRun:
      return check<MakeRun>(frame.payload);
    case MessageType::kGiveRing:
      return check<GiveRing>(frame.payload);
    case MessageType::kStartRun:
      return check<StartRun>(frame.payload);
    case MessageType::kAbortRun:
      return check<AbortRun>(frame.payload);
    case MessageType::kDropRun:
      return check<DropRun>(frame.payload);
    case MessageType::kRunProgress:
      return check<RunProgress>(frame.payload);
    case MessageType::kRunEnded:
      return check<RunEnded>(frame.payload);
    case MessageType::kSync:
      return check<Sync>(frame.payload);
    case MessageType::kSynced:
      return check<Synced>(frame.payload);
    case MessageType::kJoins:
      return check<Joins>(frame.payload);
    case MessageType::kAmaxes:
      return check<Amaxes>(frame.payload);
    case MessageType::kAgreed:
      return check<Agreed>(frame.payload);
  }
  fail(ErrorCode::kInvalidArgument, "no such type");
}

}  // namespace

bool bus(Input input) {
  return accepts([&] { read_frames(input, kBusMagic, {.payload_bytes = kMaxMessageBytes, .fds = 1}, check_message); });
}

}  // namespace tessera::fuzz
