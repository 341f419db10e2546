#!/usr/bin/env python3
"""Whether the clang-tidy lane finds a destructor that throws: within one source, and across sources.

    tests/lint/destructors_test.py        # exit status 77: there is no clang-tidy here
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = {
    "lock.h": """
#pragma once
void lock(int fd);
""",
    "lock.cc": """
#include "lock.h"
#include <stdexcept>
void lock(int fd) {
  if (fd < 0) throw std::runtime_error("cannot be locked");
}
""",
    "host.cc": """
#include "lock.h"
#include <stdexcept>
struct Direct {
  explicit Direct(int fd) : fd_(fd) {}
  ~Direct() {                                        // wrong
    if (fd_ < 0) throw std::runtime_error("closed");
  }
  int fd_;
};
struct ByAnother {
  explicit ByAnother(int fd) : fd_(fd) {}
  ~ByAnother() { lock(fd_); }                        // wrong
  int fd_;
};
struct Caught {
  explicit Caught(int fd) : fd_(fd) {}
  ~Caught() {
    try {
      lock(fd_);
    } catch (const std::exception&) {
      fd_ = 0;
    }
  }
  int fd_;
};
int use(int fd) {
  const Direct direct(fd);
  const ByAnother by_another(fd);
  const Caught caught(fd);
  return direct.fd_ + by_another.fd_ + caught.fd_;
}
""",
}


def main() -> int:
    if shutil.which("clang-tidy-19") is None:
        print("skipped: no clang-tidy-19")
        return 77
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "src").mkdir()
        (folder / "build").mkdir()
        shutil.copy(ROOT / ".clang-tidy", folder)
        for file, text in SOURCES.items():
            (folder / "src" / file).write_text(text)
        entries = [
            {"directory": name, "file": str(path), "command": f"c++ -std=c++20 -o {path.stem}.o -c {path}"}
            for path in (folder / "src" / "lock.cc", folder / "src" / "host.cc")
        ]
        (folder / "build" / "compile_commands.json").write_text(json.dumps(entries))
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "tidy.py"), str(folder / "build"), "2"],
            env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    found = re.findall(r"host\.cc:(\d+):\d+: error: .*\[bugprone-exception-escape", done.stdout)
    wrong = [number for number, line in enumerate(SOURCES["host.cc"].splitlines(), 1) if "// wrong" in line]
    if done.returncode == 0 or sorted({int(each) for each in found}) != wrong:
        print(f"status {done.returncode}; lines {found} were found wrong, those that are: {wrong}\n{done.stdout}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
