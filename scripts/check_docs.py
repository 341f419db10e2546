#!/usr/bin/env python3
"""Checks that the documents are true: every path, link and `name` in them exists; and ARCHITECTURE.md is short.

    scripts/check_docs.py

A `path/like/this` in backquotes must exist, a `CamelCase` or `snake_case()` name must occur in a source file or be one of
Python's or torch's that pages speak of. Blocks of code are not read.
"""
import pathlib
import re
import sys

# Enums whose values travel, and the page that says what they mean: "NUMBER Name", or "| NUMBER | Name".
CODES = (
    ("src/peer/messages.h", "MessageType", "docs/formats/bus-protocol.md"),
    ("src/bus/daemon/messages.h", "AgentMessage", "docs/formats/agent-protocol.md"),
    ("src/bus/daemon/messages.h", "AgentCommand", "docs/formats/agent-protocol.md"),
    ("src/store/protocol.h", "StoreMessage", "docs/formats/store-protocol.md"),
    ("include/tessera/error.h", "ErrorCode", "docs/formats/bus-protocol.md"),
    ("include/tessera/dtype.h", "DType", "docs/formats/bus-protocol.md"),
)
# Has a row for each event of the log, and in its last paragraph each span of a trace.
OBSERVED = "docs/metrics.md"
MOST_LINES = {"ARCHITECTURE.md": 120}
PATH = re.compile(r"(src|include|tools|tests|bench|fuzz|examples|docs|scripts|cmake|\.ci)/[\w./-]*")
NAME = re.compile(r"([A-Z][a-z0-9]+){2,}|[a-z_0-9]+\(\)")

# Of torch: what users come with.
FOREIGN = {"full_tensor()", "state_dict()", "backward()", "forward()"}

root = pathlib.Path(__file__).resolve().parent.parent
documents = [root / name for name in ("ARCHITECTURE.md", "README.md", "CONTRIBUTING.md", "bench/README.md")]
documents += sorted((root / "docs").rglob("*.md"))
sources = "\n".join(
    path.read_text()
    for folder in ("include", "src", "tools", "python")
    for path in (root / folder).rglob("*")
    if path.suffix in {".h", ".cc", ".py"} and not path.stem.endswith("_test") and "tests" not in path.parts
)


def check(document):
    """Findings, each a line."""
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
    for level, arguments in re.findall(r"\blog_event\(\s*LogLevel::(\w+),([^{]*)\{", sources):
        for name in re.findall(r'"([a-z_.]+)"', arguments):
            yield name, level


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


findings = [finding for document in documents for finding in check(document)] + list(check_codes()) + list(check_observed())
for finding in findings:
    print(finding)
print(f"docs: {len(documents)} documents, {len(findings)} finding(s)")
sys.exit(1 if findings else 0)
