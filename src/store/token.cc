#include "store/token.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <string_view>

#include "base/bytes.h"
#include "base/fail.h"

namespace tessera::store {
namespace {

constexpr std::string_view label_of(Side side) {
  return side == Side::kClient ? "tessera store client" : "tessera store server";
}

}  // namespace

Nonce random_nonce() {
  Nonce nonce;
  if (::RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size())) != 1)
    fail_internal("OpenSSL has no random bytes");
  return nonce;
}

Token Token::random() {
  std::string secret;
  for (const std::byte byte : random_nonce()) secret += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return {std::move(secret), "a random token"};
}

Token::Token(std::string secret, std::string source) : secret_(std::move(secret)), source_(std::move(source)) {
  if (secret_.size() < kMinBytes || secret_.size() > kMaxBytes)
    fail(ErrorCode::kInvalidArgument,
         "the token from {} has {} bytes, it must have {} to {}: `openssl rand -hex 16` makes one"_message, source_,
         secret_.size(), kMinBytes, kMaxBytes);
}

Token::~Token() {
  ::OPENSSL_cleanse(secret_.data(), secret_.size());
}

Proof Token::prove(Side side, const Handshake& handshake) const {
  ByteWriter input;
  input.put_string(label_of(side));
  input.put(handshake.version);
  input.put_bytes(handshake.client);
  input.put_bytes(handshake.server);
  Proof proof;
  unsigned size = 0;
  const auto* message = reinterpret_cast<const unsigned char*>(input.view().data());
  const auto* made = ::HMAC(::EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()), message, input.size(),
                            reinterpret_cast<unsigned char*>(proof.data()), &size);
  TESSERA_CHECK(made != nullptr && size == proof.size());
  return proof;
}

bool Token::proves(Side side, const Handshake& handshake, const Proof& proof) const {
  const Proof right = prove(side, handshake);
  return ::CRYPTO_memcmp(right.data(), proof.data(), right.size()) == 0;
}

}  // namespace tessera::store
