#include "tools/bench/processes.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <new>
#include <numeric>
#include <utility>

#include "base/fail.h"

namespace tessera::bench {
namespace {

// Both ends are the same program, so a message needs no checks except of its length.
struct MessageHeader {
  uint32_t bytes = 0;
  ErrorCode code = ErrorCode::kOk;  // otherwise the message is an error's text
};

void write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_errno("write to the benchmark's pipe");
    bytes.remove_prefix(static_cast<size_t>(n));
  }
}

void write_message(int fd, ErrorCode code, std::string_view text) {
  const MessageHeader header{static_cast<uint32_t>(text.size()), code};
  write_all(fd, {reinterpret_cast<const char*>(&header), sizeof header});
  write_all(fd, text);
}

[[noreturn]] void run_child(pid_t parent, int pipe, const std::function<void(const Process::Say&)>& body) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);  // the parent ended before the line above
  int status = 0;
  try {
    body([pipe](std::string_view message) { write_message(pipe, ErrorCode::kOk, message); });
  } catch (...) {
    const Status failure = status_of_current_exception();
    status = 1;
    try {
      write_message(pipe, failure.code(), failure.message());
    } catch (const Error&) {  // the parent no longer listens
    }
  }
  std::fflush(stdout);
  ::_exit(status);
}

}  // namespace

Process Process::start(std::string name, const std::function<void(const Say&)>& body) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail_errno("pipe2");
  UniqueFd reading(ends[0]), writing(ends[1]);
  writing.keep_across_fork();
  std::fflush(stdout);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) fail_errno(fmt::format("fork {}", name));
  if (pid == 0) run_child(parent, writing.get(), body);
  return {std::move(name), pid, std::move(reading)};
}

Process::Process(Process&& other) noexcept
    : name_(std::move(other.name_)),
      pid_(std::exchange(other.pid_, -1)),
      pipe_(std::move(other.pipe_)),
      received_(std::move(other.received_)),
      ended_(other.ended_) {}

Process::~Process() {
  if (pid_ < 0) return;
  kill();
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Process::kill() const {
  ::kill(pid_, SIGKILL);
}

bool Process::has_message() const {
  if (ended_) return true;
  MessageHeader header;
  if (received_.size() < sizeof header) return false;
  std::memcpy(&header, received_.data(), sizeof header);
  return received_.size() - sizeof header >= header.bytes;
}

void Process::receive() {
  std::array<char, 4096> buffer{};
  const ssize_t n = ::read(pipe_.get(), buffer.data(), buffer.size());
  if (n < 0 && errno != EINTR) fail_errno(fmt::format("read from {}", name_));
  if (n > 0) received_.append(buffer.data(), static_cast<size_t>(n));
  if (n == 0) ended_ = true;
}

std::string Process::take() {
  MessageHeader header;
  if (received_.size() < sizeof header)
    fail(ErrorCode::kPeerLost, "{} (pid {}) ended unexpectedly"_message, name_, pid_);
  std::memcpy(&header, received_.data(), sizeof header);
  std::string text = received_.substr(sizeof header, header.bytes);
  received_.erase(0, sizeof header + header.bytes);
  if (header.code != ErrorCode::kOk) fail(header.code, "{}: {}"_message, name_, text);
  return text;
}

std::string Process::hear(Deadline deadline) {
  return std::move(hear_all({this, 1}, deadline).front());
}

std::vector<std::string> hear_all(std::span<Process> processes, Deadline deadline) {
  std::vector<std::string> messages(processes.size());
  std::vector<size_t> silent(processes.size());  // indices of processes whose message has not come
  std::iota(silent.begin(), silent.end(), size_t{0});
  const auto take_what_came = [&] {
    std::erase_if(silent, [&](size_t i) {
      if (!processes[i].has_message()) return false;
      messages[i] = processes[i].take();
      return true;
    });
  };
  for (take_what_came(); !silent.empty(); take_what_came()) {
    std::vector<pollfd> polled;
    polled.reserve(silent.size());
    for (const size_t i : silent) polled.push_back({processes[i].pipe_.get(), POLLIN, 0});
    const int ready = ::poll(polled.data(), polled.size(), deadline.poll_ms());
    if (ready < 0 && errno != EINTR) fail_errno("poll");
    if (ready == 0 && deadline.passed())
      fail(ErrorCode::kDeadlineExceeded, "no answer from {} in time"_message, processes[silent.front()].name());
    for (size_t k = 0; ready > 0 && k < polled.size(); ++k)
      if (polled[k].revents != 0) processes[silent[k]].receive();
  }
  return messages;
}

Barrier::Barrier(uint32_t processes) : processes_(processes) {
  void* memory = ::mmap(nullptr, sizeof *arrivals_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail_errno("mmap");
  arrivals_ = new (memory) std::atomic<uint32_t>(0);
}

Barrier::~Barrier() {
  ::munmap(arrivals_, sizeof *arrivals_);
}

// Uses a futex, since std::atomic's wait() is only for the threads of one process.
void Barrier::arrive_and_wait(Deadline deadline) {
  uint32_t arrived = arrivals_->fetch_add(1) + 1;
  const uint32_t all = (arrived + processes_ - 1) / processes_ * processes_;
  if (arrived == all) ::syscall(SYS_futex, arrivals_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  for (; arrived < all; arrived = arrivals_->load()) {
    if (deadline.passed())
      fail(ErrorCode::kDeadlineExceeded, "only {} of {} came in time"_message, arrived % processes_, processes_);
    const auto left = deadline.left().count();
    const timespec limit{left / 1'000'000'000, left % 1'000'000'000};
    ::syscall(SYS_futex, arrivals_, FUTEX_WAIT, arrived, &limit, nullptr, 0);
  }
}

}  // namespace tessera::bench
