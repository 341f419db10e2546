// The folder where one user's processes on one machine find each other: sockets and locks.
//
//   ROOT/                 0700, ours, not a symbolic link
//   ROOT/p-<16 hex>/      one a process (in fact one a RuntimeDir), holding
//   ROOT/p-<16 hex>/lock  an flock held for the RuntimeDir's life
//
// Whether a folder is left over from a dead process is judged by that flock alone, never by a pid; whoever opens the
// root removes such folders. A forked child holds none of its parent's locks.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/fd.h"

namespace tessera {

// Owns ROOT/p-<16 hex>/ and removes it at the end. Move-only; const members are thread-safe.
class RuntimeDir {
 public:
  // TESSERA_RUNTIME_DIR, else $XDG_RUNTIME_DIR/tessera (if that folder exists), else /tmp/tessera-UID.
  static std::string default_root();

  // Creates the root if need be (its parent must exist), checks it and removes leftovers; returns its path without a
  // final '/'. Throws kPermissionDenied naming the path and TESSERA_RUNTIME_DIR if the root is another user's, is open
  // to others or is not a real folder; kInvalidArgument if a socket's path in it would be too long.
  static std::string prepare_root(std::string root = default_root());
  // The same, and makes the own folder.
  static RuntimeDir open(std::string root = default_root());

  RuntimeDir(RuntimeDir&&) noexcept = default;
  RuntimeDir& operator=(RuntimeDir&& other) noexcept;
  ~RuntimeDir();

  const std::string& root() const { return root_; }
  const std::string& own() const { return own_; }
  // A path in the own folder; `name` is at most kMaxNameBytes long and has no '/'.
  std::string path(std::string_view name) const;

  static constexpr size_t kMaxNameBytes = 24;

 private:
  RuntimeDir() = default;
  void remove_own() noexcept;

  std::string root_;
  std::string own_;
  UniqueFd lock_;
  pid_t owner_ = 0;  // a forked child removes nothing
};

// Takes an exclusive flock on `path` (created 0600 if need be) without waiting; empty if someone else holds it. The
// lock ends with the descriptor. A file removed by its holder meanwhile counts as held: try again.
UniqueFd try_lock_file(const std::string& path);
// The same, but waits for whoever holds it; empty if that takes longer. For locks that are held briefly.
UniqueFd lock_file(const std::string& path, const Deadline& deadline);

}  // namespace tessera
