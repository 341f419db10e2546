#!/usr/bin/env python3
"""Checks that what is read at one go is short: files, functions and classes of C++.

    scripts/check_sizes.py               # src/, tools/ and python/src; exit status 1 and one line for each finding
    scripts/check_sizes.py --root DIR    # of another tree

Limits:
  * a file has at most 500 lines;
  * a function has at most 60, from the first line of its definition to its last;
  * a class has at most 20 data members: its names that end in `_`;
  * a struct without such names (options, statistics, a message) has at most 40.

What is above a limit for a good reason says so in the comment right above it (a file: in its first ten lines), in a
line that begins with `// sizes: file`, `// sizes: function` or `// sizes: members`, then a comma and the reason.
"""

import argparse
import pathlib
import re
import sys

FOLDERS = ("src", "tools", "python/src")
FILE_LINES = 500
FUNCTION_LINES = 60
CLASS_MEMBERS = 20
STRUCT_MEMBERS = 40

# A string or character literal, raw ones too, or a comment. Their newlines stay, so that lines can be counted.
SKIPPED = re.compile(
    r'R"(?P<mark>[^()\\ ]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-zA-Z])\'(?:\\.|[^\'\\\n])+\''
    r"|//[^\n]*|/\*.*?\*/",
    re.DOTALL,
)
PREPROCESSOR = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.)*(?:\\\n(?:[^\n\\]|\\.)*)*", re.MULTILINE)
ATTRIBUTE = re.compile(r"\[\[.*?\]\]|\balignas\([^)]*\)", re.DOTALL)
ACCESS = re.compile(r"^(?:\s*(?:public|private|protected)\s*:)+")
TEMPLATE = re.compile(r"^\s*template\s*<")
MACRO = re.compile(r"\b[A-Z][A-Z_0-9]*\s*(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?")
TYPE = re.compile(r"^\s*(?:typedef\s+)?(class|struct|union)\b\s*([\w:]*)")
NO_MEMBER = re.compile(r"^\s*(?:using|static|friend|typedef|enum|template|inline|constexpr|extern|namespace)\b")
# The end of a head whose brace begins a function's body, not a member's initialiser.
BODY = re.compile(r"(?:\)|\b(?:const|noexcept|override|final|mutable|try)|&&?|->[^;{}()]*)\s*$")


def blank(text):
    return "".join("\n" if c == "\n" else " " for c in text)


def without_text(source):
    """The source without comments, literals and directives, line by line as it was."""

    def skip(match):
        text = match.group(0)
        return blank(text) if text.startswith("/") else '""' + blank(text)[2:]

    return PREPROCESSOR.sub(lambda match: blank(match.group(0)), SKIPPED.sub(skip, source))


def without_angles(text):
    """Without template arguments and the contents of parentheses and braces."""
    for pattern in (r"\([^()]*\)", r"\{[^{}]*\}"):
        before = None
        while before != text:
            before, text = text, re.sub(pattern, " ", text)
    before = None
    while before != text:
        before, text = text, re.sub(r"<[^<>]*>", " ", text)
    return text


def declared(statement, named):
    """How many data members a statement of a class declares; `named`: only those whose name ends in `_`."""
    text = ACCESS.sub("", ATTRIBUTE.sub(" ", statement)).strip()
    if not text or NO_MEMBER.match(text) or "operator" in text:
        return 0
    if named:
        flat = without_angles(re.sub(r"=(?:[^,;{}()<>]|\([^()]*\)|\{[^{}]*\}|<[^<>]*>)*", " ", text))
        return len(re.findall(r"\b[A-Za-z]\w*_(?!\w)", flat))
    flat = re.sub(r"<[^<>]*>", " ", text)
    while "<" in flat and re.search(r"<[^<>]*>", flat):
        flat = re.sub(r"<[^<>]*>", " ", flat)
    flat = re.sub(r"\b[A-Z][A-Z_]+\([^()]*\)", " ", flat)
    if "(" in flat.split("=")[0].split("{")[0]:
        return 0  # a function
    flat = re.sub(r"=[^,;]*", " ", without_angles(flat))
    return flat.count(",") + 1 if len(re.findall(r"\w+", flat)) > 1 else 0


class Scope:
    def __init__(self, kind, name, line):
        self.kind = kind  # "namespace", "class", "struct" or "other"
        self.name = name
        self.line = line
        self.statements = []


