// "auto": one of the processes of a machine hosts the store for the others, on a Unix socket in the runtime folder.
//
//   ROOT/store.lock     an flock held by the host: the process that takes it is the next
//   ROOT/store.sock     its listening socket
//   ROOT/store.members  its clients, for which the next host waits
//   ROOT/store.leaving  an flock held briefly by each host or client that ends: they end one after another, so that
//                       the last one finds what the others have left
//
// A host that ends removes files that nobody needs any more. A killed host leaves files, which the next one replaces.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "store/server/server.h"

namespace tessera::store {

// Hosts until it is destroyed. The destructor never throws: if it cannot tidy up, it logs a warning. Thread-compatible.
class AutoHost {
 public:
  static std::string socket_path(const std::string& root) { return root + "/store.sock"; }

  // Null if another process hosts. `own_client` is the client in this process: it goes with the host, so the next host
  // does not wait for it.
  static std::unique_ptr<AutoHost> try_start(const std::string& root, uint64_t own_client);
  ~AutoHost();
  // The files that a killed host has left, by name; empty while somebody hosts.
  static std::vector<std::string> left_over(const std::string& root);
  // For a client that ended while nobody hosts: removes files that no living client needs.
  static void tidy(const std::string& root, uint64_t own_client) noexcept;
  AutoHost(const AutoHost&) = delete;
  AutoHost& operator=(const AutoHost&) = delete;

 private:
  AutoHost(std::string root, uint64_t own_client, UniqueFd lock);
  void hand_over();

  const std::string root_;
  const uint64_t own_client_;
  UniqueFd lock_;
  int64_t revision_floor_ = 0;
  std::unique_ptr<Server> server_;
};

}  // namespace tessera::store
