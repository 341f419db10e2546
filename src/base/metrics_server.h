// Serves Metrics::process() over HTTP: GET /metrics, for Prometheus (`--metrics ADDR`).
//
// Listens on loopback unless another address is given. Callers are limited: 16 connections at a time, 4 KiB for a
// request, 5 s for all of it, one answer per connection. The answer holds the counters and nothing that a caller sent.
//
// Why not a library: cpp-httplib uses a thread per connection and has no such limits, civetweb brings its own server.
// Prometheus needs only one request line of HTTP/1.1 (RFC 9112), which fits the event loop that is there already.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "base/event_loop.h"
#include "base/fd.h"
#include "base/listener.h"
#include "base/socket.h"

namespace tessera {

// "9400", ":9400" (both 127.0.0.1) or "HOST:PORT"; port 0 lets the system choose. Throws Error(kInvalidArgument).
HostPort parse_metrics_address(std::string_view text);

// The whole answer to a request, once its head has ended or is malformed; empty if more must arrive first.
std::string answer_http(std::string_view request);

// Runs on its own thread until it is destroyed.
class MetricsServer {
 public:
  // Throws Error if it cannot listen.
  explicit MetricsServer(const HostPort& address);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  bool on_all_interfaces() const;           // at 0.0.0.0 or [::]
  std::string url() const { return url_; }  // "http://127.0.0.1:9400/metrics"

 private:
  struct Caller;
  void take(UniqueFd fd);
  void on_ready(uint64_t id);
  void drop(uint64_t id);

  Listener listener_;
  std::string url_;
  std::map<uint64_t, std::unique_ptr<Caller>> callers_;
  uint64_t next_caller_ = 1;
  EventLoop loop_;  // last: ends before the members that its callbacks use
};

}  // namespace tessera
