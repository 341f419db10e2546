#include "fuzz/seeds.h"

#include <fmt/format.h>

#include <limits>
#include <random>
#include <span>

#include "base/bytes.h"
#include "base/field_drawer.h"
#include "base/framing.h"
#include "bus/daemon/messages.h"
#include "bus/lending/messages.h"
#include "bus/prepare/amax_messages.h"
#include "bus/registration/records.h"
#include "bus/session/versions.h"
#include "checkpoint/checksums.h"
#include "checkpoint/safetensors_header.h"
#include "collective/messages.h"
#include "collective/shared/page.h"
#include "command/ring.h"
#include "fuzz/schedule_logs.h"
#include "peer/exchange/messages.h"
#include "peer/handshake.h"
#include "peer/report.h"
#include "store/protocol.h"

namespace tessera::fuzz {
namespace {

const Incarnation kSelf{.boot_id = "4b7b3f0a-7d3c-4a0e-9c38-0d1f3a7f2c11",
                        .pid_namespace = 4026531836,
                        .pid = 4711,
                        .start_time = 123456,
                        .nonce = 0x1122334455667788};

std::string to_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string frame(uint32_t magic, uint16_t version, uint16_t type, std::span<const std::byte> payload,
                  uint32_t stream = 0) {
  ByteWriter out;
  out.put(magic);
  out.put(version);
  out.put(type);
  out.put(stream);
  out.put(static_cast<uint32_t>(payload.size()));
  out.put(uint32_t{0});  // no descriptors
  return to_text(out.view()) + to_text(payload);
}

class Seeds {
 public:
  void add(std::string target, std::string name, std::string bytes) {
    all_.push_back({std::move(target), "seed-" + std::move(name), std::move(bytes)});
  }

  template <typename Message>
  void add_bus(const Message& message, std::string_view which = {}) {
    const std::string bytes = frame(kBusMagic, kProtocolMax, kCode<Message>, message_bytes(message));
    bus_stream_ += bytes;
    add("bus", fmt::format("{}{}", kNameOf<Message::kType>, which), bytes);
  }

  // Some random values of each message of a conversation.
  template <typename Messages>
  void add_drawn() {
    Messages::each([&]<typename Message>() {
      std::mt19937_64 random(kCode<Message>);
      for (int i = 0; i < 3; ++i)
        add("bus", fmt::format("{}-drawn{}", kNameOf<Message::kType>, i),
            frame(kBusMagic, kProtocolMax, kCode<Message>, message_bytes(draw_message<Message>(random))));
    });
  }

  void add_store(std::string name, store::StoreMessage type, std::span<const std::byte> payload) {
    const std::string bytes = frame(store::kMagic, store::kMaxVersion, raw(type), payload);
    store_stream_ += bytes;
    add("store", std::move(name), bytes);
  }

  std::vector<Seed> take() {
    add("bus", "stream", bus_stream_);
    add("store", "stream", store_stream_);
    return std::move(all_);
  }

 private:
  std::vector<Seed> all_;
  std::string bus_stream_, store_stream_;
};

void add_layouts(Seeds& seeds) {
  seeds.add("layout", "uneven", "dp=2,tp=4@0-7:R,S-1\n17x9");
  seeds.add("layout", "nested", "2,3@5,3,1,0,7-8:S0,S0\n11x4x2");
  seeds.add("layout", "strided", "dp=2,tp=2:S0*2,S0\n13x5");
  seeds.add("layout", "ragged", "4:G0[0;3;3;9;16]\n16x2");
  seeds.add("layout", "partial", "tp=2,dp=2:Pavg,Pavg\nscalar");
  seeds.add("layout", "empty", "8:S0\n0x4");
}

void add_checkpoints(Seeds& seeds) {
  const std::vector<TensorInfo> tensors{{"model.embed.weight", DType::kBF16, {8, 4}},
                                        {"scale", DType::kF32, {}},
                                        {"packed", DType::kF4, {6}},
                                        {"none", DType::kI64, {0, 3}}};
  ByteWriter header;
  header.put('h');
  header.put(uint64_t{2 * (64 + 4 + 3)});
  seeds.add("safetensors", "header",
            to_text(header.view()) + checkpoint::format_header(tensors, {{"format", "pt"}, {"note", "\n\"\\u00e9"}}));
  seeds.add("safetensors", "index",
            R"(i{"metadata":{"total_size":71,"nested":[{"a":null},-1,2.5,true]},)"
            R"("weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}})");
  const checkpoint::Checksums checksums{{"a", std::string(32, '0')}, {"b\"", "0123456789abcdef0123456789abcdef"}};
  const std::string text = checkpoint::format_checksums(checksums);
  seeds.add("safetensors", "checksums", "c" + text);
  seeds.add(
      "safetensors", "index-checksums",
      R"(i{"metadata":{"tessera":{"generation":1,"checksums":)" + text + R"(}},"weight_map":{"a":"a.safetensors"}})");
}

