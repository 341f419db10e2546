#include "checkpoint/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <exception>
#include <fstream>
#include <iostream>

#include "base/fail.h"
#include "checkpoint/test_folder.h"
#include "tessera/checkpoint.h"

namespace tessera::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

void write_text(const std::filesystem::path& path, std::string_view text) {
  AtomicFile file(path, static_cast<int64_t>(text.size()));
  file.append(std::as_bytes(std::span(text)));
  file.commit();
}

// The error of write(path, bytes), if any.
Status status_of_writing(const std::filesystem::path& path, int64_t bytes) {
  try {
    const std::string text(static_cast<size_t>(bytes), 'x');
    write_text(path, text);
    return {};
  } catch (...) {
    return status_of_current_exception();
  }
}

// Runs `body` in a forked child; returns its exit status, or -signal. The child destroys nothing: the folder is the
// parent's to remove.
template <typename Body>
int in_child(Body body) {
  constexpr int kThrew = 99;
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      ::_exit(body());
    } catch (const std::exception& error) {
      std::cerr << "in the child: " << error.what() << std::endl;
      ::_exit(kThrew);
    }
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

TEST(AtomicFile, CreatesAndReplaces) {
  const TestFolder folder;
  write_text(folder / "f", "first");
  EXPECT_EQ(folder.read("f"), "first");
  write_text(folder / "f", "second, longer");
  EXPECT_EQ(folder.read("f"), "second, longer");
  write_text(folder / "empty", "");
  EXPECT_THAT(folder.names(), ::testing::UnorderedElementsAre("f", "empty"));
}

TEST(AtomicFile, AnUncommittedFileLeavesNothingAndTheOldOneStays) {
  const TestFolder folder;
  write_text(folder / "f", "old");
  {
    AtomicFile file(folder / "f", 100);
    file.append(std::as_bytes(std::span("part")));
  }
  EXPECT_THAT(folder.names(), ElementsAre("f"));
  EXPECT_EQ(folder.read("f"), "old");
}

TEST(AtomicFile, AKilledWriterLeavesNothing) {
  const TestFolder folder;
  const int outcome = in_child([&] {
    AtomicFile file(folder / "f", 1 << 20);
    file.append(std::as_bytes(std::span("half of it")));
    return ::kill(::getpid(), SIGKILL);
  });
  EXPECT_EQ(outcome, -SIGKILL);
  EXPECT_THAT(folder.names(), IsEmpty());
}

TEST(AtomicFile, RemovesWhatAWriterKilledBeforeItsRenameLeft) {
  const TestFolder folder;
  folder.write("f", "old");
  folder.write(".f.new", "stale");
  write_text(folder / "f", "new");
  EXPECT_EQ(folder.read("f"), "new");
  EXPECT_THAT(folder.names(), ElementsAre("f"));
}

TEST(AtomicFile, AFileSizeLimitIsNamedBeforeAnythingIsWritten) {
  const TestFolder folder;
  EXPECT_EQ(in_child([&] {
              const rlimit limit{4096, 4096};
              if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 9;
              const Status status = status_of_writing(folder / "f", 5000);
              const bool clear =
                  status.message().find("5000 bytes exceed the file size limit of 4096") != std::string::npos;
              return status.code() == ErrorCode::kResourceExhausted && clear ? 0 : 1;
            }),
            0);
  EXPECT_THAT(folder.names(), IsEmpty());
}

bool write_proc(const char* path, std::string_view text) {
  std::ofstream file(path);
  file << text << std::flush;
  return file.good();
}

// Gives this process separate mounts: directly if it has the right, otherwise as root of a user namespace. There it
// needs a user that the namespace knows, or every new file fails with EOVERFLOW.
bool enter_own_mounts() {
  const uid_t user = ::geteuid();
  const gid_t group = ::getegid();
  if (::unshare(CLONE_NEWNS) != 0) {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0 || !write_proc("/proc/self/setgroups", "deny") ||
        !write_proc("/proc/self/uid_map", fmt::format("0 {} 1", user)) ||
        !write_proc("/proc/self/gid_map", fmt::format("0 {} 1", group)))
      return false;
  }
  return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

TEST(AtomicFile, AFullDiskIsAnErrorThatNamesPathAndBytes) {
  const TestFolder folder;
  constexpr int kCannotMount = 77;
  const int outcome = in_child([&] {
    if (!enter_own_mounts()) return kCannotMount;
    if (::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=1m") != 0) return kCannotMount;
    write_text(folder / "f", "old");
    const Status status = status_of_writing(folder / "f", 2 << 20);
    if (status.code() != ErrorCode::kResourceExhausted) return 1;
    if (status.message().find((folder / "f").string() + ": cannot write 2097152 bytes") == std::string::npos) return 2;
    if (folder.names() != std::vector<std::string>{"f"} || folder.read("f") != "old") return 3;
    return status_of_writing(folder / "f", 1 << 19).ok() ? 0 : 4;  // and the space is free again
  });
  if (outcome == kCannotMount) GTEST_SKIP() << "neither the right to mount a tmpfs nor a user namespace that has it";
  EXPECT_EQ(outcome, 0);
}

// From here on openat() with O_TMPFILE fails as on a file system without it.
bool forbid_tmpfile() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 4),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
      BPF_STMT(BPF_ALU | BPF_AND | BPF_K, O_TMPFILE),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, O_TMPFILE, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(filter), filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(AtomicFile, WithoutUnnamedFilesAHiddenOneIsWrittenAndRenamed) {
  const TestFolder folder;
  folder.write("f", "old");
  folder.write(".f.new", "stale");
  EXPECT_EQ(in_child([&] {
              if (!forbid_tmpfile()) return 9;
              {
                AtomicFile dropped(folder / "f", 100);
                if (folder.names().size() != 2) return 1;  // the hidden file is there in the meantime
              }
              if (folder.names() != std::vector<std::string>{"f"} || folder.read("f") != "old") return 2;
              write_text(folder / "f", "new");
              write_text(folder / "g", "another");
              return 0;
            }),
            0);
  EXPECT_EQ(folder.read("f"), "new");
  EXPECT_THAT(folder.names(), ::testing::UnorderedElementsAre("f", "g"));
}

TEST(AtomicFile, SaysWhatIsWrongWithTheTarget) {
  const TestFolder folder;
  EXPECT_THAT(status_of_writing(folder / "absent/f", 1).message(), HasSubstr("absent"));
  EXPECT_EQ(status_of_writing(folder / "absent/f", 1).code(), ErrorCode::kNotFound);
  EXPECT_FALSE(status_of_writing(folder.path() / "", 1).ok());
  std::filesystem::create_directory(folder / "d");
  EXPECT_THAT(status_of_writing(folder / "d", 1).message(), HasSubstr("cannot replace"));
  EXPECT_THAT(folder.names(), ElementsAre("d"));
}

}  // namespace
}  // namespace tessera::checkpoint
