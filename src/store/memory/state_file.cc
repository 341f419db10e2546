#include "store/memory/state_file.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "base/fail.h"
#include "base/file_lock.h"
#include "base/log.h"
#include "store/limits.h"
#include "store/protocol.h"

namespace tessera::store {
namespace {

constexpr int64_t kFormat = 1;                // PRAGMA user_version
constexpr int64_t kApplication = 0x56534b54;  // PRAGMA application_id, "TKSV"
constexpr int kMaxLogPages = 4096;            // 16 MiB; then they are moved into the database file
constexpr uint64_t kLogHeaderBytes = 32, kLogFrameBytes = 24;

constexpr char kSchema[] = R"(
  BEGIN;
  CREATE TABLE keys(key BLOB PRIMARY KEY, value BLOB NOT NULL, create_revision INTEGER NOT NULL,
    mod_revision INTEGER NOT NULL, version INTEGER NOT NULL, lease INTEGER NOT NULL, decision INTEGER NOT NULL)
    WITHOUT ROWID;
  CREATE TABLE leases(lease INTEGER PRIMARY KEY, ttl INTEGER NOT NULL);
  CREATE TABLE store(revision INTEGER NOT NULL);
  INSERT INTO store VALUES(0);
  PRAGMA application_id = 1448299348;
  PRAGMA user_version = 1;
  COMMIT;
)";
static_assert(kApplication == 1448299348);

// The error of the latest call on `database`.
Status status_of(sqlite3* database) {
  const auto code_of = [](int error) {
    switch (error) {
      case SQLITE_FULL:
      case SQLITE_NOMEM:
        return ErrorCode::kResourceExhausted;
      case SQLITE_READONLY:
      case SQLITE_PERM:
      case SQLITE_CANTOPEN:
        return ErrorCode::kPermissionDenied;
      case SQLITE_CORRUPT:
      case SQLITE_NOTADB:
      case SQLITE_ERROR:  // a table is missing or has another form
        return ErrorCode::kDataLoss;
      default:
        return ErrorCode::kUnavailable;
    }
  };
  return failed(code_of(::sqlite3_errcode(database) & 0xff), "{}: {}"_message, ::sqlite3_db_filename(database, "main"),
                ::sqlite3_errmsg(database));
}

void execute(sqlite3* database, const char* sql) {
  if (::sqlite3_exec(database, sql, nullptr, nullptr, nullptr) != SQLITE_OK) status_of(database).throw_if_error();
}

// A prepared statement: bind() its parameters in order, then run() it, or step() through its rows.
class Statement {
 public:
  Statement(sqlite3* database, const char* sql) : database_(database) {
    check(::sqlite3_prepare_v2(database, sql, -1, &statement_, nullptr));
  }
  ~Statement() { ::sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  Statement& bind(int64_t value) {
    check(::sqlite3_bind_int64(statement_, ++bound_, value));
    return *this;
  }
  Statement& bind(std::string_view bytes) {  // the bytes must outlive run()
    check(::sqlite3_bind_blob64(statement_, ++bound_, bytes.empty() ? "" : bytes.data(), bytes.size(), SQLITE_STATIC));
    return *this;
  }
  bool step() {
    const int outcome = ::sqlite3_step(statement_);
    const Status status = outcome == SQLITE_ROW || outcome == SQLITE_DONE ? Status() : status_of(database_);
    if (outcome != SQLITE_ROW) {
      ::sqlite3_reset(statement_);
      bound_ = 0;
    }
    status.throw_if_error();
    return outcome == SQLITE_ROW;
  }
  void run() {
    while (step()) {
    }
  }
  int64_t integer(int column) { return ::sqlite3_column_int64(statement_, column); }
  std::string bytes(int column) {
    const auto* data = static_cast<const char*>(::sqlite3_column_blob(statement_, column));
    return {data == nullptr ? "" : data, static_cast<size_t>(::sqlite3_column_bytes(statement_, column))};
  }

 private:
  void check(int outcome) const {
    if (outcome != SQLITE_OK) status_of(database_).throw_if_error();
  }

  sqlite3* database_;
  sqlite3_stmt* statement_ = nullptr;
  int bound_ = 0;
};

int64_t number(sqlite3* database, const char* sql) {
  Statement statement(database, sql);
  return statement.step() ? statement.integer(0) : 0;
}

std::string text(sqlite3* database, const char* sql) {
  Statement statement(database, sql);
  return statement.step() ? statement.bytes(0) : "";
}

using Connection = std::unique_ptr<sqlite3, decltype(&::sqlite3_close)>;

uint64_t size_of_file(const std::string& path) {
  struct stat status{};
  return ::stat(path.c_str(), &status) == 0 ? static_cast<uint64_t>(status.st_size) : 0;
}

// Moves the log into the database file. If this fails, the log grows on.
void fold_log(sqlite3* database) {
  if (::sqlite3_wal_checkpoint_v2(database, nullptr, SQLITE_CHECKPOINT_TRUNCATE, nullptr, nullptr) != SQLITE_OK)
    log_event(LogLevel::warn, "store.log_kept", {}, "the log cannot be merged into its file: {}"_message,
              status_of(database).message());
}

// Reports how much of a log of `bytes` was dropped: a change whose write was interrupted by a kill or a power loss.
void report_cut(sqlite3* database, uint64_t bytes) {
  int frames = 0;
  ::sqlite3_wal_checkpoint_v2(database, nullptr, SQLITE_CHECKPOINT_PASSIVE, &frames, nullptr);
  const auto frame_bytes = kLogFrameBytes + static_cast<uint64_t>(number(database, "PRAGMA page_size"));
  const uint64_t sound = frames <= 0 ? 0 : kLogHeaderBytes + static_cast<uint64_t>(frames) * frame_bytes;
  if (bytes > sound)
    log_event(LogLevel::warn, "store.log_cut", {{"bytes", bytes - sound}},
              "{}-wal: its last {} bytes belong to an unfinished change, and are cut"_message,
              ::sqlite3_db_filename(database, "main"), bytes - sound);
}

// Makes the tables of a new file.
void check_format(sqlite3* database, const std::string& path) {
  const int64_t format = number(database, "PRAGMA user_version");
  const int64_t application = number(database, "PRAGMA application_id");
  if (format == 0 && application == 0 && number(database, "SELECT count(*) FROM sqlite_schema") == 0)
    return execute(database, kSchema);
  if (application != kApplication) fail(ErrorCode::kMismatch, "{} is a database of something else"_message, path);
  if (format != kFormat)
    fail(ErrorCode::kMismatch, "{} has format {}, this release ({}) reads {}: use the release that wrote it"_message,
         path, format, release(), kFormat);
}

Connection connect(const std::string& path) {
  // Created here, so that nobody else can read it; SQLite gives its log the same mode.
  if (!UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600))) fail_errno(path);
  const uint64_t log_bytes = size_of_file(path + "-wal");
  sqlite3* database = nullptr;
  const int outcome = ::sqlite3_open_v2(path.c_str(), &database,
                                        SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOFOLLOW | SQLITE_OPEN_EXRESCODE, nullptr);
  Connection connection(database, ::sqlite3_close);
  if (database == nullptr) fail(ErrorCode::kResourceExhausted, "{}: no memory to open it"_message, path);
  if (outcome != SQLITE_OK) status_of(database).throw_if_error();
  execute(database, "PRAGMA locking_mode = EXCLUSIVE");
  if (text(database, "PRAGMA journal_mode = WAL") != "wal")
    fail(ErrorCode::kUnavailable, "{}: its file system cannot hold a write-ahead log"_message, path);
  check_format(database, path);
  if (const std::string finding = text(database, "PRAGMA quick_check(1)"); finding != "ok")
    fail(ErrorCode::kDataLoss, "{} is damaged: {}"_message, path, finding);
  report_cut(database, log_bytes);
  fold_log(database);
  return connection;
}