// A key for private memory (0), and one for an arena of 4,096 bytes (1).
std::vector<RemoteKey> shm_keys() {
  std::vector<RemoteKey> keys;
  for (const bool arena : {false, true}) {
    ByteWriter out;
    out.put(static_cast<uint8_t>(arena ? 1 : 0));
    if (arena) {
      out.put(uint32_t{3});
      out.put(uint64_t{4096});
    }
    keys.push_back({.transport = "shm", .device = DeviceKind::kHost, .bytes = out.take(), .fds = {}});
    keys.back().fds.resize(arena ? 1 : 0);
  }
  return keys;
}

void add_bus_messages(Seeds& seeds) {
  using namespace bus;
  const Status gone(ErrorCode::kPeerLost, "trainer/3 (pid 4711) has died");
  seeds.add_bus(Hello{1, kProtocolMax, "0.1.0", "default", "trainer", 3, kSelf});
  seeds.add_bus(Hello{kProtocolMax + 1, kProtocolMax + 2, "99.1", {}, {}, 0, {}}, "-later");
  seeds.add_bus(Welcome{kProtocolMax, "0.1.0", "inference", 0, kSelf});
  seeds.add_bus(Reject{ErrorCode::kMismatch, "no common protocol"});
  seeds.add_bus(Attach{"weights", "policy", Attach::Purpose::kReduce, "0123456789abcdef"});
  Attached attached{.slots = 2};
  attached.keys = shm_keys();
  attached.places = {{{1, 64, 128}, 8, {16, -4}, 4096},
                     {{0, 4096, 4}, 0, {}, 0},
                     {{1, 64, 128}, 0, {2}, 4096, RemoteRange{1, 8192, 192}, 256}};
  seeds.add_bus(attached);
  seeds.add_bus(Prepare{true, {0, 3, 7}});
  seeds.add_bus(Prepared{.transport = "shm"});
  seeds.add_bus(Offer{.version = 5});
  seeds.add_bus(Withdraw{.version = 5});
  seeds.add_bus(Take{.version = 5, .epoch = 2, .held = 4, .lease = true});
  seeds.add_bus(Hold{.version = 5, .epoch = 2});
  seeds.add_bus(Held{.version = 5, .epoch = 2});
  seeds.add_bus(Release{.version = 5, .epoch = 2});
  seeds.add_bus(Got{.version = 5, .epoch = 2, .reason = Status(ErrorCode::kDataLoss, "a digest differs")});
  seeds.add_bus(Newest{7});
  seeds.add_bus(Ahead{.version = 7});
  seeds.add_bus(Decided{5, 2, Decided::Verdict::kCommit, Status()});
  seeds.add_bus(Grant{.version = 5, .epoch = 2, .stamp = 1});
  seeds.add_bus(Grant{.version = 5, .epoch = 2, .stamp = 5, .deltas = {Grant::kInFull, 0, 4096}}, "-deltas");
  seeds.add_bus(Refuse{.version = 5, .epoch = 2, .reason = Status(ErrorCode::kCancelled, "withdrawn")});
  seeds.add_bus(Revoke{.version = 5, .epoch = 2, .reason = gone});
  seeds.add_bus(Digests{5, {{{1, 2}, 3}, {{4, 5}, 6}}});
  seeds.add_bus(ProgressReport{5, 1000});
  seeds.add_bus(Done{5, 10, Status(ErrorCode::kDataLoss, "route 3: digests differ")});
  seeds.add_bus(Chosen{.version = 5, .epoch = 2});
  seeds.add_bus(Detach{});
  seeds.add_bus(Broken{gone});
  seeds.add_bus(Closed{});
  seeds.add_bus(Goodbye{});
  seeds.add_bus(Ping{.number = 7});
  seeds.add_bus(Pong{.number = 7});
  seeds.add("bus", "second-stream", frame(kBusMagic, kProtocolMax, kCode<Closed>, message_bytes(Closed{}), 3));
  const Region rows({IntervalSet({0, 4}), IntervalSet({2, 8})});
  const LentPlace tensor{.kind = LentPlace::Kind::kTensor, .tensor = 3, .memory = {}, .array = {}};
  const LentPlace place{.kind = LentPlace::Kind::kPeer,
                        .tensor = 0,
                        .memory = {1, 64, 128},
                        .origin = 8,
                        .array = {.owned = rows, .strides = {24, 4}}};
  const RouteRegion what{.tensor = 1, .shape = {4, 8}, .dtype = DType::kF32, .region = rows};
  seeds.add_bus(LendArenas{.run = 7, .writable = true, .arenas = {1}});
  seeds.add_bus(LendKeys{.run = 7, .keys = shm_keys()});
  seeds.add_bus(MakeRun{.run = 7,
                        .kind = MakeRun::Kind::kPull,
                        .digest = true,
                        .stream = false,
                        .peer_name = "inference/1",
                        .peer = kSelf,
                        .routes = {{.what = what, .src = place, .dst = tensor, .dst_dtype = DType::kBF16}}});
  seeds.add_bus(GiveStream{.run = 7, .transport = "shm"});
  seeds.add_bus(StartRun{.run = 7, .epoch = 2});
  seeds.add_bus(AbortRun{.run = 7, .status = gone});
  seeds.add_bus(DropRun{.run = 7});
  seeds.add_bus(RunProgress{.run = 7, .epoch = 2, .bytes = 1000});
  seeds.add_bus(RunEnded{.run = 7, .epoch = 2, .bytes = 96, .status = {}, .digests = {{{1, 2}, 24}}});
  seeds.add_bus(Sync{.number = 3});
  seeds.add_bus(Synced{.number = 3, .status = gone});
  seeds.add_bus(Joins{{{0, 0, 3, 4}, {0, 1}, {7, 0}}});
  seeds.add_bus(Amaxes{5, 2, Status(), {}, {0, 1.5f, 3e38f}});
  seeds.add_bus(Amaxes{5, 2, Status(), {1, 17, 2, -std::numeric_limits<float>::infinity()}, {}}, "-nonfinite");
  seeds.add_bus(Agreed{5, 2, gone, {}, {}});
  seeds.add_bus(Inspect{});
  BatchReport batch{.pair = "weights", .id = "policy", .sends = true, .version = 7, .transfers = 3, .bytes = 4096};
  batch.peers.push_back({"inference", 2, true});
  batch.operation = "send";
  batch.phase = "transfer";
  batch.waits.push_back({"inference/1 to take version 8", 2'000'000});
  seeds.add_bus(Report{.release = "0.1.0",
                       .name_space = "default",
                       .job = "trainer",
                       .rank = 3,
                       .world = 4,
                       .incarnation = kSelf,
                       .commands = {.queued = 2, .capacity = 63},
                       .waits = {{"evaluation/0 to register (pair weights, batch policy)", 1}},
                       .batches = {batch}});
  seeds.add_drawn<HandshakeMessages>();
  seeds.add_drawn<ExchangeMessages>();
  seeds.add_drawn<VersionMessages>();
  seeds.add_drawn<AmaxMessages>();
  seeds.add_drawn<ReportMessages>();
  seeds.add_drawn<LendingMessages>();
}

