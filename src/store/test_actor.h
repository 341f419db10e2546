// Processes that use a store as a test directs.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <sstream>

#include "base/message.h"
#include "store/test_util.h"

namespace tessera::store {

// A forked process that carries out lines of commands and answers each with a line. The parent must have no threads.
class Actor {
 public:
  using Script = std::function<std::string(const std::string& line)>;

  explicit Actor(const std::function<Script()>& begin) {
    SocketPair pair = socket_pair();
    pair.second.keep_across_fork();
    pid_ = ::fork();
    if (pid_ != 0) {
      fd_ = std::move(pair.first);
      return;
    }
    Status status = status_of([&] {
      const Script script = begin();
      for (std::string line = read_line(pair.second.get()); line != "end"; line = read_line(pair.second.get())) {
        std::string answer;
        const Status outcome = status_of([&] { answer = script(line); });
        write_line(pair.second.get(), outcome.ok() ? answer : outcome.message());
      }
    });
    ::_exit(status.ok() ? 0 : 1);
  }
  ~Actor() { kill(); }
  Actor(const Actor&) = delete;
  Actor& operator=(const Actor&) = delete;

  void tell(const std::string& line) { write_line(fd_.get(), line); }
  std::string hear() { return read_line(fd_.get()); }
  std::string ask(const std::string& line) {
    tell(line);
    return hear();
  }
  // With SIGSTOP, returns once it is stopped.
  void signal(int number) {
    ::kill(pid_, number);
    siginfo_t info{};
    if (number == SIGSTOP) ::waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED);
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
  // Ends it normally; returns the exit status.
  int end() {
    tell("end");
    return wait_end();
  }
  int wait_end() {
    int status = -1;
    ::waitpid(std::exchange(pid_, 0), &status, 0);
    return status;
  }

 private:
  static void write_line(int fd, const std::string& line) {
    const std::string text = line + "\n";
    send_some(fd, std::as_bytes(std::span(text)));
  }
  static std::string read_line(int fd) {
    std::string line;
    for (std::array<std::byte, 1> one; wait_ready(fd, POLLIN, Deadline::after(kLimit));) {
      if (receive_some(fd, one).value_or(0) == 0) fail(ErrorCode::kPeerLost, "the actor has ended"_message);
      if (static_cast<char>(one[0]) == '\n') return line;
      line += static_cast<char>(one[0]);
    }
    fail(ErrorCode::kDeadlineExceeded, "no line came"_message);
  }

  pid_t pid_ = 0;
  UniqueFd fd_;
};

// An actor's commands for its store: "put K V", "own K V" (under a lease), "brief K V" (under a lease of 200 ms),
// "decide K V" (if absent), "get K", "revision K", "wait PREFIX N", "gone PREFIX", "try K" (for a moment).
inline Actor::Script store_script(const std::string& url, const std::string& root = {}) {
  std::shared_ptr<Store> store = open_store(url, {.runtime_dir = root, .connect_timeout = kLimit});
  const auto lease = std::make_shared<LeaseId>(kNoLease);
  return [store, lease](const std::string& line) -> std::string {
    std::istringstream in(line);
    std::string verb, key, value;
    in >> verb >> key >> value;
    if (verb == "put") return store->put(key, value, {}, kLimit), "ok";
    if (verb == "own") {
      if (*lease == kNoLease) *lease = store->grant_lease(std::chrono::minutes(10), kLimit);
      return store->put(key, value, {.lease = *lease}, kLimit), "ok";
    }
    if (verb == "brief")
      return store->put(key, value, {.lease = store->grant_lease(std::chrono::milliseconds(200), kLimit)}, kLimit),
             "ok";
    if (verb == "gone") return store->wait_for(key, [](const StoreView& view) { return view.empty(); }, kLimit), "ok";
    if (verb == "try") return store->get(key, std::chrono::milliseconds(50)) ? "found" : "nothing";
    if (verb == "decide") return store->put_if_absent(key, value, {.decision = true}, kLimit).current.value;
    if (verb == "wait")
      return store->wait_for(
                 key, [&](const StoreView& view) { return view.size() >= std::stoul(value); }, kLimit),
             "ok";
    const auto kv = store->get(key, kLimit);
    if (!kv) return "nothing";
    return verb == "revision" ? std::to_string(kv->mod_revision) : kv->value;
  };
}

}  // namespace tessera::store
