// Properties that hold for every message (base/fields.h).
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <span>
#include <vector>

#include "base/field_drawer.h"
#include "base/fields.h"

namespace tessera {

// It reads back as it was written, is refused if a byte is missing, and can be printed. With a byte too many it is
// refused unless `open_ended`.
template <typename Message>
void expect_exact(const Message& message, bool open_ended = false) {
  std::vector<std::byte> bytes = message_bytes(message);
  SCOPED_TRACE(message_text(message));
  EXPECT_EQ(message_bytes(read_message<Message>(bytes, "message")), bytes);
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(read_message<Message>(std::span(bytes).first(size), "message"), Error) << "cut at " << size;
  bytes.push_back(std::byte{0});
  if (!open_ended) {
    EXPECT_THROW(read_message<Message>(bytes, "message"), Error);
  }
}

// Many random values read back, and random bytes are either refused or a message.
template <typename Message>
void expect_fields_hold(bool open_ended = false) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 100; ++i) expect_exact(draw_message<Message>(random), open_ended);
  for (int i = 0; i < 2'000; ++i) {
    std::vector<std::byte> bytes(random() % 64);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() % 4 == 0 ? random() : 0);
    try {
      (void)message_text(read_message<Message>(bytes, "noise"));
    } catch (const Error&) {
    }
  }
}

}  // namespace tessera
