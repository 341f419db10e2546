#!/usr/bin/env python3
"""Checks that docs/troubleshooting.md knows every error message of the code, and no other.

    scripts/check_troubleshooting.py

A message is the first text with a word in it that fail(), failed(), Error() or Status() is given. Not looked at: broken
invariants (kInternal), what the system says (fail_errno), and what stands in tests or in models. An entry is a text in
backquotes in a table's first column; "..." in it stands for anything.
"""
import pathlib
import re
import sys

PAGE = "docs/troubleshooting.md"
CALL = re.compile(r"\b(?:fail|failed|Error|Status)\s*\(")
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
# What comes before another message, and says nothing itself.
PREFIX = re.compile(r"(((batch|pair|store|tensor) )?\0(: |, ))+\0")
NOT_FOR_USERS = re.compile(r"_test\.cc|testing\.h|ring_model\.|command_probe\.h|test_actor\.")
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


def messages():
    """(where, text) of every message; its fields are cut out of the text, and stand as NUL."""
    for folder in ("include", "src", "tools"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in {".h", ".cc"} or NOT_FOR_USERS.search(path.name):
                continue
            text = re.sub(r"(^|\s)//.*", "", path.read_text())
            for call in CALL.finditer(text):
                given = list(arguments(text, call.end()))
                if any("kInternal" in code for code, _ in given):
                    continue
                for _, literal in given:
                    plain = FIELD.sub("\0", literal.replace("{{", "{ ").replace('\\"', '"').replace("\\n", ""))
                    if PREFIX.fullmatch(plain):
                        break
                    if WORD.search(plain):
                        where = f"{path.relative_to(root)}:{text.count(chr(10), 0, call.start()) + 1}"
                        yield where, plain
                        break


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
