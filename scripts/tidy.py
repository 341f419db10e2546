#!/usr/bin/env python3
"""clang-tidy over the files of a build, but those that it has found clean before, with all that they include.

    scripts/tidy.py build/lint JOBS

Whether an exception leaves a destructor is seen only where everything that the destructor calls is seen: that check reads
all of src/ and tools/ once more, as one source.

What was clean is remembered in ~/.cache/tessera/tidy (XDG_CACHE_HOME), by contents: for any clone.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

TOOL = "clang-tidy-19"
WHOLE_CHECKS = "-*,bugprone-exception-escape"
# Not of the one source: those that are compiled once for each instruction set.
WHOLE_SOURCE = re.compile(r"(?<!/python)/(?:src|tools)/(?:(?!_simd\.cc$|_test\.cc$).)*\.cc$")
ROOT = pathlib.Path(__file__).resolve().parents[1]
CLEAN = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "tessera" / "tidy"


def key_of(entry: dict[str, str], versions: str) -> str:
    """Of everything that decides about a file: its command, and the project's files that it includes."""
    command = shlex.split(entry["command"])
    at = command.index("-o")
    del command[at : at + 2]
    listing = [each for each in command if each != "-c"] + ["-MM", "-MT", "it"]
    listed = subprocess.run(listing, cwd=entry["directory"], stdout=subprocess.PIPE, text=True, check=True).stdout
    digest = hashlib.sha256(versions.encode() + shlex.join(command).replace(str(ROOT), "").encode())
    for name in [*listed.replace("\\\n", " ").split()[1:], str(ROOT / ".clang-tidy")]:
        path = pathlib.Path(entry["directory"], name)
        digest.update(f"\0{os.path.relpath(path, ROOT)}\0".encode() + path.read_bytes().replace(bytes(ROOT), b""))
    return digest.hexdigest()


def sources_of(entry: dict[str, str]) -> list[str]:
    """What a file of the build compiles: itself, or the sources of its batch."""
    file = pathlib.Path(entry["directory"], entry["file"])
    return re.findall(r'^#include "(/.*\.cc)"', file.read_text(), re.MULTILINE) or [str(file)]


def whole_of(build: str, entries: list[dict[str, str]]) -> dict[str, str]:
    """An entry of all sources as one, in the order of the build: what comes later sees what it calls."""
    sources: dict[str, None] = {}
    flags: dict[str, None] = {}
    for entry in entries:
        own = [each for each in sources_of(entry) if WHOLE_SOURCE.search(each)]
        sources |= dict.fromkeys(own)
        if own:
            flags |= dict.fromkeys(flag for flag in shlex.split(entry["command"]) if re.match("-[ID]|-std=", flag))
    folder = pathlib.Path(build, "whole").resolve()
    folder.mkdir(exist_ok=True)
    file = folder / "whole.cc"
    file.write_text("".join(f'#include "{each}"\n' for each in sources))
    command = shlex.join(["c++", *flags, "-o", "whole.o", "-c", str(file)])
    whole = {"directory": str(folder), "file": str(file), "command": command}
    (folder / "compile_commands.json").write_text(json.dumps([whole]))
    return {**whole, "checks": WHOLE_CHECKS}


def is_clean(build: str, entry: dict[str, str], versions: str) -> bool:
    stamp = CLEAN / key_of(entry, versions + entry.get("checks", ""))
    if stamp.exists():
        stamp.touch()
        return True
    command = [TOOL, "--quiet", entry["file"]]
    command += ["-p", entry["directory"], f"--checks={entry['checks']}"] if "checks" in entry else ["-p", build]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = [line for line in done.stdout.splitlines(keepends=True) if "warnings generated" not in line]
    sys.stdout.write("".join(said))
    sys.stdout.flush()
    if done.returncode == 0:
        stamp.touch()
    return done.returncode == 0


def main(build: str, jobs: int) -> int:
    CLEAN.mkdir(parents=True, exist_ok=True)
    entries = json.loads(pathlib.Path(build, "compile_commands.json").read_text())
    entries.insert(0, whole_of(build, entries))  # it takes longest
    tools = ([TOOL, "--version"], ["c++", "--version"])
    versions = "".join(subprocess.run(each, stdout=subprocess.PIPE, text=True, check=True).stdout for each in tools)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        clean = list(pool.map(lambda entry: is_clean(build, entry, versions), entries))
    print(f"clang-tidy: {len(clean)} files, {clean.count(False)} with findings")
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
