#!/usr/bin/env python3
"""Locks that nobody checks: sources that take others than base/mutex.h's; and whether clang-tidy, by the project's own
.clang-tidy, finds fault with a source that breaks what it says of its locks.

    tests/lint/locks_test.py        # exit status 77: there is no clang-tidy here
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

TOOL = "clang-tidy-19"
UNCHECKED = re.compile(
    r"\bstd::(\w*mutex|condition_variable\w*|lock_guard|unique_lock|scoped_lock)\b|\bpthread_(mutex|cond)_"
)
ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = """
#include "base/mutex.h"

namespace tessera {

class Account {
 public:
  int locked() EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    return balance_;
  }
  int awaited() EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    changed_.wait(mutex_, [this]() REQUIRES(mutex_) { return balance_ > 0; });
    pay();
    {
      const MutexUnlock unlocked(mutex_);
      (void)locked();
    }
    return balance_;
  }
  int bare() { return balance_; }                    // wrong
  void requires_it() { pay(); }                      // wrong
  int twice() {
    const MutexLock lock(mutex_);
    return locked();                                 // wrong
  }
  int too_late() {
    MutexLock lock(mutex_);
    lock.unlock();
    return balance_;                                 // wrong
  }
  void wait_without() {
    changed_.wait(mutex_);                           // wrong
  }
  void lambda() {
    const MutexLock lock(mutex_);
    changed_.wait(mutex_, [this] {
      return balance_ > 0;                           // wrong
    });
  }
  void kept() {
    mutex_.lock();
    balance_ = 0;
  }                                                  // wrong

 private:
  void pay() REQUIRES(mutex_) { --balance_; }

  Mutex mutex_;
  CondVar changed_;
  int balance_ GUARDED_BY(mutex_) = 0;
};

int use(Account& account) {
  account.requires_it();
  account.wait_without();
  account.lambda();
  account.kept();
  return account.locked() + account.awaited() + account.bare() + account.twice() + account.too_late();
}

}  // namespace tessera
"""


def unchecked_locks() -> list[str]:
    sources = [path for folder in ("src", "python/src", "tools") for path in (ROOT / folder).rglob("*.[hc]*")]
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}: use base/mutex.h, whose locks are checked"
        for path in sorted(sources)
        if path != ROOT / "src/base/mutex.h"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNCHECKED.search(line.split("//")[0])
    ]


def main() -> int:
    if found := unchecked_locks():
        print("\n".join(found))
        return 1
    if shutil.which(TOOL) is None:
        print(f"skipped: no {TOOL}")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "account.cc")
        source.write_text(SOURCE)
        command = [TOOL, "--quiet", f"--config-file={ROOT / '.clang-tidy'}", str(source)]
        done = subprocess.run(
            [*command, "--", "-std=c++20", f"-I{ROOT / 'src'}", f"-I{ROOT / 'include'}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    found = re.findall(r"account\.cc:(\d+):\d+: error: .*\[clang-diagnostic-thread-safety[\w-]*", done.stdout)
    wrong = [number for number, line in enumerate(SOURCE.splitlines(), 1) if "// wrong" in line]
    if done.returncode == 0 or sorted({int(each) for each in found}) != wrong:
        print(f"status {done.returncode}; lines {found} were found wrong, those that are: {wrong}\n{done.stdout}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
