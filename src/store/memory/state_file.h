// The store's state on disk, for a store that must survive its own death: used by `tessera store --data DIR`.
//
//   DIR/store.db, DIR/store.db-wal   an SQLite database and its write-ahead log: docs/formats/store-protocol.md
//   DIR/lock                         an flock held by the store that uses the folder
//
// SQLite exists to write files that survive a kill, a full disk and a torn write at any point: its log has checksums, a
// transaction is on disk as a whole or not at all, and pages of deleted keys are reused. The state itself stays in
// memory; the file is read once, at the start.
//
// When a change is on disk. After keep() every change survives the death of the store's process, by whatever signal. A
// change that nobody would publish again (a put without a lease, a decision, a deletion) is also synced to the device
// before keep() returns, and so survives a crash of the machine. A grant, the end of a lease and a put under one are
// synced with the next such change: after a power loss their owners, which run elsewhere, publish them again.
#pragma once

#include <memory>
#include <string>

#include "base/clock.h"
#include "base/fd.h"
#include "store/memory/state.h"

namespace tessera::store {

// Thread-compatible.
class StateFile {
 public:
  // Opens the folder, and creates it if needed (its parent must exist). Throws kAlreadyExists if another store holds
  // it, kDataLoss if the file is damaged, kMismatch if a later release has written it, and errors of the disk.
  explicit StateFile(const std::string& folder);
  ~StateFile();
  StateFile(const StateFile&) = delete;
  StateFile& operator=(const StateFile&) = delete;

  // Loads the file into an empty state that has no keeper yet: leases with their full ttl, keys with their revisions,
  // and a revision above all that clients have seen.
  void load(State& state, TimePoint now);
  // Throws, without having kept anything, if the disk refuses: kResourceExhausted if it is full.
  void keep(const Change& change);

 private:
  struct Database;
  const std::string path_;
  UniqueFd lock_;
  std::unique_ptr<Database> database_;
};

}  // namespace tessera::store
