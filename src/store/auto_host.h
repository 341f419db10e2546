// "auto": one of the processes of a machine hosts the store for the others, on a Unix socket in the runtime folder.
//
//   ROOT/store.lock     an flock held by the host: the process that takes it is the next
//   ROOT/store.sock     where it listens
//   ROOT/store.members  its clients, for the next host: whom to wait for
//   ROOT/store.leaving  an flock held for a moment by whoever ends, host or client: one after the other, so that the
//                       last one finds what the others have left
//
// A host that ends removes files that nobody needs any more; a killed host leaves files that the next one replaces.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "store/server/server.h"

namespace tessera::store {

// Hosts until it is destroyed, which never throws: what cannot be tidied up is a warning in the log. Thread-compatible.
class AutoHost {
 public:
  static std::string socket_path(const std::string& root) { return root + "/store.sock"; }

  // Null if another process hosts. `own_client` is the client in this process: it goes when the host goes, so the next
  // host shall not wait for it.
  static std::unique_ptr<AutoHost> try_start(const std::string& root, uint64_t own_client);
  ~AutoHost();
  // What a host that was killed has left, by name; nothing while somebody hosts.
  static std::vector<std::string> left_over(const std::string& root);
  // For a client that has ended while nobody hosts: removes files that no living client needs.
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
