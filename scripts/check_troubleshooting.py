#!/usr/bin/env python3
"""Checks that docs/troubleshooting.md knows every error message of the code, and no other.

    scripts/check_troubleshooting.py

In C++ a message is a text that is marked as one where it is thrown, logged or put together: "..."_message (base/message.h);
fail(), failed() and a message's require() take no other, and one that Error, Status or a warning is given without the mark
is a finding. What comes before another message and says nothing itself ("{}: {}") needs no entry.

Of the Python package it is the first that one of these is given: an exception, type(error)(), a function that says that
it returns an exception, warnings.warn(), sys.exit(). A text of some length counts, too, in what a function returns that
says that it returns a str, or None for none. Where an expression chooses between texts, each is a message.

Not looked at: broken invariants (fail_internal(), AssertionError), what the system says (fail_errno), what is printed and
no error, and what stands in tests or in models. An entry is a text in backquotes in a table's first column; "..." in it
stands for anything.
"""

import ast
import itertools
import pathlib
import re
import sys

PAGE = "docs/troubleshooting.md"
MESSAGE = re.compile(r'((?:"(?:[^"\\]|\\.)*"\s*)+)_message\b')
UNMARKED = re.compile(
    r"\b(?:Error|Status)\(\s*ErrorCode::k(?!Internal)\w+,\s*(?:fmt::format\(\s*)?(?P<thrown>(?:\"(?:[^\"\\]|\\.)*\"\s*)+)(?!_message)"
    r"|log\(\)\.(?:warn|error)\(\s*(?P<logged>(?:\"(?:[^\"\\]|\\.)*\"\s*)+)(?!_message)"
)
# A text that a Python function returns is a message if it has at least so many letters, in more than one word.
FEWEST_LETTERS = 14
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
# Precedes another message, and says nothing itself.
PREFIX = re.compile(r"(((batch|pair|store|tensor) )?\0(: |, ))+\0")
NOT_FOR_USERS = re.compile(r"_test\.cc|testing\.h|\bprobe\.h|test_actor\.")
# In Python: parts of messages that say who or what, but not that anything is wrong.
NAMES = {
    "the arguments or the default",  # the sources of rank and world
}
# Messages of the command line parser itself.
PARSER = (
    "\0 is required",
    "\0: \0 required \0 missing",
    "The following argument was not expected: \0",
    "The following arguments were not expected: \0",
    "Could not convert: \0 = \0",
    "A subcommand is required",
    "\0: At Most \0 required but received \0",
    "\0 unit not recognized. Allowed values: \0",
)
# In Python: functions that show a text other than an exception's, and those whose text users do not see.
SHOWN_BY = {"warn", "exit"}
INVARIANTS = {"AssertionError", "InternalError"}
WORD = re.compile(r"[A-Za-z]{3}")
FIELD = re.compile(r"\{[^{}]*\}")

root = pathlib.Path(__file__).resolve().parent.parent


def plain_text(literal):
    return FIELD.sub("\0", literal.replace("{{", "{ ").replace('\\"', '"').replace("\\n", "").replace("\\r", ""))


def is_long(text):
    """Whether it may be a message by itself; one that begins with a comma continues another."""
    if text.startswith((",", "\0,")) or " " not in text.replace("\0", "").strip():
        return False
    return len(re.findall("[A-Za-z]", text)) >= FEWEST_LETTERS


def sources_of_cpp():
    for folder in ("include", "src", "tools", "python/src"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in {".h", ".cc"} and not NOT_FOR_USERS.search(path.name) and "testing" not in path.parts:
                yield path.relative_to(root), path.read_text()


def line_of(path, text, at):
    return f"{path}:{text.count(chr(10), 0, at) + 1}"


def worded(literals):
    plain = plain_text("".join(LITERAL.findall(literals)))
    return plain if WORD.search(plain) and not PREFIX.fullmatch(plain) else None


def messages_of_cpp():
    for path, text in sources_of_cpp():
        for found in MESSAGE.finditer(text):
            if plain := worded(found[1]):
                yield line_of(path, text, found.start()), plain


def unmarked_in_cpp():
    for path, text in sources_of_cpp():
        for found in UNMARKED.finditer(text):
            if plain := worded(found["thrown"] or found["logged"]):
                yield line_of(path, text, found.start()), plain


def texts(node):
    """Every text that a Python expression may have as its value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.FormattedValue):
        return texts(node.value)
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    if isinstance(node, ast.JoinedStr):
        parts = node.values
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [node.left, node.right]
    else:
        return ["\0"]
    return ["".join(chosen) for chosen in itertools.product(*map(texts, parts))]


def returned_type(function):
    return ast.unparse(function.returns).strip("'\"") if function.returns else ""


def called(call):
    """The name of the called function; for type(error)(), that of any exception."""
    if isinstance(call.func, ast.Call) and ast.unparse(call.func.func) == "type":
        return "Error"
    return ast.unparse(call.func).rpartition(".")[2]


def messages_of_python():
    modules = {path: ast.parse(path.read_text()) for path in sorted((root / "python/tessera").rglob("*.py"))}
    found = [(path.relative_to(root), node) for path, module in modules.items() for node in ast.walk(module)]
    functions = [(path, node) for path, node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    makers = {function.name for _, function in functions if returned_type(function).endswith("Error")}
    for path, call in found:
        name = called(call) if isinstance(call, ast.Call) else ""
        if name in INVARIANTS or not (name.endswith("Error") or name in makers or name in SHOWN_BY):
            continue
        for given in map(texts, call.args):
            worded = [text for text in given if WORD.search(text)]
            yield from ((f"{path}:{call.lineno}", text) for text in worded if not PREFIX.fullmatch(text))
            if worded:
                break
    for path, function in functions:
        if returned_type(function) not in {"str", "str | None"} or function.name.startswith("__"):
            continue
        for node in ast.walk(function):
            for text in texts(node.value) if isinstance(node, ast.Return) else []:
                if is_long(text) and text not in NAMES:
                    yield f"{path}:{node.lineno}", text


def messages():
    """(where, text) of every message, with NUL in place of its fields."""
    for text in PARSER:
        yield "CLI11", text
    yield from messages_of_cpp()
    yield from messages_of_python()


def entries():
    """(line, text) of every entry of the page."""
    for number, line in enumerate((root / PAGE).read_text().splitlines(), 1):
        if not line.startswith("| `"):
            continue
        for _, entry in re.findall(r"(?<!`)(`+)(.+?)\1(?!`)", line.split(" | ")[0]):
            yield number, entry


def pattern(entry):
    return re.compile(".*".join(re.escape(part) for part in entry.split("...")), re.S)


def findings():
    known = [(line, entry, pattern(entry)) for line, entry in entries()]
    used = set()
    for where, message in unmarked_in_cpp():
        yield f'{where}: "{message.replace(chr(0), "...")}" is not marked as a _message'
    for where, message in messages():
        matches = [entry for _, entry, what in known if what.fullmatch(message)]
        used.update(matches)
        if not matches:
            shown = message.replace("\0", "...")
            yield f'{where}: "{shown}" is not in {PAGE}'
    for line, entry, _ in known:
        if not WORD.search(entry):
            yield f"{PAGE}:{line}: `{entry}` says nothing"
        if entry not in used:
            yield f"{PAGE}:{line}: no message of the code is like `{entry}`"


found = list(findings())
for finding in found:
    print(finding)
print(f"troubleshooting: {len(list(messages()))} messages, {len(list(entries()))} entries, {len(found)} finding(s)")
sys.exit(1 if found else 0)
