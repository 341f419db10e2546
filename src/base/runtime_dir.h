// The folder where one user's processes on one machine find each other: sockets and locks.
//
//   ROOT/                 mode 0700, ours, not a symbolic link
//   ROOT/p-<16 hex>/      one for each process (in fact each RuntimeDir), with
//   ROOT/p-<16 hex>/lock  an flock held for the RuntimeDir's life
//   ROOT/p-<16 hex>/owner its process, for people: `tessera doctor`
//
// Only that flock tells whether a folder is left over from a dead process, never a pid. A process that opens the root
// removes such folders. A forked child holds none of its parent's locks.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "base/folder_watch.h"

namespace tessera {

// The folder of one process, seen from outside.
struct ProcessFolder {
  std::string path{};
  bool living = false;  // its lock is held
  // What the process says about itself; zero and empty if it does not. For people: no decision depends on it.
  int32_t pid = 0;        // in the pid namespace of that process
  std::string command{};  // with its arguments, shortened
  std::string role{};     // "trainer/3"
  int64_t since = 0;      // seconds since the epoch
};

// Owns ROOT/p-<16 hex>/ and removes it in the end. Move-only; const members are thread-safe.
class RuntimeDir {
 public:
  // TESSERA_RUNTIME_DIR, else $XDG_RUNTIME_DIR/tessera (if that folder exists), else /tmp/tessera-UID.
  static std::string default_root();

  // Creates the root if needed (its parent must exist), checks it and removes leftovers; returns its path without a
  // final '/'. Throws kPermissionDenied, which names the path and TESSERA_RUNTIME_DIR, if the root belongs to another
  // user, is open to others or is not a real folder; kInvalidArgument if the path of a socket in it would be too long.
  static std::string prepare_root(std::string root = default_root());
  // The same, and creates this process's folder. `role` tells people what this process is: "trainer/3".
  static RuntimeDir open(std::string root = default_root(), std::string_view role = {});
  // The folders in the root, by path; removes nothing. Empty if there is no root; throws as prepare_root() does.
  static std::vector<ProcessFolder> folders(const std::string& root = default_root());
  // The paths of the files called `name` in folders of living processes. Throws likewise.
  static std::vector<std::string> living_files(const std::string& root, std::string_view name);

  // Adds the root and its present folders to `watch`; new folders must be added when they appear.
  static void watch(const std::string& root, FolderWatch& watch);

  RuntimeDir(RuntimeDir&&) noexcept = default;
  RuntimeDir& operator=(RuntimeDir&& other) noexcept;
  ~RuntimeDir();

  const std::string& root() const { return root_; }
  const std::string& own() const { return own_; }
  // A path in this process's folder; `name` has at most kMaxNameBytes and no '/'.
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

}  // namespace tessera
