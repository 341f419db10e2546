#!/usr/bin/env python3
"""Checks the arrows between layers: who includes whom, and that no CUDA header leaks.

    scripts/check_layers.py            # the whole tree; exit status 1 and one line a finding

Rules (ARCHITECTURE.md):
  * a layer includes only itself and layers listed before it in LAYERS;
  * a public header counts as the layer that implements it (PUBLIC);
  * layout/ and plan/ are pure: no threads, no I/O headers;
  * a CUDA or NCCL header is included only below a folder called cuda, cuda_ipc or nccl, and never from include/;
  * no source reads the wall clock, which may jump: time is base/clock.h's;
  * public headers include only the standard library and other public headers.
"""
import pathlib
import re
import sys

LAYERS = ["base", "layout", "codec", "memory", "plan", "transport", "exec", "checkpoint", "store", "command", "peer", "bus"]
PUBLIC = {
    "error.h": "base", "version.h": "base",
    "layout.h": "layout",
    "dtype.h": "codec", "quantize.h": "codec",
    "memory.h": "memory",
    "plan.h": "plan", "simulate.h": "plan",
    "checkpoint.h": "checkpoint",
    "store.h": "store",
    "bus.h": "bus",
}
PURE = {"layout", "plan"}
IMPURE = re.compile(r"^(thread|mutex|base/mutex\.h|future|fstream|iostream|filesystem|cstdio|unistd\.h|fcntl\.h|sys/.*|spdlog/.*|base/(thread|log|fd|process|socket|event_loop)\.h)$")
CUDA = re.compile(r"^(cuda.*|nccl.*|cub/.*|thrust/.*|nvtx.*)$")
THIRD_PARTY_IN_PUBLIC = re.compile(r"^(fmt|spdlog|nlohmann|hwy|re2|xxhash|CLI|gtest|gmock)\b")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]')

WALL_CLOCK = re.compile(r"\bsystem_clock\b|\bCLOCK_REALTIME\b|\bgettimeofday\b|\btime\((nullptr|NULL|0)\)|\bsem_timedwait\b")

root = pathlib.Path(__file__).resolve().parent.parent
findings = []


def layer_of_include(name):
    """The layer an include belongs to, or None for what is not ours."""
    parts = name.split("/")
    if parts[0] == "tessera":
        if parts[1] not in PUBLIC:
            return "?"
        return PUBLIC[parts[1]]
    return parts[0] if len(parts) > 1 and parts[0] in LAYERS else None


def check(path):
    relative = path.relative_to(root)
    parts = relative.parts
    is_test = path.name.endswith("_test.cc") or "testing" in parts
    if parts[0] == "src":
        layer = parts[1]
    elif parts[0] == "include":
        layer = PUBLIC.get(path.name)
        if layer is None:
            findings.append(f"{relative}: a public header that scripts/check_layers.py does not know; add it to PUBLIC")
            return
    else:
        layer = None  # tools, tests, bench, examples: on top of everything
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if parts[0] in {"src", "include"} and WALL_CLOCK.search(line):
            findings.append(f"{relative}:{number}: reads the wall clock, which may jump: use base/clock.h")
        match = INCLUDE.match(line)
        if not match:
            continue
        name, where = match.group(1), f"{relative}:{number}"
        if CUDA.match(name) and (parts[0] == "include" or not {"cuda", "cuda_ipc", "nccl"} & set(parts[:-1])):
            findings.append(f"{where}: CUDA header {name} outside cuda/, cuda_ipc/ and nccl/")
        if parts[0] == "include" and THIRD_PARTY_IN_PUBLIC.match(name):
            findings.append(f"{where}: a public header includes {name}; public headers need the standard library alone")
        if layer is None:
            continue
        included = layer_of_include(name)
        if included == "?":
            findings.append(f"{where}: {name} is not in PUBLIC of scripts/check_layers.py")
        elif included is not None and LAYERS.index(included) > LAYERS.index(layer):
            findings.append(f"{where}: {layer} includes {name} of {included}, a layer above it")
        if layer in PURE and not is_test and IMPURE.match(name):
            findings.append(f"{where}: {layer} is pure (no threads, no I/O) but includes {name}")


for folder in ("include", "src", "tools", "tests", "bench", "examples", "fuzz", "python"):
    for path in sorted((root / folder).rglob("*")):
        if path.suffix in {".h", ".cc", ".cu", ".cuh"}:
            check(path)
for line in findings:
    print(line)
print(f"layers: {len(findings)} finding(s)")
sys.exit(1 if findings else 0)