void add_store_messages(Seeds& seeds) {
  using namespace store;
  using Type = store::StoreMessage;
  const KeyValue kv{.key = "default/rank/trainer/0",
                    .value = std::string("\1\0value", 7),
                    .create_revision = 2,
                    .mod_revision = 3,
                    .version = 2,
                    .lease = 5,
                    .decision = true};
  const auto add = [&](std::string name, Type type, const auto& message) {
    seeds.add_store(std::move(name), type, message_bytes(message));
  };
  const Status mismatch(ErrorCode::kMismatch, "no common protocol");
  add("Hello", Type::kHello, StoreHello{.release = "0.1.0", .client = 7, .last_revision = 1, .incarnation = kSelf});
  add("Challenge", Type::kChallenge, Challenge{store::kMaxVersion, "0.1.0", {}});
  add("Proof", Type::kProof, ProofAnswer{});
  add("Welcome", Type::kWelcome, StoreWelcome{store::kMaxVersion, "0.1.0", 9, Proof{}});
  add("Refused", Type::kRefused, ReplyHead{.status = mismatch});
  add("RepublishLeases", Type::kRepublishLeases, LeaseTermList{{{5, seconds(10)}, {6, seconds(1)}}});
  add("RepublishKeys", Type::kRepublishKeys, KeyList{{kv}});
  seeds.add_store("RepublishDone", Type::kRepublishDone, {});
  add("Range", Type::kRequest, Request{.id = 1, .op = Op::kRange, .prefix = true});
  StoreTransaction transaction;
  transaction.compares.push_back({.key = "default/a", .mod_revision = 0});
  transaction.operations.push_back({.key = "default/a", .value = "1", .options = {.lease = 5, .decision = true}});
  transaction.operations.push_back({.type = StoreOperation::Type::kDelete, .key = "default/b"});
  add("Transact", Type::kRequest, Request{.id = 2, .op = Op::kTransact, .token = 77, .transaction = transaction});
  add("Watch", Type::kWatch, WatchStart{3, "default/", int64_t{1} << 33});
  add("Erase", Type::kRequest, Request{.id = 3, .op = Op::kErase, .key = "default/a"});
  add("Grant", Type::kRequest, Request{.id = 4, .op = Op::kGrant, .lease = {8, seconds(10)}});
  add("Revoke", Type::kRequest, Request{.id = 5, .op = Op::kRevoke, .leases = {5, 6}});
  add("Unwatch", Type::kUnwatch, WatchEnd{3});
  add("KeepAlive", Type::kKeepAlive, LeaseList{{5, 6}});
  add("LeasesLost", Type::kLeasesLost, LeaseList{{5, 6}});
  add("Failed", Type::kReply, ReplyHead{9, Status(ErrorCode::kNotFound, "no such lease")});
  ByteWriter reply;
  write_fields(ReplyHead{.request = 1}, reply);
  write_fields(RangeReply{3, {kv}}, reply);
  seeds.add_store("Reply", Type::kReply, reply.view());
  add("Events", Type::kEvents, WatchEvents{3, {{StoreEvent::Type::kPut, kv}}});
  add("Compacted", Type::kCompacted, store::Compacted{3, 4096});
}

