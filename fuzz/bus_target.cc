#include "base/message.h"
#include "bus/lending/messages.h"
#include "bus/prepare/amax_messages.h"
#include "bus/session/versions.h"
#include "fuzz/frames.h"
#include "fuzz/targets.h"
#include "peer/exchange/messages.h"
#include "peer/handshake.h"
#include "peer/report.h"

namespace tessera::fuzz {
namespace {

using namespace bus;

template <typename Message>
void check(std::span<const std::byte> payload) {
  const Message message = parse<Message>(payload);
  TESSERA_CHECK_LE(message_bytes(message).size(), payload.size());
  TESSERA_CHECK(!message_text(message).empty());
  expect_round_trip(
      message, [](const auto& bytes) { return parse<Message>(bytes); },
      [](const Message& one) { return message_bytes(one); });
}

// Counts the enumerators of each enum of message types, up to a number that none uses yet.
template <typename Enum, uint16_t type = 64>
consteval size_t enumerators() {
  if constexpr (type == 0)
    return 0;
  else
    return (kIsEnumerator<static_cast<Enum>(type)> ? 1 : 0) + enumerators<Enum, type - 1>();
}
static_assert(HandshakeMessages::kCount == enumerators<HandshakeMessage>());
static_assert(ExchangeMessages::kCount == enumerators<ExchangeMessage>());
static_assert(VersionMessages::kCount == enumerators<VersionMessage>());
static_assert(AmaxMessages::kCount == enumerators<AmaxMessage>());
static_assert(ReportMessages::kCount == enumerators<ReportMessage>());
static_assert(LendingMessages::kCount == enumerators<LendingMessage>());

template <typename... Conversations>
bool check_one_of(const Frame& frame) {
  return (Conversations::visit(frame.type, [&]<typename Message>() { check<Message>(frame.payload); }) || ...);
}

void check_message(const Frame& frame) {
  if (!check_one_of<HandshakeMessages, ExchangeMessages, VersionMessages, AmaxMessages, ReportMessages,
                    LendingMessages>(frame))
    fail(ErrorCode::kInvalidArgument, "no such type"_message);
}

}  // namespace

bool bus(Input input) {
  return accepts(
      [&] { read_frames(input, kBusMagic, {.payload_bytes = kMaxMessageBytes, .fds = 1}, check_message, true); });
}

}  // namespace tessera::fuzz
