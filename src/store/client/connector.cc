#include "store/client/connector.h"

#include "base/fail.h"
#include "base/runtime_dir.h"
#include "base/socket.h"
#include "store/auto_host.h"
#include "store/token_source.h"

namespace tessera::store {
namespace {

class TcpConnector final : public Connector {
 public:
  TcpConnector(HostPort host_port, std::string root) : host_port_(std::move(host_port)), root_(std::move(root)) {
    static_cast<void>(given_token());  // reports a bad token now; each attempt reads it again
  }

  UniqueFd start() override {
    if (next_ == addresses_.size()) {  // resolved again after each round: an address may change
      addresses_ = SocketAddress::resolve(host_port_);
      next_ = 0;
    }
    return start_connect(addresses_[next_++]);
  }
  void check(int fd) override { finish_connect(fd, host_port_.to_string()); }
  std::optional<Token> token(int fd) override {
    if (std::optional<Token> given = given_token()) return given;
    const std::string address = peer_url(fd);
    if (std::optional<Token> published = published_token(root_, address)) return published;
    fail(ErrorCode::kPermissionDenied,
         "it requires a token, but none is set here, and {} has none from a store at {}: set TESSERA_TOKEN (or "
         "TESSERA_TOKEN_FILE) to the one that the store was given, or run as the store's user with its "
         "TESSERA_RUNTIME_DIR"_message,
         root_, address);
  }
  Duration longest_pause() const override { return std::chrono::seconds(1); }

 private:
  HostPort host_port_;
  std::string root_;  // the runtime folder
  std::vector<SocketAddress> addresses_;
  size_t next_ = 0;
};

class UnixConnector final : public Connector {
 public:
  explicit UnixConnector(const std::string& path) : address_(SocketAddress::unix_path(path)) {}

  UniqueFd start() override { return start_connect(address_); }
  void check(int fd) override {
    finish_connect(fd, address_.name());
    require_same_user(fd);
  }
  std::optional<Token> token(int) override { return std::nullopt; }
  Duration longest_pause() const override { return std::chrono::seconds(1); }

 private:
  SocketAddress address_;
};

class AutoConnector final : public Connector {
 public:
  AutoConnector(std::string root, uint64_t client)
      : root_(std::move(root)), client_(client), socket_(AutoHost::socket_path(root_)) {}

  ~AutoConnector() override {
    if (host_ == nullptr) AutoHost::tidy(root_, client_);
  }
  AutoConnector(const AutoConnector&) = delete;
  AutoConnector& operator=(const AutoConnector&) = delete;

  UniqueFd start() override {
    try {
      return socket_.start();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnavailable || host_ != nullptr) throw;
      host_ = AutoHost::try_start(root_, client_);
      if (host_ == nullptr) throw;  // some process is about to host, or to end
    }
    return socket_.start();
  }
  void check(int fd) override { socket_.check(fd); }
  std::optional<Token> token(int fd) override { return socket_.token(fd); }
  Duration longest_pause() const override { return std::chrono::milliseconds(50); }

 private:
  std::string root_;
  uint64_t client_;
  UnixConnector socket_;
  std::unique_ptr<AutoHost> host_;
};

}  // namespace

std::unique_ptr<Connector> make_auto_connector(const std::string& root, uint64_t client) {
  return std::make_unique<AutoConnector>(root, client);
}

std::unique_ptr<Connector> make_tcp_connector(std::string_view address, const std::string& root) {
  return std::make_unique<TcpConnector>(parse_host_port(address), root);
}

std::unique_ptr<Connector> make_unix_connector(std::string_view path) {
  return std::make_unique<UnixConnector>(std::string(path));
}

}  // namespace tessera::store
