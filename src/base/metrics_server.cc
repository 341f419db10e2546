#include "base/metrics_server.h"

#include <array>
#include <charconv>

#include "base/fail.h"
#include "base/log.h"
#include "base/metrics.h"

namespace tessera {
namespace {

constexpr size_t kMostCallers = 16;
constexpr size_t kMostRequestBytes = 4096;
constexpr Duration kCallerTime = std::chrono::seconds(5);

std::string answer(std::string_view status, std::string_view body, std::string_view more_headers = {},
                   bool with_body = true) {
  return fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n"
      "Connection: close\r\n{}\r\n{}",
      status, body.size(), more_headers, with_body ? body : "");
}

}  // namespace

HostPort parse_metrics_address(std::string_view text) {
  const bool port_only = text.starts_with(':') || text.find(':') == std::string_view::npos;
  if (!port_only) return parse_host_port(text);
  return parse_host_port(fmt::format("127.0.0.1{}{}", text.starts_with(':') ? "" : ":", text));
}

std::string answer_http(std::string_view request) {
  const size_t line_end = request.find("\r\n");
  const bool complete = request.find("\r\n\r\n") != std::string_view::npos;
  if (!complete && request.size() < kMostRequestBytes) return {};
  if (!complete) return answer("431 Request Header Fields Too Large", "the request is too long\n");
  const std::string_view line = request.substr(0, line_end);
  const size_t first = line.find(' ');
  const size_t last = line.rfind(' ');
  if (first == last || first == 0 || !line.substr(last + 1).starts_with("HTTP/1."))
    return answer("400 Bad Request", "not a request of HTTP/1.1\n");
  const std::string_view method = line.substr(0, first);
  std::string_view path = line.substr(first + 1, last - first - 1);
  path = path.substr(0, path.find('?'));
  if (path != "/metrics") return answer("404 Not Found", "here is only /metrics\n");
  if (method != "GET" && method != "HEAD")
    return answer("405 Method Not Allowed", "only GET and HEAD\n", "Allow: GET, HEAD\r\n");
  return answer("200 OK", Metrics::process().exposition(), {}, method == "GET");
}

struct MetricsServer::Caller {
  UniqueFd fd;
  std::string request{};
  std::string reply{};
  size_t sent = 0;
  EventLoop::TimerId deadline = 0;
};

MetricsServer::MetricsServer(const HostPort& address)
    : listener_(loop_, listen_tcp(address)), loop_("tessera-metrics") {
  const HostPort bound{.host = address.host, .port = local_port(listener_.socket().get())};
  url_ = fmt::format("http://{}/metrics", bound.to_string());
  listener_.start([this](UniqueFd fd) { take(std::move(fd)); },
                  [this](const Error& error) {
                    log_limited_event(LogLevel::warn, "connection.refused", {},
                                      "{}: a connection is refused: {}"_message, url_, error.what());
                  });
  loop_.start();
}

MetricsServer::~MetricsServer() {
  loop_.stop();
}

bool MetricsServer::on_all_interfaces() const {
  return listens_everywhere(listener_.socket().get());
}

void MetricsServer::take(UniqueFd fd) {
  const uint64_t id = next_caller_++;
  const int raw = fd.get();
  auto caller = std::make_unique<Caller>(Caller{.fd = std::move(fd)});
  caller->deadline = loop_.add_timer_after(kCallerTime, [this, id] { drop(id); });
  callers_[id] = std::move(caller);
  loop_.add_fd(raw, EPOLLIN, [this, id](uint32_t) { on_ready(id); });
  if (callers_.size() >= kMostCallers) listener_.pause();  // further callers wait until one has gone
}

void MetricsServer::on_ready(uint64_t id) {
  Caller& caller = *callers_.at(id);
  try {
    if (caller.reply.empty()) {
      std::array<std::byte, kMostRequestBytes> buffer;
      const auto room = std::span(buffer).first(kMostRequestBytes - caller.request.size());
      const auto received = receive_some(caller.fd.get(), room);
      if (!received) return;
      if (*received == 0) return drop(id);
      caller.request.append(reinterpret_cast<const char*>(buffer.data()), *received);
      caller.reply = answer_http(caller.request);
      if (caller.reply.empty()) return;
    }
    const auto left = std::as_bytes(std::span(caller.reply)).subspan(caller.sent);
    caller.sent += send_some(caller.fd.get(), left);
    if (caller.sent == caller.reply.size()) return drop(id);
    loop_.set_events(caller.fd.get(), EPOLLOUT);
  } catch (const Error&) {  // the caller has gone
    drop(id);
  }
}

void MetricsServer::drop(uint64_t id) {
  const auto found = callers_.find(id);
  if (found == callers_.end()) return;
  const std::unique_ptr<Caller> caller = std::move(found->second);
  const bool was_full = callers_.size() >= kMostCallers;
  callers_.erase(found);
  loop_.cancel_timer(caller->deadline);
  loop_.remove_fd(caller->fd.get());
  if (was_full) listener_.resume();
}

}  // namespace tessera
