// Serves Metrics::process() over HTTP: GET /metrics, for Prometheus (`--metrics ADDR`).
//
// Loopback unless another address is written out. What a caller may do is bounded: 16 connections at a time, 4 KiB of
// request, 5 s for all of it, one answer a connection. The answer is the counters and nothing that a caller names.
//
// Why not a library: cpp-httplib spends a thread a connection and reads without such bounds, civetweb brings a server
// of its own; what Prometheus needs of HTTP/1.1 (RFC 9112) is one request line, on the event loop that is there
// already.
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

// The whole answer to a request of which at least the head's end has arrived, or which is malformed; empty where more
// must come first.
std::string answer_http(std::string_view request);

// On a thread of its own, until it is destroyed.
class MetricsServer {
 public:
  // Throws Error where it cannot listen.
  explicit MetricsServer(const HostPort& address);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  bool on_all_interfaces() const;           // of this host: 0.0.0.0 or [::]
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
  EventLoop loop_;  // last: ends before what its callbacks use
};

}  // namespace tessera