void sync_folder(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd || ::fsync(fd.get()) != 0) fail_errno(fmt::format("sync {}", path));
}

// A change that nobody would publish again must be on the device before it is answered; see the header.
bool must_be_synced(const Change& change) {
  if (change.lease != kNoLease) return false;
  return std::ranges::any_of(change.events, [](const Event& event) {
    return event.type == StoreEvent::Type::kDelete || event.kv->lease == kNoLease || event.kv->decision;
  });
}

KeyValue read_row(Statement& row) {
  KeyValue kv{.key = row.bytes(0),
              .value = row.bytes(1),
              .create_revision = row.integer(2),
              .mod_revision = row.integer(3),
              .version = row.integer(4),
              .lease = row.integer(5),
              .decision = row.integer(6) != 0};
  check_key(kv.key);
  const bool in_range = kv.create_revision >= 0 && kv.create_revision <= kv.mod_revision &&
                        kv.mod_revision <= kMaxRevision && kv.version > 0 && kv.lease >= 0 &&
                        kv.value.size() <= kMaxStoreValueBytes;
  if (!in_range) fail(ErrorCode::kInvalidArgument, "the row of '{}' is out of range"_message, kv.key);
  return kv;
}

}  // namespace

struct StateFile::Database {
  explicit Database(const std::string& path) : connection(connect(path)) {
    ::sqlite3_wal_hook(
        get(),
        [](void* pages, sqlite3*, const char*, int count) {
          *static_cast<int*>(pages) = count;
          return SQLITE_OK;
        },
        &log_pages);
  }

