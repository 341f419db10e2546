// How a connection between two agents begins and ends, and the links over it (docs/formats/bus-protocol.md). The side
// that dials sends Hello; the answer is Welcome or Reject. Then either side opens links, each on a separate stream,
// with Attach, which names the batch, its pair and the purpose. Either side ends a link with Detach, Reject or Closed.
// Broken passes on that a third rank was lost. The dialer sends Goodbye when it has no link left.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/message.h"
#include "base/process.h"
#include "peer/message.h"
#include "tessera/error.h"
#include "tessera/layout.h"

namespace tessera {

inline constexpr uint32_t kMaxHelloBytes = 4096;
inline constexpr uint32_t kMaxReleaseBytes = 64;
inline constexpr uint32_t kMaxNameSpaceBytes = 256;
inline constexpr uint32_t kMaxJobBytes = 64;

enum class HandshakeMessage : uint16_t {
  kHello = 1,
  kWelcome = 2,
  kReject = 3,
  kAttach = 4,
  kDetach = 18,
  kBroken = 19,
  kClosed = 41,
  kGoodbye = 42,
  kPing = 44,
  kPong = 45,
};

// Who is calling, and which protocol versions it speaks. The range and the release have the same place in every
// version. The rest is read only if there is a common version.
struct Hello {
  static constexpr auto kType = HandshakeMessage::kHello;
  uint16_t protocol_min = 0;
  uint16_t protocol_max = 0;
  std::string release;
  std::string name_space;
  std::string job;
  Rank rank = 0;
  Incarnation incarnation;
  bool speaks_ours() const { return protocol_max >= kProtocolMin && protocol_min <= kProtocolMax; }
  static void fields(auto& f, auto& self) {
    f("protocol_min", self.protocol_min);
    f("protocol_max", self.protocol_max);
    f("release", self.release, kMaxReleaseBytes);
    if (self.speaks_ours()) {  // otherwise the rest may have another format
      f("name_space", self.name_space, kMaxNameSpaceBytes);
      f("job", self.job, kMaxJobBytes);
      f("rank", self.rank);
      f("incarnation", self.incarnation);
    }
    f.end_of_this_version();
  }
};

// The payload of a Hello's frame: the message, then a check, which readers of protocol 4 ignore.
std::vector<std::byte> hello_payload(const Hello& hello);
// `version` is the frame's, which is the highest that the sender speaks. Throws kUnavailable if the Hello was changed
// on its way.
void require_unchanged_hello(uint16_t version, std::span<const std::byte> payload);

// The payload of a message's frame.
template <typename Message>
std::vector<std::byte> payload_of(const Message& message) {
  if constexpr (std::same_as<Message, Hello>)
    return hello_payload(message);
  else
    return message_bytes(message);
}

struct Welcome {
  static constexpr auto kType = HandshakeMessage::kWelcome;
  uint16_t protocol = 0;  // the highest that both speak
  std::string release;
  std::string job;
  Rank rank = 0;
  Incarnation incarnation;
  static void fields(auto& f, auto& self) {
    f("protocol", self.protocol);
    f("release", self.release, kMaxReleaseBytes);
    f("job", self.job, kMaxJobBytes);
    f("rank", self.rank);
    f("incarnation", self.incarnation);
  }
};

// Ends a link, or on stream 0 the connection, with a reason that the other end reports. Longer texts are cut, so that
// it fits wherever a Hello does.
struct Reject {
  static constexpr auto kType = HandshakeMessage::kReject;
  ErrorCode code = ErrorCode::kInternal;
  std::string text;
  static void fields(auto& f, auto& self) {
    error_code_field(f, self.code);
    f.cut("text", self.text, 2 << 10);
    f.require(self.code != ErrorCode::kOk, "Reject: without an error"_message);
  }
};

struct Attach {
  static constexpr auto kType = HandshakeMessage::kAttach;
  enum class Purpose : uint8_t {
    kPull,     // a receiver, to a sender
    kReduce,   // the owner of a reduction, to a peer of its own job
    kControl,  // a receiver, to its own rank 0
    kAgree,    // a sender that quantises, to its own rank 0
  };
  std::string pair;
  std::string batch;
  Purpose purpose = Purpose::kPull;
  std::string session;  // says which registrations the caller has read: both sides must have planned the same
  static void fields(auto& f, auto& self) {
    f("pair", self.pair, 64);
    f("batch", self.batch, 64);
    f("purpose", self.purpose, Purpose::kAgree);
    f("session", self.session, 16);
  }
};

struct Detach {
  static constexpr auto kType = HandshakeMessage::kDetach;
  Status status;  // why it ends; ok if the batch was closed normally
  // The error that its receiver reports. `name` is the rank that detached.
  Status reason(const std::string& name) const;
  static void fields(auto& f, auto& self) { heard_status_field(f, self.status); }
};

struct Broken {
  static constexpr auto kType = HandshakeMessage::kBroken;
  Status status;
  static void fields(auto& f, auto& self) {
    heard_status_field(f, self.status);
    f.require(!self.status.ok(), "Broken: without an error"_message);
  }
};

// A link is closed without a reason.
struct Closed {
  static constexpr auto kType = HandshakeMessage::kClosed;
  static void fields(auto&, auto&) {}
};

// The dialer has no link left, and opens no further one. The other side then closes the socket, unless it has a link.
struct Goodbye {
  static constexpr auto kType = HandshakeMessage::kGoodbye;
  static void fields(auto&, auto&) {}
};

// On stream 0. Either side sends a Ping some time after it has sent something. The other side answers each Ping with a
// Pong of the same number. Its answer to anything that was sent before a Ping comes before the Pong.
template <HandshakeMessage type>
struct Beat {
  static constexpr auto kType = type;
  uint32_t number = 0;  // each side counts its Pings from 1
  static void fields(auto& f, auto& self) { f("number", self.number); }
};
using Ping = Beat<HandshakeMessage::kPing>;
using Pong = Beat<HandshakeMessage::kPong>;

using HandshakeMessages = MessageList<Hello, Welcome, Reject, Attach, Detach, Broken, Closed, Goodbye, Ping, Pong>;

}  // namespace tessera
