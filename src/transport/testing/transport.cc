#include "transport/testing/transport.h"

#include <charconv>

#include "base/config.h"
#include "base/fail.h"
#include "base/socket.h"
#include "transport/testing/socket_stream.h"

namespace tessera {
namespace {

class TestingConnection final : public Connection {
 public:
  explicit TestingConnection(std::string name) : name_(std::move(name)) {}

  const std::string& name() const override { return name_; }
  Caps caps() const override { return {Access::kStream}; }
  Status get_refused() const override { return {}; }
  PathCost cost(Access) const override { return {}; }
  void add_key(uint32_t index, RemoteKey key) override {
    if (!key.bytes.empty() || !key.fds.empty())
      fail(ErrorCode::kInvalidArgument, "memory of {}: key {} of testing with {} bytes and {} descriptors"_message,
           name_, index, key.bytes.size(), key.fds.size());
  }
  RemoteRegion region(const RemoteRange& range) const override { return {.caps = caps(), .key = range.key}; }
  Status get(uint32_t, std::span<const Piece>, std::span<const std::span<std::byte>>) const override {
    return failed(ErrorCode::kUnimplemented, "{}: testing can only stream"_message, name_);
  }

 private:
  std::string name_;
};

class SocketStreams final : public Streams {
 public:
  Ends make() const override {
    SocketPair sockets = socket_pair();
    Ends ends;
    ends.producer.fds.push_back(std::move(sockets.first));
    ends.consumer.fds.push_back(std::move(sockets.second));
    return ends;
  }
  std::unique_ptr<ByteStream> open(StreamEnd end, std::string_view owner) const override {
    if (end.fds.size() != 1)
      fail(ErrorCode::kInvalidArgument, "socket stream of {}: {} descriptors"_message, owner, end.fds.size());
    return std::make_unique<SocketStream>(std::move(end.fds.front()), SocketStream::Disturbance{.seed = seed()});
  }

 private:
  static uint64_t seed() {
    const std::string& forced = Config::get().force_transport;
    const size_t colon = forced.find(':');
    uint64_t seed = 1;
    if (colon == std::string::npos) return seed;
    const char* const end = forced.data() + forced.size();
    const auto [at, error] = std::from_chars(forced.data() + colon + 1, end, seed);
    if (error != std::errc() || at != end)
      fail(ErrorCode::kInvalidArgument, "TESSERA_FORCE_TRANSPORT is \"{}\": a seed is a number"_message, forced);
    return seed;
  }
};

class TestingTransport final : public Transport {
 public:
  std::string_view name() const override { return "testing"; }
  Capability capability() const override { return {.available = true, .detail = "streams only, for tests"}; }
  int score(const Endpoint& src, const Endpoint& dst) const override {
    const bool host = src.device == DeviceKind::kHost && dst.device == DeviceKind::kHost;
    return host && src.process.same_host(dst.process) ? 1 : 0;
  }
  std::unique_ptr<Connection> connect(const Endpoint& peer) const override {
    return std::make_unique<TestingConnection>(peer.name);
  }
  Located locate(const LocalMemory&) const override { return {.region = 0, .offset = 0, .caps = {Access::kStream}}; }
  RemoteKey export_region(const LocalMemory& memory) const override {
    return {.transport = std::string(name()), .device = memory.device, .bytes = {}, .fds = {}};
  }
  const Streams* streams() const override { return &streams_; }
  std::unique_ptr<Consent> consent() const override { return nullptr; }

 private:
  SocketStreams streams_;
};

}  // namespace

const Transport& testing_transport() {
  static const TestingTransport transport{};
  return transport;
}

}  // namespace tessera
