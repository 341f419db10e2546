// Makes a store or a server from a URL.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <optional>

#include "base/config.h"
#include "base/escape.h"
#include "base/fail.h"
#include "base/file_lock.h"
#include "base/runtime_dir.h"
#include "base/socket.h"
#include "store/client/client.h"
#include "store/client/connector.h"
#include "store/etcd/store.h"
#include "store/server/server.h"
#include "store/token_source.h"

namespace tessera {
namespace {

constexpr std::string_view kTcp = "tcp://";
constexpr std::string_view kUnix = "unix://";

constexpr Duration kStartTime = std::chrono::seconds(2);  // for another store that starts in the same folder
constexpr Duration kAskTime = std::chrono::milliseconds(100);

// Whether `path` is a socket at which nobody listens: left by a store that was killed.
bool is_left_over(const std::string& path) {
  struct stat status{};
  if (::lstat(path.c_str(), &status) != 0 || !S_ISSOCK(status.st_mode)) return false;
  try {
    connect_unix(path, Deadline::after(kAskTime));
    return false;
  } catch (const Error& error) {
    return error.code() == ErrorCode::kUnavailable;
  }
}

// Listens at `path`, in the place of a store that was killed. Two stores that start together take turns by an flock on
// the folder: otherwise one might remove the socket that the other has just made.
UniqueFd listen_in_place(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  const std::string folder = parent.empty() ? std::string(".") : parent.string();
  const UniqueFd lock(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!lock) fail_errno(fmt::format("listen on {}", path));
  // Without the lock it only reports whether the path is taken.
  if (lock_fd(lock.get(), Deadline::after(kStartTime)) && is_left_over(path)) ::unlink(path.c_str());
  return listen_unix(path);
}

// Serves a Unix socket and removes it in the end.
class UnixServer final : public StoreServer {
 public:
  UnixServer(std::string path, const ServeOptions& options)
      : path_(std::move(path)),
        server_(listen_in_place(path_), "unix://" + path_, {.data_dir = options.data_dir, .same_user_only = true}) {}
  ~UnixServer() override { ::unlink(path_.c_str()); }
  std::string address() const override { return server_.address(); }

 private:
  std::string path_;
  store::Server server_;
};

// Serves TCP to clients that know its token. Without a given token it makes one up and leaves it in the runtime folder,
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
           "TESSERA_TOKEN_FILE (`openssl rand -hex 16` makes one), or listen at 127.0.0.1"_message,
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

// A client of this project's own server; `make` makes its connector.
template <typename Make>
std::unique_ptr<Store> open_client(std::string_view url, const StoreOptions& options, Make&& make) {
  const std::string root = options.runtime_dir.empty() ? RuntimeDir::default_root() : options.runtime_dir;
  const uint64_t id = store::random_id();
  auto client = std::make_unique<store::Client>(std::string(url), make(root, id), id, options.stop);
  client->wait_connected(options.connect_timeout);
  return client;
}

std::unique_ptr<Store> open_auto(std::string_view url, std::string_view, const StoreOptions& options) {
  return open_client(url, options, [](const std::string& root, uint64_t id) {
    return store::make_auto_connector(RuntimeDir::prepare_root(root), id);
  });
}

std::unique_ptr<Store> open_tcp(std::string_view url, std::string_view address, const StoreOptions& options) {
  return open_client(url, options,
                     [address](const std::string& root, uint64_t) { return store::make_tcp_connector(address, root); });
}

std::unique_ptr<Store> open_unix(std::string_view url, std::string_view path, const StoreOptions& options) {
  return open_client(url, options, [path](const std::string&, uint64_t) { return store::make_unix_connector(path); });
}

std::unique_ptr<Store> open_etcd(std::string_view url, std::string_view, const StoreOptions& options) {
  return store::open_etcd(url, options);
}

// The kinds of store, by the beginnings of their URLs.
struct Scheme {
  std::string_view name;
  bool rest;  // whether an address follows
  std::unique_ptr<Store> (*open)(std::string_view url, std::string_view address, const StoreOptions& options);
};
constexpr Scheme kSchemes[] = {
    {"auto", false, open_auto},
    {kTcp, true, open_tcp},
    {kUnix, true, open_unix},
    {"etcd://", true, open_etcd},
};

void require_address(std::string_view url, std::string_view address) {
  try {
    (void)parse_host_port(address);
  } catch (const Error& error) {
    fail(error.code(), "{}{}"_message,
         url == Config::get().store ? fmt::format("TESSERA_STORE {}: ", in_quotes(url)) : "", error.what());
  }
}

}  // namespace

std::unique_ptr<Store> open_store(std::string_view url, const StoreOptions& options) {
  Config::require_valid();
  for (const Scheme& scheme : kSchemes)
    if (scheme.rest ? url.starts_with(scheme.name) : url == scheme.name) {
      const std::string_view address = url.substr(scheme.name.size());
      if (scheme.name == kTcp) require_address(url, address);
      return scheme.open(url, address, options);
    }
  fail(ErrorCode::kInvalidArgument, "store '{}': a store is auto, tcp://HOST:PORT or unix:///PATH{}"_message, url,
       url == Config::get().store ? " (TESSERA_STORE)" : "");
}

std::unique_ptr<StoreServer> serve_store(std::string_view url, const ServeOptions& options) {
  Config::require_valid();
  if (url.starts_with(kUnix)) return std::make_unique<UnixServer>(std::string(url.substr(kUnix.size())), options);
  if (url.find("://") != std::string_view::npos && !url.starts_with(kTcp))
    fail(ErrorCode::kInvalidArgument, "'{}': a store listens at tcp://HOST:PORT or unix:///PATH"_message, url);
  return std::make_unique<TcpServer>(parse_host_port(url.starts_with(kTcp) ? url.substr(kTcp.size()) : url), options);
}

}  // namespace tessera
