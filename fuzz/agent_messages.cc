#include "fuzz/agent_messages.h"

#include "bus/agent_protocol.h"
#include "fuzz/frames.h"

namespace tessera::fuzz {
namespace {

using namespace bus;

template <typename Message>
void check(std::span<const std::byte> payload) {
  const auto read = [](std::span<const std::byte> bytes) { return read_message<Message>(bytes, "message"); };
  expect_round_trip(read(payload), read, [](const Message& message) { return message_bytes(message); });
}

struct Empty {
  static Empty read(ByteReader&) { return {}; }
  void write(ByteWriter&) const {}
};
struct Stats {
  BatchStats stats;
  static Stats read(ByteReader& in) { return {read_stats(in)}; }
  void write(ByteWriter& out) const { write_stats(stats, out); }
};

void check_frame(const Frame& frame) {
  switch (static_cast<AgentMessage>(frame.type)) {  // no default: the compiler names a type that is missing
    case AgentMessage::kOpen:
      return check<OpenSession>(frame.payload);
    case AgentMessage::kOpened:
      return check<SessionOpened>(frame.payload);
    case AgentMessage::kFailed:
      return check<CallFailed>(frame.payload);
    case AgentMessage::kStop:
    case AgentMessage::kClose:
    case AgentMessage::kClosed:
      return check<Empty>(frame.payload);
    case AgentMessage::kPair:
      return check<PairCall>(frame.payload);
    case AgentMessage::kPaired:
      return check<Paired>(frame.payload);
    case AgentMessage::kManifest:
      return check<ManifestCall>(frame.payload);
    case AgentMessage::kOffered:
      return check<Offered>(frame.payload);
    case AgentMessage::kAllGather:
      return check<AllGatherCall>(frame.payload);
    case AgentMessage::kGathered:
      return check<Gathered>(frame.payload);
    case AgentMessage::kArenas:
      return check<Arenas>(frame.payload);
    case AgentMessage::kRegister:
      return check<RegisterCall>(frame.payload);
    case AgentMessage::kRegistered:
      return check<Registered>(frame.payload);
    case AgentMessage::kCommit:
    case AgentMessage::kWaitVersion:
    case AgentMessage::kWithdraw:
    case AgentMessage::kDigests:
    case AgentMessage::kCloseBatch:
    case AgentMessage::kClosePair:
      return check<ObjectCall>(frame.payload);
    case AgentMessage::kNumber:
      return check<Number>(frame.payload);
    case AgentMessage::kDigestList:
      return check<DigestList>(frame.payload);
  }
  fail(ErrorCode::kInvalidArgument, "no such type");
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
      return result ? check<OperationState>(in.rest()) : check<TransferCommand>(in.rest());
    case AgentCommand::kCancel:
      return result ? check<Number>(in.rest()) : check<CommandId>(in.rest());
    case AgentCommand::kProgress:
      return result ? check<OperationState>(in.rest()) : check<CommandId>(in.rest());
    case AgentCommand::kState:
      return result ? check<BatchState>(in.rest()) : check<BatchNumber>(in.rest());
    case AgentCommand::kStats:
      return result ? check<Stats>(in.rest()) : check<BatchNumber>(in.rest());
  }
  fail(ErrorCode::kInvalidArgument, "no such command");
}

}  // namespace tessera::fuzz
