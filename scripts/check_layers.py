#!/usr/bin/env python3
"""Checks the dependencies between layers and rooms: includes, folders that are private, and unique class names.

    scripts/check_layers.py [--root DIR]     # the whole tree; exit status 1 and one line for each finding

Rules (ARCHITECTURE.md):
  * a layer includes only itself and layers listed before it in LAYERS; the rooms of bus/ are layers, too (ROOMS);
  * a public header counts as the layer that implements it (PUBLIC);
  * a folder behind a seam (SEAMS: transport/shm/, memory/cuda/, ...), and any folder called cuda, is included only
    from inside and from the files beside it: the layer's registry. Folders below store/ are
    private to the store. Tests and fuzz targets may look inside;
  * layout/ and plan/ are pure: no threads, no I/O headers;
  * a CUDA or NCCL header is included only below a folder called cuda, cuda_ipc or nccl, and never from include/;
  * nothing reads the wall clock, which may jump, in C++ or in the Python package: time is base/clock.h's;
  * public headers include only the standard library and other public headers;
  * an option of CMake that a message or comment names (-DTESSERA_X) exists in CMakeLists.txt;
  * no two classes of a namespace have one name, in src/ and include/.
"""
import argparse
import collections
import pathlib
import re
import sys

LAYERS = ["base", "layout", "codec", "memory", "device", "plan", "transport", "exec", "checkpoint", "store", "command", "peer", "collective", "bus", "etp"]
# Rooms of bus/, lowest first. embedded.{h,cc} are at its root and below the daemon, which opens one.
ROOMS = ["registration", "session", "prepare", "batch", "sender", "receiver", "embedded", "lending", "daemon", ""]
PUBLIC = {
    "error.h": "base", "version.h": "base",
    "layout.h": "layout",
    "dtype.h": "codec", "quantize.h": "codec",
    "memory.h": "memory",
    "plan.h": "plan", "simulate.h": "plan",
    "checkpoint.h": "checkpoint",
    "store.h": "store",
    "bus.h": "bus",
    "etp.h": "etp",
    "etp_report.h": "etp",
}
# Layers whose folders are implementations of one interface, except folders that every layer may use.
SEAMS = {"transport", "memory", "store"}
OPEN_FOLDERS = {"memory/host"}  # the memory that every layer can address
PURE = {"layout", "plan"}
IMPURE = re.compile(r"^(thread|mutex|base/mutex\.h|future|fstream|iostream|filesystem|cstdio|unistd\.h|fcntl\.h|sys/.*|spdlog/.*|base/(thread|log|fd|process|socket|event_loop)\.h)$")
CUDA = re.compile(r"^(cuda.*|nccl.*|cub/.*|thrust/.*|nvtx.*)$")
THIRD_PARTY_IN_PUBLIC = re.compile(r"^(fmt|spdlog|nlohmann|hwy|re2|xxhash|CLI|gtest|gmock)\b")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]')
WALL_CLOCK = re.compile(r"\bsystem_clock\b|\bCLOCK_REALTIME\b|\bgettimeofday\b|\btime\((nullptr|NULL|0)\)|\bsem_timedwait\b")
WALL_CLOCK_OF_PYTHON = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.(now|utcnow|today)\(")
OPTION = re.compile(r"-D(TESSERA_\w+)")
# A class defined at namespace scope: not a nested one, a declaration or a specialisation.
CLASS = re.compile(
    r"^(?:class|struct|enum class|union)\s+(?:alignas\([^)]*\)\s+|\[\[\w+\]\]\s+|[A-Z_]+(?:\(\"\w+\"\))?\s+)?"
    r"(\w+)\b(?!\s*(?:;|<|::))[^;()]*(?:\{|$)"
)
NAMESPACE = re.compile(r"^namespace ([\w:]+) \{")
CPP = {".h", ".cc", ".cu", ".cuh"}
FOLDERS = ("include", "src", "tools", "tests", "bench", "examples", "fuzz", "python")


def layer_of_include(name):
    """The layer that an include belongs to, "?" for an unknown public header, or None for one that is not ours."""
    parts = name.split("/")
    if parts[0] == "tessera":
        return PUBLIC.get(parts[1], "?")
    return parts[0] if len(parts) > 1 and parts[0] in LAYERS else None


def room_of(parts):
    """For a path below bus/."""
    if len(parts) > 1:
        return parts[0]
    stem = parts[0].split(".")[0].removesuffix("_test")
    return stem if stem in ROOMS else ""


def is_test(relative):
    parts = relative.parts
    return (
        relative.name.endswith("_test.cc") or parts[0] in {"tests", "fuzz", "bench"} or "testing" in parts
        or relative.stem.endswith(("testing", "oracle")) or relative.name in {"test_util.h", "test_actor.h"}
    )  # fmt: skip


def seam_of(name):
    """The private folder that `name`, an include, is in; None if it is open to all."""
    folders = name.split("/")[:-1]
    if "cuda" in folders:
        return "/".join(folders[: folders.index("cuda") + 1])
    if len(folders) > 1 and folders[0] in SEAMS and "/".join(folders[:2]) not in OPEN_FOLDERS:
        return "/".join(folders[:2])
    return None


def may_open(seam, relative):
    """Whether a file may include headers of the folder `seam`: from inside, or from the files beside it."""
    if relative.parts[0] != "src":
        return False
    folder = "/".join(relative.parts[1:-1])
    if folder == seam or folder.startswith(seam + "/") or folder == seam.rpartition("/")[0]:
        return True
    return seam.startswith("store/") and folder.startswith("store/")


class Checker:
    def __init__(self, root):
        self.root = root
        self.findings = []
        self.options = set(re.findall(r"\b(TESSERA_\w+)", (root / "CMakeLists.txt").read_text()))
        self.classes = collections.defaultdict(set)

    def say(self, where, text):
        self.findings.append(f"{where}: {text}")

    def include(self, relative, where, name, layer):
        parts = relative.parts
        if CUDA.match(name) and (parts[0] == "include" or not {"cuda", "cuda_ipc", "nccl"} & set(parts[:-1])):
            self.say(where, f"CUDA header {name} outside cuda/, cuda_ipc/ and nccl/")
        if parts[0] == "include" and THIRD_PARTY_IN_PUBLIC.match(name):
            self.say(where, f"a public header includes {name}; public headers need the standard library only")
        seam = seam_of(name)
        if seam and not is_test(relative) and not may_open(seam, relative):
            self.say(where, f"{name} is private to {seam}/: only that folder and the files beside it may include it")
        if layer is None:
            return
        included = layer_of_include(name)
        if included == "?":
            self.say(where, f"{name} is not in PUBLIC of scripts/check_layers.py")
        elif included is not None and LAYERS.index(included) > LAYERS.index(layer):
            self.say(where, f"{layer} includes {name} of {included}, a layer above it")
        if layer == included == "bus" and parts[0] == "src" and name.startswith("bus/"):
            here, there = room_of(parts[2:]), room_of(name.split("/")[1:])
            for room in (here, there):
                if room not in ROOMS:
                    self.say(where, f"bus/{room}/ is not in ROOMS of scripts/check_layers.py")
                    return
            if ROOMS.index(there) > ROOMS.index(here):
                self.say(where, f"room bus/{here} includes {name} of a room above it")
        if layer in PURE and not is_test(relative) and IMPURE.match(name):
            self.say(where, f"{layer} is pure (no threads, no I/O) but includes {name}")

    def source(self, path):
        relative = path.relative_to(self.root)
        parts = relative.parts
        layer = None  # tools, tests, bench, examples: on top of everything
        if parts[0] == "src":
            layer = parts[1]
            if layer not in LAYERS:
                return self.say(relative, f"src/{layer}/ is not in LAYERS of scripts/check_layers.py")
        elif parts[0] == "include":
            layer = PUBLIC.get(path.name)
            if layer is None:
                return self.say(relative, "a public header that scripts/check_layers.py does not know; add it to PUBLIC")
        ours = parts[0] in {"src", "include"} or parts[:2] == ("python", "src")
        namespace = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            where = f"{relative}:{number}"
            namespace = (NAMESPACE.match(line) or [None, namespace])[1]
            if ours and WALL_CLOCK.search(line):
                self.say(where, "reads the wall clock, which may jump: use base/clock.h")
            for option in OPTION.findall(line):
                if option not in self.options:
                    self.say(where, f"-D{option} is no option of CMakeLists.txt")
            found = INCLUDE.match(line)
            if found:
                self.include(relative, where, found[1], layer)
            found = CLASS.match(line)
            if found and parts[0] in {"src", "include"} and not is_test(relative):
                self.classes[f"{namespace}::{found[1]}"].add(where)

    def python(self, path):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if WALL_CLOCK_OF_PYTHON.search(line):
                where = f"{path.relative_to(self.root)}:{number}"
                self.say(where, "reads the wall clock, which may jump: use time.monotonic(), or what the core says")

    def run(self):
        for folder in FOLDERS:
            for path in sorted((self.root / folder).rglob("*")):
                if path.suffix in CPP:
                    self.source(path)
        for path in sorted((self.root / "python/tessera").rglob("*.py")):
            self.python(path)
        for name, places in sorted(self.classes.items()):
            if len(places) > 1:
                self.say(" and ".join(sorted(places)), f"two classes are called {name}")
        return self.findings


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    findings = Checker(parser.parse_args().root).run()
    for line in findings:
        print(line)
    print(f"layers: {len(findings)} finding(s)")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
