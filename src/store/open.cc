// From a URL to a store or a server.
#include <unistd.h>

#include "base/fail.h"
#include "base/log.h"
#include "base/socket.h"
#include "store/client.h"
#include "store/etcd.h"
#include "store/server.h"

namespace tessera {
namespace {

constexpr std::string_view kTcp = "tcp://";
constexpr std::string_view kUnix = "unix://";

// Serves a Unix socket and removes it at the end.
class UnixServer final : public StoreServer {
 public:
  explicit UnixServer(std::string path)
      : path_(std::move(path)), server_(listen_unix(path_), "unix://" + path_, {.same_user_only = true}) {}
  ~UnixServer() override { ::unlink(path_.c_str()); }
  std::string address() const override { return server_.address(); }

 private:
  std::string path_;
  store::Server server_;
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

std::unique_ptr<StoreServer> serve_store(std::string_view url) {
  if (url.starts_with(kUnix)) return std::make_unique<UnixServer>(std::string(url.substr(kUnix.size())));
  if (url.find("://") != std::string_view::npos && !url.starts_with(kTcp))
    fail(ErrorCode::kInvalidArgument, "'{}': a store listens at tcp://HOST:PORT or unix:///PATH", url);
  HostPort at = parse_host_port(url.starts_with(kTcp) ? url.substr(kTcp.size()) : url);
  if (at.host != "localhost" && at.host != "::1" && !at.host.starts_with("127."))
    log().warn("the store at {} is open to whoever reaches that address: bind 127.0.0.1 where others do",
               at.to_string());
  UniqueFd listener = listen_tcp(at);
  at.port = local_port(listener.get());
  return std::make_unique<store::Server>(std::move(listener), fmt::format("{}{}", kTcp, at.to_string()),
                                         store::ServerOptions{});
}

}  // namespace tessera
