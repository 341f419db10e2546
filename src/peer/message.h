// What all messages between agents have in common. A message is a struct with fields() (base/fields.h). Its kType is a
// value of its conversation's enum; frames carry that number, and no two conversations use the same one.
//
// The side that pulls opens a link: a receiver to each sender, the owner of a reduction to each of its peers, and both
// a receiver and a sender that quantises to rank 0 of their own job. All links between two agents share a connection
// (peer_connection.h). The conversations are peer/handshake.h, then peer/exchange/messages.h, then one of
// bus/session/versions.h and bus/prepare/amax_messages.h. Two others have separate sockets: peer/report.h and
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
inline constexpr uint16_t kProtocolMin = 6;
inline constexpr uint16_t kProtocolMax = 6;
inline constexpr uint32_t kMaxMessageBytes = 256u << 20;

// The type in the head of a frame that carries the message.
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

// The status of a transfer as another rank reports it. If that rank has cancelled the transfer, this rank sees it as
// lost (kPeerLost).
template <typename Fields, typename State>
void heard_status_field(Fields& f, State& status) {
  status_field(f, status);
  if constexpr (kFills<Fields>)
    if (status.code() == ErrorCode::kCancelled) status = Status(ErrorCode::kPeerLost, status.message());
}

// Reads a whole message from a frame's payload. Throws if anything is left over. `into` may bring memory for it.
template <typename Message>
Message parse(std::span<const std::byte> payload, Message into = {}) {
  read_message(payload, kNameOf<Message::kType>, into);
  return into;
}

}  // namespace tessera