def head_kind(head):
    """What a brace after `head` begins, in a namespace or class."""
    text = ACCESS.sub("", ATTRIBUTE.sub(" ", head)).strip()
    while TEMPLATE.match(text):
        depth, at = 0, text.index("<")
        for at in range(text.index("<"), len(text)):
            depth += {"<": 1, ">": -1}.get(text[at], 0)
            if depth == 0:
                break
        text = re.sub(r"^\s*requires\b[^{;]*?(?=\b(?:class|struct|void|auto|bool)\b)", "", text[at + 1 :]).strip()
    if re.match(r"(?:inline\s+)?namespace\b|extern\s*\"", text):
        return "namespace", ""
    if re.match(r"(?:typedef\s+)?enum\b", text):
        return "other", ""
    made = TYPE.match(MACRO.sub(" ", text, count=1) if re.match(r"(?:class|struct)\s+[A-Z_]+[\s(]", text) else text)
    if made and "(" not in MACRO.sub(" ", text).split("{")[0].split(":")[0]:
        return made.group(1).replace("union", "struct"), made.group(2) or "(unnamed)"
    if "(" in text and not re.search(r"=\s*$", text) and (BODY.search(text) or text.endswith("}")):
        return "function", re.split(r"\(", text)[0].split()[-1]
    return "value", ""


def closing(text, at):
    """The position of the brace that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text) - 1


def excuse(lines, line, what):
    """Whether the comment above a (1-based) line gives a reason."""
    at = line - 2
    while at >= 0 and re.match(r"\s*(?://|template\b)", lines[at]):
        if re.match(rf"\s*// sizes: {what}, \S", lines[at]):
            return True
        at -= 1
    return False


def functions_and_classes(source):
    """(functions, classes): (name, first line, lines) and (name, first line, members, whether they end in `_`)."""
    text = without_text(source)
    functions, classes = [], []
    scopes = [Scope("namespace", "", 1)]
    start = at = 0
    line_of = lambda place: text.count("\n", 0, place) + 1  # noqa: E731
    while at < len(text):
        c = text[at]
        if c == "(":  # defaults in it may have braces
            depth = 0
            while at < len(text):
                depth += {"(": 1, ")": -1}.get(text[at], 0)
                at += 1
                if depth == 0:
                    break
            continue
        if c == "{":
            head = text[start:at]
            kind, name = head_kind(head)
            first = line_of(start + len(head) - len(ACCESS.sub("", head).lstrip()))
            if kind in ("namespace", "class", "struct"):
                scopes.append(Scope(kind, name, first))
                start = at + 1
            else:
                end = closing(text, at)
                if kind == "function":
                    functions.append((name, first, line_of(end) - first + 1))
                    start = end + 1
                elif kind == "other":
                    start = end + 1
                at = end
        elif c == "}":
            scope = scopes.pop() if len(scopes) > 1 else scopes[0]
            if scope.kind in ("class", "struct"):
                members = sum(declared(statement, True) for statement in scope.statements)
                named = members > 0 or scope.kind == "class"
                if not named:
                    members = sum(declared(statement, False) for statement in scope.statements)
                classes.append((scope.name, scope.line, members, named))
            start = at + 1
        elif c == ";":
            scopes[-1].statements.append(text[start:at])
            start = at + 1
        at += 1
    return functions, classes


def check(path, name):
    source = path.read_text()
    lines = source.splitlines()
    findings = []
    if len(lines) > FILE_LINES and not any(re.match(r"// sizes: file, \S", line) for line in lines[:10]):
        findings.append(f"{name}: {len(lines)} lines, more than {FILE_LINES}: a file has one idea")
    functions, classes = functions_and_classes(source)
    for function, line, length in functions:
        if length > FUNCTION_LINES and not excuse(lines, line, "function"):
            findings.append(f"{name}:{line}: {function}() has {length} lines, more than {FUNCTION_LINES}")
    for owner, line, members, named in classes:
        limit = CLASS_MEMBERS if named else STRUCT_MEMBERS
        if members > limit and not excuse(lines, line, "members"):
            findings.append(f"{name}:{line}: {owner} has {members} data members, more than {limit}")
    return findings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    findings = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".h", ".cc"):
                findings += check(path, path.relative_to(root))
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
