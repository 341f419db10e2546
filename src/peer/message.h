// What all messages between agents have in common. A message is a struct with fields() (base/fields.h) whose kType
// is of its conversation's enum; frames carry that number, of which no two conversations have the same.
//
// A link is opened by the side that pulls: a receiver to each sender, the owner of a reduction to each of its peers, a
// receiver to its own rank 0, a sender that quantises to its own. All links between two agents share a connection
// (peer_connection.h). Conversations: peer/handshake.h, then peer/exchange/messages.h, then one of
// bus/session/versions.h and bus/prepare/amax_messages.h. Others have sockets of their own: peer/report.h,
// bus/lending/messages.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "base/fields.h"
#include "tessera/error.h"

namespace tessera {

inline constexpr uint32_t kBusMagic = 0x42535354;  // "TSSB"
// Protocol versions that this release speaks: two jobs may run different releases.
inline constexpr uint16_t kProtocolMin = 5;
inline constexpr uint16_t kProtocolMax = 5;
inline constexpr uint32_t kMaxMessageBytes = 256u << 20;

// What a frame with that message says its type is.
template <typename Message>
inline constexpr uint16_t kCode = static_cast<uint16_t>(Message::kType);

// The messages of a conversation.
template <typename... Messages>
struct MessageList {
  static constexpr size_t kCount = sizeof...(Messages);
  template <typename Visit>
  static void each(const Visit& visit) {
    (visit.template operator()<Messages>(), ...);
  }
  // Calls visit.operator()<Message>() for the message that a frame with that type holds; false if there is none.
  template <typename Visit>
  static bool visit(uint16_t type, const Visit& visit) {
    return ((kCode<Messages> == type && (visit.template operator()<Messages>(), true)) || ...);
  }
};

// What another rank says of a transfer. That it was cancelled is that rank's affair: to this one it is lost
// (kPeerLost).
template <typename Fields, typename State>
void heard_status_field(Fields& f, State& status) {
  status_field(f, status);
  if constexpr (kFills<Fields>)
    if (status.code() == ErrorCode::kCancelled) status = Status(ErrorCode::kPeerLost, status.message());
}

// A whole message out of a frame's payload; throws if anything is left over. `into` may bring memory for it.
template <typename Message>
Message parse(std::span<const std::byte> payload, Message into = {}) {
  read_message(payload, kNameOf<Message::kType>, into);
  return into;
}

}  // namespace tessera
