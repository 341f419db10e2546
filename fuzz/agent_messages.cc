#include "fuzz/agent_messages.h"

#include "base/message.h"
#include "bus/daemon/messages.h"
#include "fuzz/frames.h"

namespace tessera::fuzz {
namespace {

using namespace bus;

template <typename Message>
void check_call(std::span<const std::byte> payload) {
  const auto read = [](std::span<const std::byte> bytes) { return read_message<Message>(bytes, "message"); };
  const Message message = read(payload);
  TESSERA_CHECK(!message_text(message).empty());
  expect_round_trip(message, read, [](const Message& one) { return message_bytes(one); });
}

struct Empty {
  static void fields(auto&, auto&) {}
};

void check_frame(const Frame& frame) {
  switch (static_cast<AgentMessage>(frame.type)) {  // no default: the compiler names a type that is missing
    case AgentMessage::kOpen:
      return check_call<OpenSession>(frame.payload);
    case AgentMessage::kOpened:
      return check_call<SessionOpened>(frame.payload);
    case AgentMessage::kFailed:
      return check_call<CallFailed>(frame.payload);
    case AgentMessage::kStop:
    case AgentMessage::kClose:
    case AgentMessage::kClosed:
    case AgentMessage::kInterrupt:
      return check_call<Empty>(frame.payload);
    case AgentMessage::kPair:
      return check_call<PairCall>(frame.payload);
    case AgentMessage::kPaired:
      return check_call<Paired>(frame.payload);
    case AgentMessage::kManifest:
      return check_call<ManifestCall>(frame.payload);
    case AgentMessage::kOffered:
      return check_call<Offered>(frame.payload);
    case AgentMessage::kAllGather:
      return check_call<AllGatherCall>(frame.payload);
    case AgentMessage::kGathered:
      return check_call<Gathered>(frame.payload);
    case AgentMessage::kGiveUp:
      return check_call<GiveUpCall>(frame.payload);
    case AgentMessage::kArenas:
      return check_call<Arenas>(frame.payload);
    case AgentMessage::kRegister:
      return check_call<RegisterCall>(frame.payload);
    case AgentMessage::kRegistered:
      return check_call<Registered>(frame.payload);
    case AgentMessage::kCommit:
    case AgentMessage::kWaitVersion:
    case AgentMessage::kWithdraw:
    case AgentMessage::kDigests:
    case AgentMessage::kPeers:
    case AgentMessage::kCloseBatch:
    case AgentMessage::kClosePair:
      return check_call<ObjectCall>(frame.payload);
    case AgentMessage::kNumber:
      return check_call<Number>(frame.payload);
    case AgentMessage::kBatchClosed:
      return check_call<BatchClosed>(frame.payload);
    case AgentMessage::kDigestList:
      return check_call<DigestList>(frame.payload);
    case AgentMessage::kWaitPeers:
      return check_call<WaitPeersCall>(frame.payload);
    case AgentMessage::kPeerList:
      return check_call<PeerList>(frame.payload);
  }
  fail(ErrorCode::kInvalidArgument, "no such type"_message);
}

}  // namespace

void read_agent_frames(Input stream) {
  read_frames(stream, kAgentMagic, {.payload_bytes = kMaxAgentFrame, .fds = 1}, check_frame);
}

void read_agent_command(ByteReader& in) {
  const auto type = static_cast<AgentCommand>(in.get<uint16_t>());
  const bool result = in.get_bool();
  switch (type) {
    case AgentCommand::kSend:
    case AgentCommand::kRecv:
    case AgentCommand::kStage:
      return result ? check_call<OperationState>(in.rest()) : check_call<TransferCommand>(in.rest());
    case AgentCommand::kCancel:
      return result ? check_call<Number>(in.rest()) : check_call<CommandId>(in.rest());
    case AgentCommand::kProgress:
      return result ? check_call<OperationState>(in.rest()) : check_call<CommandId>(in.rest());
    case AgentCommand::kState:
      return result ? check_call<BatchState>(in.rest()) : check_call<BatchNumber>(in.rest());
    case AgentCommand::kStats:
      return result ? check_call<BatchFigures>(in.rest()) : check_call<BatchNumber>(in.rest());
  }
  fail(ErrorCode::kInvalidArgument, "no such command"_message);
}

}  // namespace tessera::fuzz