void add_records(Seeds& seeds) {
  using namespace bus;
  const RankRecord rank{kSelf, 4, "/run/user/1000/tessera/agent-4711.sock", "0.1.0", kSelf};
  const Registration of{kSelf, 1};
  const ManifestEntry embed{"model.embed.weight", DType::kBF16, {64, 16}, Layout::parse("dp=2,tp=2:R,S0"), {},
                            Format::kNvfp4};
  const ManifestEntry norm{"model.norm.weight", DType::kF32, {16}, Layout::parse("4:R")};
  seeds.add("records", "rank", "r" + write_record(rank));
  seeds.add("records", "pair", "p" + write_record(PairRecord{rank, {"evaluation", "inference"}}));
  seeds.add("records", "manifest", "m" + write_record(ManifestRecord{of, {{embed, norm}}}));
  ManifestEntry row{"row", DType::kBF16, {16}, Layout::parse("1:R")};
  row.source = {.name = embed.name, .slices = {{7, 8, 1, true}, {0, 16}}};
  seeds.add("records", "manifest_sources", "m" + write_record(ManifestRecord{of, {{embed, row}}}));
  seeds.add("records", "batch",
            "b" + write_record(BatchRecord{of, true, true, true, 7, 8, "0123456789abcdef", {{"model.bias"}, {norm}}}));
  seeds.add("records", "failure",
            "f" + write_record(FailureRecord{of, Status(ErrorCode::kMismatch, "no"), {{17, 2}}, true}));
  seeds.add("records", "renewal", "n" + write_record(RenewalRecord{of, {{17, 2}, {18, 1}}}));
  seeds.add("records", "gathered", "s" + write_record(GatheredRecord{of, "4x2"}));
  seeds.add("records", "registration",
            "g" + write_record(FailureRecord{of, Status(ErrorCode::kMismatch, "no"), {}, false}));
  seeds.add("records", "key", "ktrainer/12");
}

