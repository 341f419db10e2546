#!/usr/bin/env python3
"""Checks that the documents are true: every path, link and `name` in them exists; and ARCHITECTURE.md is short.

    scripts/check_docs.py [--root DIR]

The map in ARCHITECTURE.md has a row for every folder of sources, and no other. Each step of its walks ("### A walk: ...")
is a line "N. `path` `name` ...": the name occurs in the file, and from each step to the next lead includes (or back, as to
a source from its contract), unless the line begins with "N. (over the wire)".

A `path/like/this` in backquotes must exist, a `CamelCase` or `snake_case()` name must occur in a source file or be one of
Python's or torch's that pages speak of. Blocks of code are not read.
"""
import argparse
import functools
import pathlib
import re
import sys

# Enums whose values travel, and the page that explains them: "NUMBER Name", or "| NUMBER | Name".
CODES = (
    ("src/peer/handshake.h", "HandshakeMessage", "docs/formats/bus-protocol.md"),
    ("src/peer/exchange/messages.h", "ExchangeMessage", "docs/formats/bus-protocol.md"),
    ("src/bus/session/versions.h", "VersionMessage", "docs/formats/bus-protocol.md"),
    ("src/bus/prepare/amax_messages.h", "AmaxMessage", "docs/formats/bus-protocol.md"),
    ("src/peer/report.h", "ReportMessage", "docs/formats/bus-protocol.md"),
    ("src/bus/lending/messages.h", "LendingMessage", "docs/formats/bus-protocol.md"),
    ("src/bus/daemon/messages.h", "AgentMessage", "docs/formats/agent-protocol.md"),
    ("src/bus/daemon/messages.h", "AgentCommand", "docs/formats/agent-protocol.md"),
    ("src/store/protocol.h", "StoreMessage", "docs/formats/store-protocol.md"),
    ("include/tessera/error.h", "ErrorCode", "docs/formats/bus-protocol.md"),
    ("include/tessera/dtype.h", "DType", "docs/formats/bus-protocol.md"),
)
# Has a row for each log event and, in its last paragraph, each span of a trace.
OBSERVED = "docs/metrics.md"
MOST_LINES = {"ARCHITECTURE.md": 200}
# Folders that the map of rooms covers, including all in them.
MAPPED = ("src", "tools", "python/src", "python/tessera", "tests")
ROOM = re.compile(r"^\| ((?:`(?:src|tools|python|tests)/[\w/]*`(?:, )?)+) \|", re.M)
STEP = re.compile(r"^\d+\. (\(over the wire\) )?`([\w/.-]+)` `([\w:.]+)(?:\(\))?`")
PATH = re.compile(r"(src|include|tools|tests|bench|fuzz|examples|docs|scripts|cmake|\.ci)/[\w./-]*")
NAME = re.compile(r"([A-Z][a-z0-9]+){2,}|[a-z_0-9]+\(\)")

# Names from torch, which users know.
FOREIGN = {"full_tensor()", "state_dict()", "backward()", "forward()"}

parser = argparse.ArgumentParser()
parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
root = parser.parse_args().root
documents = [root / name for name in ("ARCHITECTURE.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md")]
documents += sorted((root / "docs").rglob("*.md"))
sources = "\n".join(
    path.read_text()
    for folder in ("include", "src", "tools", "python")
    for path in (root / folder).rglob("*")
    if path.suffix in {".h", ".cc", ".py"} and not path.stem.endswith("_test") and "tests" not in path.parts
)


def check(document):
    """Findings, one line each."""
    in_block = False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        where = f"{document.relative_to(root)}:{number}"
        if number == MOST_LINES.get(document.name):
            yield f"{where}: it must stay under {number} lines"
        if line.startswith("```"):
            in_block = not in_block
        if in_block:
            continue
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", line):
            if not (document.parent / target).exists():
                yield f"{where}: link to {target}, which does not exist"
        for name in re.findall(r"`([^`]+)`", line):
            if PATH.fullmatch(name) and not (root / name).exists():
                yield f"{where}: path {name} does not exist"
            if name in FOREIGN:
                continue
            if NAME.fullmatch(name) and not re.search(rf"\b{re.escape(name.removesuffix('()'))}\b", sources):
                yield f"{where}: name {name} occurs nowhere in the sources"


def enumerators(header, enum):
    """(name, value) of each."""
    body = re.search(rf"enum class {enum}\b[^{{]*{{(.*?)}};", (root / header).read_text(), re.S).group(1)
    value = -1
    for name, given in re.findall(r"\bk(\w+)(?: = (\d+))?", re.sub(r"//.*", "", body)):
        value = int(given) if given else value + 1
        yield name, value


def check_codes():
    for header, enum, page in CODES:
        text = (root / page).read_text()
        for name, value in enumerators(header, enum):
            if not re.search(rf"\b{value} (\| )?{name}\b", text):
                yield f"{page}: no \"{value} {name}\", {enum} of {header}"


def events():
    """(name, level) of every event that is logged."""
    for level, arguments in re.findall(r"\blog_(?:limited_)?event\(\s*LogLevel::(\w+),([^{]*)\{", sources):
        for name in re.findall(r'"([a-z_.]+)"', arguments):
            yield name, {"err": "error"}.get(level, level)


