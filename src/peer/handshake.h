// How a connection between two agents begins and ends (docs/formats/bus-protocol.md). The side that calls says Hello,
// is answered Welcome (or Reject), and says Attach: which batch of which pair, and what for. Either side ends with
// Detach; Broken passes on that a third rank was lost.
#pragma once

#include <cstdint>
#include <string>

#include "base/process.h"
#include "peer/message.h"
#include "tessera/error.h"
#include "tessera/layout.h"

namespace tessera {

inline constexpr uint32_t kMaxHelloBytes = 4096;

enum class HandshakeMessage : uint16_t {
  kHello = 1,
  kWelcome = 2,
  kReject = 3,
  kAttach = 4,
  kDetach = 18,
  kBroken = 19,
};

// Who is calling, and which protocol versions it speaks. The range and the release stay where they are in every
// version; without a common one nothing else is read.
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
  void write(ByteWriter& out) const;
  static Hello read(ByteReader& in);
};

struct Welcome {
  static constexpr auto kType = HandshakeMessage::kWelcome;
  uint16_t protocol = 0;  // the highest both speak
  std::string release;
  std::string job;
  Rank rank = 0;
  Incarnation incarnation;
  void write(ByteWriter& out) const;
  static Welcome read(ByteReader& in);
};

// Ends a connection with a reason that the other end reports. Longer texts are cut: it fits wherever a Hello does.
struct Reject {
  static constexpr auto kType = HandshakeMessage::kReject;
  ErrorCode code = ErrorCode::kInternal;
  std::string text;
  void write(ByteWriter& out) const;
  static Reject read(ByteReader& in);
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
  std::string session;  // which registrations the caller has read: both must have planned the same
  void write(ByteWriter& out) const;
  static Attach read(ByteReader& in);
};

struct Detach {
  static constexpr auto kType = HandshakeMessage::kDetach;
  Status status;  // why, if it is not simply over
  // What the one who is told says of it: `name` is the rank that detached.
  Status reason(const std::string& name) const;
  void write(ByteWriter& out) const;
  static Detach read(ByteReader& in);
};

struct Broken {
  static constexpr auto kType = HandshakeMessage::kBroken;
  Status status;
  void write(ByteWriter& out) const;
  static Broken read(ByteReader& in);
};

using HandshakeMessages = MessageList<Hello, Welcome, Reject, Attach, Detach, Broken>;

}  // namespace tessera
