#!/usr/bin/env python3
"""Checks that docs/troubleshooting.md knows every error message of the code, and no other.

    scripts/check_troubleshooting.py

A message is the first text with a word in it that one of these is given: fail(), failed(), f.require(), Error(),
Status(); log().warn(), log().error(), log_event() at these levels; the exceptions of the command line's parser.
Messages are also put together elsewhere, so that a text of some length that fmt::format() is given counts, too, and one
that a check of an option returns, unless it only names something (NAMES).

Of the Python package it is the first that one of these is given: an exception, type(error)(), a function that says that
it returns an exception, warnings.warn(), sys.exit(). A text of some length counts, too, in what a function returns that
says that it returns a str. Where an expression chooses between texts, each is a message.

Not looked at: broken invariants (kInternal, AssertionError), what the system says (fail_errno), what is printed and no
error, and what stands in tests or in models. An entry is a text in backquotes in a table's first column; "..." in it
stands for anything.
"""

import ast
import itertools
import pathlib
import re
import sys

PAGE = "docs/troubleshooting.md"
CALL = re.compile(
    r"\b(?P<error>fail|failed|[fg]\.require|Error|Status|CLI::\w*Error|log\(\)\.(?:warn|error))\s*\("
    r"|\blog_event\((?P<event>)"
    r"|(?<!fail_errno\()\bfmt::format\((?P<composed>)"
)
RETURNED = re.compile(r'\breturn [^;"]*"((?:[^"\\]|\\.)*)"')
# What is composed or returned is a message from this many letters on, in more than one word.
FEWEST_LETTERS = 14
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
# What comes before another message, and says nothing itself.
PREFIX = re.compile(r"(((batch|pair|store|tensor) )?\0(: |, ))+\0")
NOT_FOR_USERS = re.compile(r"_test\.cc|testing\.h|ring_model\.|\bprobe\.h|test_actor\.")
# These make what a command prints: plans, pictures, tables.
NO_MESSAGES = re.compile(
    r"src/plan/|src/base/metrics|src/memory/host/device|src/transport/shm/transport"
    r"|tools/(bench/report|doctor_checks|progress_bar|top/view|transfer_report)|python/src/"
)
# Parts of messages that say who or what, and not that anything is wrong.
NAMES = {
    "agent: \0",
    "a caller (pid \0)",
    "all of job \0 (\0here: \0)",
    "pid \0command \0role \0",  # of the runtime folder's notes
    "an axis (name=size or size)",  # what layout text may hold, in "expected ..., got ..."
    "at most \0 ranks in all",
    "at most \0 placements",
    "grant a lease of \0 s",
    "received version \0",
    "the end of the lease of \0",
    "the handle of command \0",
    "the arguments or the default",  # who says rank and world
}
# What the parser of the command line says by itself.
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
# In Python: what shows a text that is no exception's, and whose text no user is to see.
SHOWN_BY = {"warn", "exit"}
INVARIANTS = {"AssertionError", "InternalError"}
WORD = re.compile(r"[A-Za-z]{3}")
FIELD = re.compile(r"\{[^{}]*\}")

root = pathlib.Path(__file__).resolve().parent.parent


def arguments(text, begin):
    """The arguments of the call whose parenthesis ends at `begin`, each as (code, the first literal in it)."""
    depth, code, literal, at = 1, "", "", begin
    joins = True  # the next literal goes on where this one ends
    while depth > 0 and at < len(text):
        quoted = LITERAL.match(text, at)
        if quoted:
            literal += quoted.group(1) if joins else ""
            at = quoted.end()
            continue
        character = text[at : at + 3] if re.match(r"'[^\\]'", text[at : at + 3]) else text[at]
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 or (depth == 1 and character == ","):
            yield code, literal
            code, literal, joins = "", "", True
        else:
            code += character
            joins = joins and (not literal or character.isspace())
        at += len(character)


def plain_text(literal):
    return FIELD.sub("\0", literal.replace("{{", "{ ").replace('\\"', '"').replace("\\n", "").replace("\\r", ""))


def is_long(text):
    """Whether it may be a message by itself; one that begins with a comma goes on where another ends."""
    if text.startswith((",", "\0,")) or " " not in text.replace("\0", "").strip():
        return False
    return len(re.findall("[A-Za-z]", text)) >= FEWEST_LETTERS


def messages_of_cpp():
    for folder in ("include", "src", "tools", "python/src"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in {".h", ".cc"} or NOT_FOR_USERS.search(path.name) or "testing" in path.parts:
                continue
            text = re.sub(r"(^|\s)//.*", "", path.read_text())
            name = str(path.relative_to(root))

            def where(found, name=name, text=text):
                return f"{name}:{text.count(chr(10), 0, found.start()) + 1}"

            for call in CALL.finditer(text):
                given = list(arguments(text, call.end()))
                if any("kInternal" in code for code, _ in given):
                    continue
                if call["event"] is not None:  # level, name, fields, message
                    if "warn" not in given[0][0] and "err" not in given[0][0]:
                        continue
                    given = given[3:]
                for _, literal in given:
                    plain = plain_text(literal)
                    if PREFIX.fullmatch(plain):
                        break
                    if WORD.search(plain):
                        composed = call["composed"] is not None
                        if plain not in NAMES and not (composed and (NO_MESSAGES.search(name) or not is_long(plain))):
                            yield where(call), plain
                        break
            if name.startswith("tools/option_checks"):
                for found in RETURNED.finditer(text):
                    if is_long(found[1]):
                        yield where(found), plain_text(found[1])


def texts(node):
    """Every text that an expression of Python may give."""
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
    """The name of what is called; of type(error)(), that of any exception."""
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
        if returned_type(function) != "str" or function.name.startswith("__"):
            continue
        for node in ast.walk(function):
            for text in texts(node.value) if isinstance(node, ast.Return) else []:
                if is_long(text) and text not in NAMES:
                    yield f"{path}:{node.lineno}", text


def messages():
    """(where, text) of every message; its fields are cut out of the text, and stand as NUL."""
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
