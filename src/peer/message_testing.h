// For tests of messages.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <span>
#include <vector>

#include "peer/message.h"

namespace tessera {

template <typename Message>
std::vector<std::byte> bytes_of_message(const Message& message) {
  ByteWriter out;
  message.write(out);
  return out.take();
}

// Every proper prefix and every message with a byte too many is refused.
template <typename Message>
void expect_exact(const Message& message) {
  std::vector<std::byte> bytes = bytes_of_message(message);
  EXPECT_EQ(bytes_of_message(parse<Message>(bytes)), bytes);
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(parse<Message>(std::span(bytes).first(size)), Error) << kNameOf<Message::kType> << " cut at " << size;
  bytes.push_back(std::byte{0});
  EXPECT_THROW(parse<Message>(bytes), Error);
}

// Random bytes are refused, or are a message.
template <typename Messages>
void expect_no_more_than_errors() {
  std::mt19937_64 random(5);
  for (int i = 0; i < 20'000; ++i) {
    std::vector<std::byte> bytes(random() % 64);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() % 4 == 0 ? random() : 0);
    Messages::each([&]<typename Message>() {
      try {
        (void)parse<Message>(bytes);
      } catch (const Error&) {
      }
    });
  }
}

}  // namespace tessera
