// The secret that a TCP store and its clients share, and how each side proves that it knows it.
//
// The token never crosses the wire. Both sides send a random nonce; then the client, and after it the server, sends
// HMAC-SHA256 (RFC 2104, FIPS 180-4; OpenSSL's) under the token over
//
//   label | u16 protocol version | the client's nonce | the server's nonce
//
// Each side has a different label, so that neither proof can be sent back as the other. What follows on the connection
// is neither encrypted nor signed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera::store {

using Nonce = std::array<std::byte, 32>;
using Proof = std::array<std::byte, 32>;

enum class Side : uint8_t { kClient, kServer };

struct Handshake {
  uint16_t version = 0;
  Nonce client{}, server{};
};

Nonce random_nonce();

// A value that wipes its memory in the end. It cannot be compared or printed.
class Token {
 public:
  static constexpr size_t kMinBytes = 16;
  static constexpr size_t kMaxBytes = 1024;

  static Token random();  // 256 bits, in hexadecimal
  // `source` is the origin of the secret, for messages: "TESSERA_TOKEN". Throws kInvalidArgument, which names the
  // source but not the secret, unless it has kMinBytes to kMaxBytes.
  Token(std::string secret, std::string source);
  ~Token();
  Token(const Token&) = default;
  Token& operator=(Token other) noexcept {
    secret_.swap(other.secret_);
    source_.swap(other.source_);
    return *this;
  }

  const std::string& secret() const { return secret_; }
  const std::string& source() const { return source_; }

  Proof prove(Side side, const Handshake& handshake) const;
  // Takes a time that does not depend on the proof.
  bool proves(Side side, const Handshake& handshake, const Proof& proof) const;

 private:
  std::string secret_;
  std::string source_;
};

}  // namespace tessera::store
