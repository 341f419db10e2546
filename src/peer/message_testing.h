// Checks that every message of a conversation must pass.
#pragma once

#include <gtest/gtest.h>

#include "base/fields_testing.h"
#include "peer/handshake.h"
#include "peer/message.h"

namespace tessera {

template <typename Messages>
void expect_conversation_holds() {
  Messages::each([]<typename Message>() {
    SCOPED_TRACE(kNameOf<Message::kType>);
    expect_fields_hold<Message>(std::same_as<Message, Hello>);  // a later version may have more fields
  });
}

}  // namespace tessera