void add_memory(Seeds& seeds) {
  for (const bool sealed : {true, false}) {
    ByteWriter out;
    out.put('a');
    out.put(uint16_t{4096});
    out.put(static_cast<uint8_t>(sealed ? 0 : 1));
    for (const RemoteKey& key : shm_keys()) write_fields(key, out);
    write_fields(RemoteRange{.key = 1, .offset = 64, .bytes = 128}, out);
    write_fields(RemoteRange{.key = 0, .offset = 4096, .bytes = 128}, out);
    seeds.add("memory", sealed ? "sealed" : "unsealed", to_text(out.view()));
  }
  for (const bool produces : {true, false}) {
    ByteWriter out;
    out.put('r');
    out.put(static_cast<uint8_t>(produces ? 0 : 1));
    out.put(uint8_t{1});
    out.put(static_cast<uint16_t>(produces ? 128 : 256));  // the consumer's place; the first frame's size
    out.put(uint64_t{produces ? uint64_t{1} << 32 : 100});
    out.put(uint16_t{0});  // the producer's place
    out.put(uint64_t{1} << 32 | 1);
    seeds.add("memory", produces ? "producer" : "consumer", to_text(out.view()));
  }
}

void add_commands(Seeds& seeds) {
  constexpr uint32_t kSlots = 4;
  ByteWriter queue;
  queue.put('o');
  queue.put(uint8_t{0});
  queue.put(uint8_t{2 * kSlots});
  queue.put(uint32_t{0x51435354});
  queue.put(uint16_t{1});
  queue.put(uint16_t{kRecordBytes});
  queue.put(uint64_t{1});
  queue.put(kSlots);
  queue.put(kSlots);
  seeds.add("command", "queue", to_text(queue.view()));
  ByteWriter ring;
  ring.put('r');
  ring.put(uint16_t{3840 + kSlots * kRecordBytes + 24});  // a reply's type and length
  ring.put(uint64_t{1 | 8 << 16});
  ring.put(uint16_t{256});  // the agent's count of replies
  ring.put(uint64_t{1});
  ring.put(uint16_t{128});  // its count of commands taken
  ring.put(uint64_t{1});
  seeds.add("command", "ring", to_text(ring.view()));
}

