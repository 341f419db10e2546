// From a URL to a store or a server.
#include <unistd.h>

#include <optional>

#include "base/fail.h"
#include "base/runtime_dir.h"
#include "base/socket.h"
#include "store/client.h"
#include "store/etcd.h"
#include "store/server.h"
#include "store/token_source.h"

namespace tessera {
namespace {

constexpr std::string_view kTcp = "tcp://";
constexpr std::string_view kUnix = "unix://";

// Serves a Unix socket and removes it at the end.
class UnixServer final : public StoreServer {
 public:
  UnixServer(std::string path, const ServeOptions& options)
      : path_(std::move(path)),
        server_(listen_unix(path_), "unix://" + path_, {.data_dir = options.data_dir, .same_user_only = true}) {}
  ~UnixServer() override { ::unlink(path_.c_str()); }
  std::string address() const override { return server_.address(); }

 private:
  std::string path_;
  store::Server server_;
};

// Serves TCP to whoever knows its token. One that was given none makes one up and leaves it in the runtime folder,
// where only this user's processes find it.
class TcpServer final : public StoreServer {
 public:
  TcpServer(HostPort at, const ServeOptions& options) {
    std::optional<store::Token> token = store::given_token();
    UniqueFd listener = listen_tcp(at);
    at.port = local_port(listener.get());
    const std::string address = fmt::format("{}{}", kTcp, at.to_string());
    if (!token && !store::listens_on_loopback(listener.get()))
      fail(ErrorCode::kPermissionDenied,
           "a store at {} is open to other machines: give it, and its clients, a secret in TESSERA_TOKEN or "
           "TESSERA_TOKEN_FILE (`openssl rand -hex 16` makes one), or listen at 127.0.0.1",
           address);
    if (!token) {
      token = store::Token::random();
      dir_ = RuntimeDir::open(options.runtime_dir.empty() ? RuntimeDir::default_root() : options.runtime_dir,
                              "store " + address);
      store::publish_token(*dir_, store::local_url(listener.get()), *token);
    }
    server_.emplace(std::move(listener), address,
                    store::ServerOptions{.data_dir = options.data_dir, .token = std::move(token)});
  }
  std::string address() const override { return server_->address(); }

 private:
  std::optional<RuntimeDir> dir_;
  std::optional<store::Server> server_;
};

}  // namespace

std::unique_ptr<Store> open_store(std::string_view url, const StoreOptions& options) {
  if (url.starts_with("etcd://")) return store::open_etcd(url, options);
  const uint64_t id = store::random_id();
  auto client =
      std::make_unique<store::Client>(std::string(url), store::make_connector(url, options, id), id, options.stop);
  client->wait_connected(options.connect_timeout);
  return client;
}

std::unique_ptr<StoreServer> serve_store(std::string_view url, const ServeOptions& options) {
  if (url.starts_with(kUnix)) return std::make_unique<UnixServer>(std::string(url.substr(kUnix.size())), options);
  if (url.find("://") != std::string_view::npos && !url.starts_with(kTcp))
    fail(ErrorCode::kInvalidArgument, "'{}': a store listens at tcp://HOST:PORT or unix:///PATH", url);
  return std::make_unique<TcpServer>(parse_host_port(url.starts_with(kTcp) ? url.substr(kTcp.size()) : url), options);
}

}  // namespace tessera