def check_log_lines():
    """A line of the log without an event, which no program can look for, and texts that end the process."""
    for folder in ("src", "tools", "python/src"):
        for path in sorted((root / folder).rglob("*")):
            relative = path.relative_to(root)
            if path.suffix not in {".h", ".cc"} or path.stem.endswith("_test"):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if re.search(r"\blog\(\)\.(trace|debug|info|warn|error|critical)\(", line):
                    yield f"{relative}:{number}: a log line without an event: use log_event()"
                if re.search(r"\{\w*:[^{}]*\?\}", line.split("//")[0]):
                    yield f"{relative}:{number}: fmt's own quotes abort on bytes that are not UTF-8: use in_quotes()"


def spans():
    """The name of every span and instant of a trace."""
    constants = dict(re.findall(r'constexpr (?:char|const char\*|std::string_view) (k\w+)(?:\[\])? = "([^"]*)"', sources))
    calls = r"(?:\bTraceSpan \w+|\bTrace::begin|\bTrace::instant|(?<![.:\w])begin(?:_operation)?|\benter)\(([^;{]*)"
    for arguments in re.findall(calls, sources):
        first = arguments.split(",")[0]
        yield from re.findall(r'"([^"]+)"', first)
        yield from (constants[name] for name in re.findall(r"\bk\w+", first) if name in constants)


def compare(what, code, page):
    for name in sorted(code - page):
        yield f"{OBSERVED}: {what} {name} is not there"
    for name in sorted(page - code):
        yield f"{OBSERVED}: {what} {name} occurs nowhere in the sources"


def check_observed():
    text = (root / OBSERVED).read_text()
    rows = re.findall(r"^\| ((?:`[a-z_]+\.[a-z_]+`(?:, )?)+) \| (\w+) \|", text, re.M)
    documented = {f"{name} ({level})" for names, level in rows for name in re.findall(r"`([^`]+)`", names)}
    yield from compare("event", {f"{name} ({level})" for name, level in events()}, documented)
    paragraph = " ".join(text[text.index("A trace (") :].split())
    yield from compare("span", set(spans()), set(re.findall(r"`([a-z ]+)`", paragraph)))


def check_rooms(text):
    """Compares the map of rooms with the folders."""
    folders = {path.parent for top in MAPPED for path in (root / top).rglob("*") if path.suffix in {".h", ".cc", ".py"}}
    there = {f"{folder.relative_to(root)}/" for folder in folders}
    listed = [folder for row in ROOM.findall(text) for folder in re.findall(r"`([^`]+)`", row)]
    for folder in sorted(there - set(listed)):
        yield f"ARCHITECTURE.md: folder {folder} has no row in the map of rooms"
    for folder in sorted(set(listed) - there):
        yield f"ARCHITECTURE.md: the map of rooms has {folder}, which holds no sources"
    for folder in sorted({each for each in listed if listed.count(each) > 1}):
        yield f"ARCHITECTURE.md: {folder} is twice in the map of rooms"


def files_of(stem):
    """The source and the header for an include of `stem`."""
    for top in ("src", "include", "", "python/src"):
        yield from (path for path in (root / top / f"{stem}{end}" for end in (".h", ".cc")) if path.is_file())


@functools.cache
def included_by(path):
    """The headers that a file includes, as stems of paths below src/, include/ or the root."""
    return {name.rsplit(".", 1)[0] for name in re.findall(r'#include ["<]([^">]+)[">]', path.read_text())}


@functools.cache
def reaches(stem):
    """The stems of all headers that a source and its header include, and that those include."""
    found, new = set(), set().union(*map(included_by, files_of(stem)))
    while new:
        found |= new
        headers = (path for each in new for path in files_of(each) if path.suffix == ".h")
        new = set().union(*map(included_by, headers)) - found
    return found


def stem_of(path):
    """In the spelling of an include."""
    name = str(path.relative_to(root)).rsplit(".", 1)[0]
    return name.removeprefix("src/").removeprefix("include/")


def check_walks(text):
    """Every step of every walk: its file, its name, and the way from the step before."""
    walks = re.split(r"^### A walk: ", text, flags=re.M)[1:]
    for walk in walks:
        title = walk.splitlines()[0]
        before = None
        steps = [found for found in map(STEP.match, walk.splitlines()[1:]) if found]
        if len(steps) < 3:
            yield f"ARCHITECTURE.md: the walk of {title} has {len(steps)} steps"
        for over_the_wire, name, symbol in (step.groups() for step in steps):
            path = root / name
            if not path.is_file():
                yield f"ARCHITECTURE.md: the walk of {title} goes through {name}, which does not exist"
                before = None
                continue
            last = re.split(r"::|\.", symbol)[-1]
            if not re.search(rf"\b{last}\b", path.read_text()):
                yield f"ARCHITECTURE.md: the walk of {title}: {symbol} does not occur in {name}"
            stem = stem_of(path)
            if before and not over_the_wire and stem not in reaches(before) and before not in reaches(stem):
                yield f"ARCHITECTURE.md: the walk of {title}: no include leads from {before} to {stem}, nor back"
            before = stem
    if len(walks) < 3:
        yield f"ARCHITECTURE.md: {len(walks)} walks, and there are three"


architecture = (root / "ARCHITECTURE.md").read_text()
findings = [finding for document in documents for finding in check(document)] + list(check_codes()) + list(check_observed()) + list(check_log_lines())
findings += [*check_rooms(architecture), *check_walks(architecture)]
for finding in findings:
    print(finding)
print(f"docs: {len(documents)} documents, {len(findings)} finding(s)")
sys.exit(1 if findings else 0)
