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
  const auto decode = [](std::span<const std::byte> payload) { return Message::decode(payload); };
  expect_round_trip(decode(frame.payload), decode, [](const Message& message) { return message.encode(); });
}

// A store whose one client, and whose client's one store, send what the stream holds.
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
      case StoreMessage::kUnwatch: {
        ByteReader in(frame.payload, "unwatch");
        in.get<uint64_t>();
        return in.finish();
      }
      case StoreMessage::kKeepAlive:
      case StoreMessage::kLeasesLost:
        return check_leases(frame);
      case StoreMessage::kWelcome:
        return check_frame<StoreWelcome>(frame);
      case StoreMessage::kRefused:
      case StoreMessage::kReply:
        return check_reply(frame);
      case StoreMessage::kEvents:
        WatchEvents::decode(frame.payload);
        return;
      case StoreMessage::kCompacted:
        return check_frame<Compacted>(frame);
      case StoreMessage::kChallenge:
        return check_frame<Challenge>(frame);
      case StoreMessage::kProof:
        TESSERA_CHECK(encode_proof(decode_proof(frame.payload)) == frame.payload);
        return;
    }
    fail(ErrorCode::kInvalidArgument, "no such type");
  }

 private:
  void take_hello(const Frame& frame) {
    check_frame<StoreHello>(frame);
    const StoreHello hello = StoreHello::decode(frame.payload);
    continue_from(hello.last_revision);
  }

  void continue_from(int64_t revision) {  // as Server does
    revision = std::min(revision, kMaxContinued);
    if (revision > state_.revision()) state_.raise_revision(revision);
  }

  void take_lease_terms(const Frame& frame) {
    const std::vector<LeaseTerm> terms = decode_lease_terms(frame.payload);
    TESSERA_CHECK(encode_lease_terms(terms) == frame.payload);
    for (const LeaseTerm& term : terms) state_.grant(term.lease, term.ttl, clock_.now());
  }

  void take_keys(const Frame& frame) {
    ByteReader in(frame.payload, "republication");
    const std::vector<KeyValue> keys = read_key_values(in);
    in.finish();
    ByteWriter out;
    out.put(static_cast<uint32_t>(keys.size()));
    for (const KeyValue& kv : keys) {
      write_key_value(out, kv);
      continue_from(kv.mod_revision);
      accepts([&] { state_.restore(kv, kv.version % 2 == 0); });
    }
    TESSERA_CHECK(std::ranges::equal(out.view(), frame.payload));
    TESSERA_CHECK_LE(state_.revision(), kMaxRevision);
  }

  // Whatever is asked is answered, and the answer reads as a client reads it.
  void take_request(const Frame& frame) {
    check_frame<Request>(frame);
    const Request request = Request::decode(frame.payload);
    const std::vector<std::byte> answer = service_.answer(request);
    ByteReader in(answer, "reply");
    TESSERA_CHECK_EQ(in.get<uint64_t>(), request.id);
    if (!read_status(in).ok()) return in.finish();
    switch (request.op) {
      case Op::kRange: {
        const int64_t revision = read_revision(in, "reply");
        for (const KeyValue& kv : read_key_values(in)) TESSERA_CHECK_LE(kv.mod_revision, revision);
        break;
      }
      case Op::kErase:
        TESSERA_CHECK(in.get<int64_t>() >= 0);
        break;
      case Op::kTransact:
        TransactReply::read(in);
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
    const WatchStart start = WatchStart::decode(frame.payload);
    if (start.from <= state_.compacted()) return;
    for (const Event& event : state_.events_from(start.from, start.prefix)) {
      TESSERA_CHECK_LE(start.from, event.revision());
      TESSERA_CHECK(event.kv->key.starts_with(start.prefix));
    }
  }

  static void check_leases(const Frame& frame) {
    TESSERA_CHECK(encode_leases(decode_leases(frame.payload)) == frame.payload);
  }

  static void check_reply(const Frame& frame) {
    ByteReader in(frame.payload, "reply");
    const auto id = in.get<uint64_t>();
    const Status status = read_status(in);
    if (!status.ok()) {
      in.finish();
      TESSERA_CHECK(encode_error(id, status) == frame.payload);
      return;
    }
    const std::span<const std::byte> rest = in.rest();
    ByteReader transact(rest, "reply"), range(rest, "reply");
    accepts([&] { TransactReply::read(transact); });
    read_revision(range, "reply");
    read_key_values(range);
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
