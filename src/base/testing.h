// Small helpers for the layers' tests.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "base/clock.h"
#include "base/fail.h"
#include "tessera/error.h"

namespace tessera {

// For work that takes no time: a later end is a hang, under sanitizers too.
inline Deadline soon() {
  return Deadline::after(seconds(60));
}

// The message of the Error that `call` throws, after its code if that is not kInvalidArgument.
template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidArgument) return error.what();
    return std::string(to_string(error.code())) + ": " + error.what();
  }
  return "(no error)";
}

// What it throws, as a status.
template <typename Call>
Status status_of(Call call) {
  try {
    call();
    return {};
  } catch (...) {
    return status_of_current_exception();
  }
}

// The number of open descriptors of this process.
inline size_t open_fds() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// Makes a system call fail with EPERM in this process from now on, as filters of container runtimes do.
inline bool forbid_system_call(long number, uint32_t error = EPERM) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(number), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{static_cast<unsigned short>(std::size(program)), program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// A small imitation of /proc and /sys.
class FakeMachine {
 public:
  FakeMachine() : root_(std::filesystem::temp_directory_path() / ("tessera-machine." + std::to_string(::getpid()))) {}
  ~FakeMachine() { std::filesystem::remove_all(root_); }
  FakeMachine(const FakeMachine&) = delete;
  FakeMachine& operator=(const FakeMachine&) = delete;

  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
  }
  std::string root() const { return root_.string(); }

 private:
  std::filesystem::path root_;
};

}  // namespace tessera