void add_agent_messages(Seeds& seeds) {
  using namespace bus;
  const auto add = [&](const std::string& name, AgentMessage type, std::span<const std::byte> payload) {
    seeds.add("command", name, "f" + frame(kAgentMagic, kAgentProtocol, static_cast<uint16_t>(type), payload));
  };
  const auto add_message = [&]<typename Message>(const std::string& name, const Message& message) {
    add(name, Message::kType, message_bytes(message));
  };
  const Layout layout = Layout::parse("tp=2@0-1:S0");
  add_message("open", OpenSession{.release = "0.1",
                                  .worker = {.boot_id = "b", .pid = 7, .nonce = 9},
                                  .options = {.job = "trainer", .world = 2, .store = "auto", .name_space = "default"}});
  add_message("opened",
              SessionOpened{.protocol = 1, .release = "0.1", .session = 5, .agent = {.boot_id = "b", .pid = 7}});
  add_message("failed", CallFailed{.status = Status(ErrorCode::kPeerLost, "gone")});
  add("close", AgentMessage::kClose, {});
  add("interrupt", AgentMessage::kInterrupt, {});
  add_message("pair", PairCall{.session = 5, .options = {.name = "weights", .peer = "inference", .layout = layout}});
  add_message("pair_of_several",
              PairCall{.session = 5, .options = {.name = "weights", .peers = {"engine0", "engine1"}}});
  add_message("paired", Paired{.pair = 1, .peer_world = 3, .membership = 7});
  add_message("manifest", ManifestCall{.session = 5, .pair = 1, .batch = "policy", .timeout = Timeout(9)});
  add_message("offered",
              Offered{.manifest = {.entries = {{.name = "w", .shape = {4}, .layout = layout.bind(Shape{4})}}}});
  add_message("all_gather",
              AllGatherCall{.session = 5, .pair = 1, .batch = "policy", .value = "4x2", .timeout = Timeout(9)});
  add_message("gathered", Gathered{.values = {"4x2", ""}});
  add_message("give_up", GiveUpCall{.session = 5,
                                    .pair = 1,
                                    .batch = "policy",
                                    .why = Status(ErrorCode::kInvalidArgument, "tensor w: a row short")});
  add_message("arenas", Arenas{.session = 5});
  RegisterCall call{
      .session = 5, .pair = 1, .batch = "policy", .sends = true, .timeout = Timeout(9), .options = {}, .tensors = {}};
  call.tensors.push_back({.spec = {.name = "w",
                                   .shape = {4, 2},
                                   .layout = layout,
                                   .strides = {2, 1},
                                   .wire = Format::kMxfp8,
                                   .planes = {.row = true},
                                   .fused = {.name = "f", .place = {{1, 2}}}},
                          .place = RegisterCall::Place{.arena = 0, .offset = 64}});
  call.tensors.push_back({.spec = {.name = "elsewhere", .shape = {}}, .place = {}});
  add_message("register", call);
  add_message("registered", Registered{.batch = 2});
  add("commit", AgentMessage::kCommit,
      message_bytes(ObjectCall{.session = 5, .object = 2, .version = 3, .timeout = {}}));
  add_message("number", Number{.value = 3});
  add_message("batch_closed", BatchClosed{.untaken = {.version = 7, .jobs = {"engine0"}}});
  add_message("wait_peers", WaitPeersCall{.session = 5, .batch = 2, .jobs = 2, .version = 7, .timeout = Timeout(9)});
  add_message("peers", PeerList{.peers = {{.job = "engine0", .attached = true, .world = 2, .version = 7},
                                          {.job = "engine1", .error = Status(ErrorCode::kPeerLost, "gone")}}});
  add_message("digests", DigestList{.digests = {{.name = "w", .d0 = 1, .d1 = 2, .elements = 8}}});

  const auto add_command = [&](const std::string& name, AgentCommand type, bool result,
                               std::span<const std::byte> payload) {
    ByteWriter out;
    out.put('c');
    out.put(type);
    out.put(static_cast<uint8_t>(result));
    seeds.add("command", name, to_text(out.view()) + to_text(payload));
  };
  add_command("send", AgentCommand::kSend, false,
              message_bytes(TransferCommand{.batch = 2, .version = 7, .timeout = {}}));
  OperationState state;
  state.done = true;
  state.version = 7;
  add_command("sent", AgentCommand::kSend, true, message_bytes(state));
  add_command("cancel", AgentCommand::kCancel, false, message_bytes(CommandId{.id = 4}));
  add_command("state", AgentCommand::kState, false, message_bytes(BatchNumber{.batch = 2}));
  add_command("state-of", AgentCommand::kState, true, message_bytes(BatchState{.version = 7, .newest = 8}));
  add_command("stats", AgentCommand::kStats, true,
              message_bytes(BatchFigures{
                  .stats = {.tensors = 3, .quantized_elements = 256, .quantized_bytes = 136, .amax_exchanges = 1}}));
}

