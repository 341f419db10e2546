#include "tests/support/harness.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include <fmt/format.h>

#include "base/config.h"
#include "base/fail.h"
#include "tessera/error.h"
#include "tessera/store.h"

namespace tessera::test {
namespace {

constexpr useconds_t kPollMicroseconds = 2000;  // waitpid has no deadline of its own

// The stores and clients of these tests share a token, whatever runtime folder they have; it is in the environment
// before anything reads that.
[[maybe_unused]] const int kTokenIsSet = ::setenv("TESSERA_TOKEN", "the token of the process tests", 1);

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

struct ProcessGroup::Child {
  std::string name;
  pid_t pid = -1;
  std::string output;  // file
};

Footprint Footprint::of(pid_t pid) {
  const std::string process = fmt::format("/proc/{}/", pid);
  const auto entries = [&](const char* folder) {
    const std::filesystem::directory_iterator all(process + folder);
    return static_cast<uint32_t>(std::distance(begin(all), end(all)));
  };
  Footprint print{.fds = entries("fd"), .threads = entries("task"), .mappings = 0};
  std::ifstream maps(process + "maps");
  for (std::string line; std::getline(maps, line);) print.mappings += line.find("/memfd:") != std::string::npos ? 1 : 0;
  return print;
}

std::string Footprint::to_string() const {
  return fmt::format("{} descriptors, {} threads, {} mappings", fds, threads, mappings);
}

std::chrono::seconds hang_limit() {
  return std::chrono::seconds(60);
}

TemporaryFolder::TemporaryFolder() {
  std::string path = (std::filesystem::temp_directory_path() / "tessera-test-XXXXXX").string();
  if (::mkdtemp(path.data()) == nullptr) fail_errno("mkdtemp " + path);
  path_ = path;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

ProcessGroup::ProcessGroup() : start_(std::chrono::steady_clock::now()) {}

ProcessGroup::~ProcessGroup() {
  for (const Child& child : children_) {
    if (child.pid <= 0) continue;
    ::kill(child.pid, SIGKILL);
    ::waitpid(child.pid, nullptr, 0);
  }
  if (store_ > 0) {
    ::kill(store_, SIGKILL);
    ::waitpid(store_, nullptr, 0);
  }
}

pid_t ProcessGroup::start(const std::string& name, std::function<int()> body) {
  Child child{.name = name, .pid = -1, .output = folder_.path() + "/out-" + std::to_string(started_++)};
  std::fflush(nullptr);
  child.pid = ::fork();
  if (child.pid < 0) fail_errno("fork");
  if (child.pid > 0) {
    children_.push_back(child);
    return child.pid;
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // nothing outlives the test
  const int fd = ::open(child.output.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_APPEND, 0600);
  ::dup2(fd, STDERR_FILENO);
  ::setenv("TESSERA_RUNTIME_DIR", (folder_.path() + "/run").c_str(), 1);
  Config::forget();  // the test may have asked it
  int status = 1;
  try {
    status = body();
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    status = 10 + static_cast<int>(error.code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  std::fflush(nullptr);
  ::_exit(status);
}

std::string ProcessGroup::start_store(const std::string& url) {
  int ends[2];
  if (::pipe(ends) != 0) fail_errno("pipe");
  std::fflush(nullptr);
  store_ = ::fork();
  if (store_ < 0) fail_errno("fork");
  if (store_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const auto server = serve_store(url);
    const std::string address = server->address();
    if (::write(ends[1], address.data(), address.size()) < 0) ::_exit(1);
    ::close(ends[1]);
    while (true) ::pause();
  }
  ::close(ends[1]);
  std::string address(256, '\0');
  pollfd readable{.fd = ends[0], .events = POLLIN, .revents = 0};
  const ssize_t count =
      ::poll(&readable, 1, 20'000) == 1 ? ::read(ends[0], address.data(), address.size()) : ssize_t{0};
  ::close(ends[0]);
  if (count <= 0) fail_internal("the store did not start");
  address.resize(static_cast<size_t>(count));
  return address;
}

double seconds_of_death(std::span<const Outcome> outcomes) {
  const auto died = std::ranges::find(outcomes, -SIGKILL, &Outcome::status);
  return died == outcomes.end() ? 0 : died->seconds;
}

void ProcessGroup::kill_store() {
  ::kill(store_, SIGKILL);
  ::waitpid(store_, nullptr, 0);
  store_ = -1;
}

void ProcessGroup::kill(pid_t pid, int signal) {
  ::kill(pid, signal);
}

// Nothing while it lives; after the deadline it is killed.
std::optional<Outcome> ProcessGroup::reap(Child& child, std::chrono::steady_clock::time_point deadline) const {
  const bool hung = std::chrono::steady_clock::now() > deadline;
  if (hung) ::kill(child.pid, SIGKILL);
  int status = 0;
  if (::waitpid(child.pid, &status, hung ? 0 : WNOHANG) != child.pid) return {};
  child.pid = -1;
  return Outcome{.name = child.name,
                 .status = hung                ? -1000
                           : WIFEXITED(status) ? WEXITSTATUS(status)
                                               : -WTERMSIG(status),
                 .output = read_file(child.output),
                 .seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count()};
}

ProcessGroup::Child& ProcessGroup::child(pid_t pid) {
  const auto found = std::ranges::find(children_, pid, &Child::pid);
  if (found == children_.end()) fail_internal("no process {}", pid);
  return *found;
}

Outcome ProcessGroup::wait_for(pid_t pid, std::chrono::seconds limit) {
  return wait({&pid, 1}, limit).front();
}

std::vector<Outcome> ProcessGroup::wait(std::span<const pid_t> pids, std::chrono::seconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::vector<std::optional<Outcome>> outcomes(pids.size());
  for (size_t left = pids.size(); left > 0;) {
    for (size_t i = 0; i < pids.size(); ++i) {
      if (outcomes[i]) continue;
      outcomes[i] = reap(child(pids[i]), deadline);
      left -= outcomes[i] ? 1 : 0;
    }
    if (left > 0) ::usleep(kPollMicroseconds);
  }
  std::vector<Outcome> all;
  for (std::optional<Outcome>& outcome : outcomes) all.push_back(std::move(*outcome));
  return all;
}

std::vector<Outcome> ProcessGroup::wait(std::chrono::seconds limit) {
  std::erase_if(children_, [](const Child& child) { return child.pid <= 0; });  // waited for already
  std::vector<pid_t> pids;
  for (const Child& child : children_) pids.push_back(child.pid);
  std::vector<Outcome> outcomes = wait(pids, limit);
  children_.clear();
  return outcomes;
}

std::vector<std::string> ProcessGroup::left_over() const {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path() + "/run", ignored))
    names.push_back(entry.path().filename().string());
  return names;
}

}  // namespace tessera::test