  sqlite3* get() const { return connection.get(); }

  void write(const Change& change) {
    for (const Event& event : change.events) {
      const KeyValue& kv = *event.kv;
      if (event.type == StoreEvent::Type::kDelete) {
        erase.bind(kv.key).run();
      } else {
        put.bind(kv.key).bind(kv.value).bind(kv.create_revision).bind(kv.mod_revision);
        put.bind(kv.version).bind(kv.lease).bind(int64_t{kv.decision}).run();
      }
    }
    if (change.lease != kNoLease && change.ttl > Duration::zero()) {
      grant.bind(change.lease).bind(change.ttl.count()).run();
    } else if (change.lease != kNoLease) {
      end.bind(change.lease).run();
    }
    raise.bind(change.revision).run();
  }

  Connection connection;
  int log_pages = 0;
  bool synced = true;  // the value of PRAGMA synchronous
  Statement put{get(), "INSERT OR REPLACE INTO keys VALUES(?, ?, ?, ?, ?, ?, ?)"};
  Statement erase{get(), "DELETE FROM keys WHERE key = ?"};
  Statement grant{get(), "INSERT OR REPLACE INTO leases VALUES(?, ?)"};
  Statement end{get(), "DELETE FROM leases WHERE lease = ?"};
  Statement raise{get(), "UPDATE store SET revision = ?"};
};

StateFile::StateFile(const std::string& folder) : path_(folder + "/store.db") {
  const bool made = ::mkdir(folder.c_str(), 0700) == 0;
  if (!made && errno != EEXIST) fail_errno(fmt::format("make the store's folder {}", folder));
  lock_ = try_lock_file(folder + "/lock");
  if (!lock_)
    fail(ErrorCode::kAlreadyExists, "another store keeps its state in {}: give each store its own folder"_message,
         folder);
  try {
    database_ = std::make_unique<Database>(path_);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDataLoss) throw;
    fail(error.code(), "{}: move the folder's files away to start over"_message, error.what());
  }
  sync_folder(folder);
  if (made) sync_folder(std::filesystem::absolute(folder).parent_path());
}

StateFile::~StateFile() = default;

void StateFile::load(State& state, TimePoint now) {
  try {
    Statement leases(database_->get(), "SELECT lease, ttl FROM leases");
    while (leases.step()) {
      check_ttl(Duration(leases.integer(1)));
      state.grant(leases.integer(0), Duration(leases.integer(1)), now);
    }
    int64_t highest = 0;
    for (const char* sql : {"SELECT revision FROM store", "SELECT max(mod_revision) FROM keys"}) {
      const int64_t revision = number(database_->get(), sql);
      if (revision < 0 || revision > kMaxRevision) fail(ErrorCode::kInvalidArgument, "revision {}"_message, revision);
      highest = std::max(highest, revision);
    }
    if (highest > 0) state.raise_revision(highest);
    Statement keys(database_->get(),
                   "SELECT key, value, create_revision, mod_revision, version, lease, decision FROM keys");
    while (keys.step()) state.restore(read_row(keys), true);
  } catch (const Error& error) {
    fail(ErrorCode::kDataLoss,
         "{} holds data that no store writes ({}): move the folder's files away to start over"_message, path_,
         error.what());
  }
}

void StateFile::keep(const Change& change) {
  sqlite3* const database = database_->get();
  if (const bool sync = must_be_synced(change); sync != database_->synced) {
    execute(database, sync ? "PRAGMA synchronous = FULL" : "PRAGMA synchronous = NORMAL");
    database_->synced = sync;
  }
  try {
    execute(database, "BEGIN IMMEDIATE");
    database_->write(change);
    execute(database, "COMMIT");
  } catch (const Error& error) {
    if (::sqlite3_get_autocommit(database) == 0) ::sqlite3_exec(database, "ROLLBACK", nullptr, nullptr, nullptr);
    fail(error.code(), "the store cannot keep it on disk: {}"_message, error.what());
  }
  if (std::exchange(database_->log_pages, 0) > kMaxLogPages) fold_log(database);
}

}  // namespace tessera::store
