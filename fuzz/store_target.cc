#include "base/message.h"
#include "fuzz/frames.h"
#include "fuzz/targets.h"
#include "store/limits.h"
#include "store/protocol.h"
#include "store/service.h"

namespace tessera::fuzz {
namespace {

using namespace store;

template <typename Message>
void check_frame(const Frame& frame) {
  expect_round_trip(decode<Message>(frame.payload), decode<Message>, message_bytes<Message>);
}

// A server with one client, and a client with one server, that receive what the stream holds.
class Conversation {
 public:
  void take(const Frame& frame) {
    switch (static_cast<StoreMessage>(frame.type)) {  // no default: the compiler names a type that is missing
      case StoreMessage::kHello:
        return take_hello(frame);
      case StoreMessage::kRepublishLeases:
        return take_lease_terms(frame);
      case StoreMessage::kRepublishKeys:
        return take_keys(frame);
      case StoreMessage::kRepublishDone:
        return;
      case StoreMessage::kRequest:
        return take_request(frame);
      case StoreMessage::kWatch:
        return take_watch(frame);
      case StoreMessage::kUnwatch:
        return check_frame<WatchEnd>(frame);
      case StoreMessage::kKeepAlive:
      case StoreMessage::kLeasesLost:
        return check_frame<LeaseList>(frame);
      case StoreMessage::kWelcome:
        return check_frame<StoreWelcome>(frame);
      case StoreMessage::kRefused:
      case StoreMessage::kReply:
        return check_reply(frame);
      case StoreMessage::kEvents:
        return check_frame<WatchEvents>(frame);
      case StoreMessage::kCompacted:
        return check_frame<Compacted>(frame);
      case StoreMessage::kChallenge:
        return check_frame<Challenge>(frame);
      case StoreMessage::kProof:
        return check_frame<ProofAnswer>(frame);
    }
    fail(ErrorCode::kInvalidArgument, "no such type"_message);
  }

 private:
  void take_hello(const Frame& frame) {
    check_frame<StoreHello>(frame);
    const StoreHello hello = decode<StoreHello>(frame.payload);
    continue_from(hello.last_revision);
  }

  void continue_from(int64_t revision) {  // as Server does
    revision = std::min(revision, kMaxContinued);
    if (revision > state_.revision()) state_.raise_revision(revision);
  }

  void take_lease_terms(const Frame& frame) {
    check_frame<LeaseTermList>(frame);
    for (const LeaseTerm& term : decode<LeaseTermList>(frame.payload).terms)
      state_.grant(term.lease, term.ttl, clock_.now());
  }

  void take_keys(const Frame& frame) {
    check_frame<KeyList>(frame);
    for (const KeyValue& kv : decode<KeyList>(frame.payload).keys) {
      continue_from(kv.mod_revision);
      accepts([&] { state_.restore(kv, kv.version % 2 == 0); });
    }
    TESSERA_CHECK_LE(state_.revision(), kMaxRevision);
  }

  // Every request is answered, and a client can read the answer.
  void take_request(const Frame& frame) {
    check_frame<Request>(frame);
    const Request request = decode<Request>(frame.payload);
    const std::vector<std::byte> answer = service_.answer(request);
    ByteReader in(answer, "reply");
    const auto head = read_fields<ReplyHead>(in);
    TESSERA_CHECK_EQ(head.request, request.id);
    if (!head.status.ok()) return in.finish();
    switch (request.op) {
      case Op::kRange: {
        const auto reply = read_fields<RangeReply>(in);
        for (const KeyValue& kv : reply.keys) TESSERA_CHECK_LE(kv.mod_revision, reply.revision);
        break;
      }
      case Op::kErase:
        TESSERA_CHECK(read_fields<EraseReply>(in).count >= 0);
        break;
      case Op::kTransact:
        read_fields<TransactReply>(in);
        break;
      case Op::kGrant:
      case Op::kRevoke:
        break;
    }
    TESSERA_CHECK_EQ(in.left(), size_t{0});
    clock_.advance(std::chrono::milliseconds(1));
    state_.expire(clock_.now());
  }

  void take_watch(const Frame& frame) {
    check_frame<WatchStart>(frame);
    const WatchStart start = decode<WatchStart>(frame.payload);
    if (start.from <= state_.compacted()) return;
    for (const Event& event : state_.events_from(start.from, start.prefix)) {
      TESSERA_CHECK_LE(start.from, event.revision());
      TESSERA_CHECK(event.kv->key.starts_with(start.prefix));
    }
  }

  static void check_reply(const Frame& frame) {
    ByteReader in(frame.payload, "reply");
    const auto head = read_fields<ReplyHead>(in);
    if (!head.status.ok()) {
      in.finish();
      TESSERA_CHECK(message_bytes(head) == frame.payload);
      return;
    }
    const std::span<const std::byte> rest = in.rest();
    ByteReader transact(rest, "reply"), range(rest, "reply");
    accepts([&] { read_fields<TransactReply>(transact); });
    read_fields<RangeReply>(range);
    range.finish();
  }

  FakeClock clock_;
  State state_{{.history_events = 8, .history_bytes = 4096}};
  Service service_{state_, clock_};
};

}  // namespace

bool store(Input input) {
  return accepts([&] {
    Conversation conversation;
    read_frames(input, kMagic, {.payload_bytes = kMaxRequestBytes},
                [&](const Frame& frame) { conversation.take(frame); });
  });
}

}  // namespace tessera::fuzz