template <typename Message>
void put_group_frame(const Message& message, ByteWriter& out) {
  out.put(static_cast<uint8_t>(Message::kType));
  out.put_bytes(message_bytes(message));
}

void add_groups(Seeds& seeds) {
  using namespace collective;
  const Bootstrap bootstrap{.rank = 1,
                            .size = 2,
                            .slots = 4,
                            .name = "etp",
                            .host = "node-1",
                            .process = kSelf,
                            .recorder = 1,
                            .key = 2,
                            .socket = "/run/tessera/p-1/group"};
  seeds.add("group", "bootstrap", 'b' + to_text(message_bytes(bootstrap)));
  ByteWriter frames;
  frames.put('f');
  put_group_frame(GroupHello{.rank = 1, .key = 2, .callee = 4}, frames);
  put_group_frame(AskArena{.arena = 7}, frames);
  put_group_frame(ArenaAnswer{.arena = 7, .bytes = 1 << 26}, frames);
  seeds.add("group", "frames", to_text(frames.view()));
  constexpr uint32_t kMail = 4096 + sizeof(Mail);
  constexpr uint32_t kStep = 192;
  const auto add_page = [&](const char* name, std::span<const std::pair<uint32_t, uint64_t>> words, uint8_t call) {
    ByteWriter page;
    page.put('p');
    page.put(static_cast<uint8_t>(words.size()));
    for (const auto& [offset, value] : words) {
      page.put(offset);
      page.put(value);
    }
    page.put(call);
    seeds.add("group", name, to_text(page.view()));
  };
  // A peer that takes part in a maximum of 100 values: its first mail, then its step.
  const std::pair<uint32_t, uint64_t> maximum[] = {
      {kMail, 1}, {kMail + 8, static_cast<uint64_t>(CallKind::kMax)}, {kMail + 80, 400}, {kStep, 1}};
  add_page("page", maximum, 1);
  // A peer that refuses a barrier: "a reason".
  const std::pair<uint32_t, uint64_t> refusal[] = {{kMail, 1},
                                                   {kMail + 8, static_cast<uint64_t>(CallKind::kRefused)},
                                                   {kMail + 80, 8},
                                                   {kMail + 88, static_cast<uint64_t>(ErrorCode::kMismatch)},
                                                   {kMail + 128, 0x6e6f736165722061},
                                                   {kStep, 1}};
  add_page("refusal", refusal, 3);
}

void add_texts(Seeds& seeds) {
  seeds.add("text", "rule", R"(rmodel\.layers\.[0-9]+\..*=tp=2:S0)");
  seeds.add("text", "wire", R"(wmodel\.layers\.[0-9]+\..*=nvfp4)");
  seeds.add("text", "filter", "f(lm_head|.*_proj)\\.weight");
  seeds.add("text", "address", "h[::1]:7070");
  seeds.add("text", "scrape", "HGET /metrics?x=1 HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain\r\n\r\n");
  seeds.add("text", "metrics", "m:9400");
  seeds.add("text", "dtype", "df8_e4m3");
  seeds.add("text", "name", "ntrainer-0.v1_x");
}

}  // namespace

std::vector<Seed> seeds() {
  Seeds all;
  add_layouts(all);
  add_checkpoints(all);
  add_bus_messages(all);
  add_store_messages(all);
  add_records(all);
  add_memory(all);
  add_commands(all);
  add_agent_messages(all);
  add_groups(all);
  add_texts(all);
  for (const ScheduleSeed& seed : schedule_seeds()) all.add("schedule", seed.name, seed.input);
  return all.take();
}

}  // namespace tessera::fuzz
