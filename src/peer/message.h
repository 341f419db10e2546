// What all messages between agents have in common. A message is a struct with write() and read() whose kType is of its
// conversation's enum; frames carry that number, of which no two conversations have the same. A reader checks
// everything against limits before it believes it.
//
// A connection is opened by the side that pulls: a receiver to each sender, the owner of a reduction to each of its
// peers, a receiver to its own rank 0, a sender that quantises to its own. Its conversations: peer/handshake.h, then
// peer/exchange/messages.h, then one of bus/session/versions.h and bus/prepare/amax_messages.h. Others have sockets of
// their own: peer/report.h, bus/lending/messages.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/enum_name.h"
#include "tessera/error.h"

namespace tessera {

inline constexpr uint32_t kBusMagic = 0x42535354;  // "TSSB"
// Protocol versions that this release speaks: two jobs may run different releases.
inline constexpr uint16_t kProtocolMin = 4;
inline constexpr uint16_t kProtocolMax = 4;
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

// An error code (u8) and a text, cut where it is long.
void write_status(const Status& status, ByteWriter& out);
Status read_status(ByteReader& in);
ErrorCode read_code(ByteReader& in);
// What another rank says of a transfer. That it was cancelled is that rank's affair: to this one it is lost
// (kPeerLost).
Status read_heard(ByteReader& in);

// An array whose elements travel as they lie in memory, at most `most` of them, into `room`.
template <typename T>
std::vector<T> read_array(ByteReader& in, std::string_view what, uint32_t most, std::vector<T> room = {}) {
  const std::span<const std::byte> bytes = in.get_bytes(most * static_cast<uint32_t>(sizeof(T)));
  if (bytes.size() % sizeof(T) != 0)
    fail(ErrorCode::kInvalidArgument, "{}: {} bytes are no whole number of elements", what, bytes.size());
  room.resize(bytes.size() / sizeof(T));
  std::ranges::copy(bytes, std::as_writable_bytes(std::span(room)).begin());
  return room;
}

// A whole message out of a frame's payload; throws if anything is left over. `more` is what its read() takes besides.
template <typename Message, typename... More>
Message parse(std::span<const std::byte> payload, More&&... more) {
  ByteReader in(payload, kNameOf<Message::kType>);
  Message message = Message::read(in, std::forward<More>(more)...);
  in.finish();
  return message;
}

}  // namespace tessera
