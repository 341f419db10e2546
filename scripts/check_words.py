#!/usr/bin/env python3
"""Checks that pages, comments and messages are in plain English: words that readers stumble over are not in them.

    scripts/check_words.py [--root DIR]

Of sources only comments and strings are read. A line that speaks of such a word itself ends with `words: ok`.
"""

import argparse
import io
import pathlib
import re
import sys
import tokenize

# What we do not write, and what to write instead.
BANNED = (
    (r"alone", "only, or by itself"),
    (r"fellows?", "the other ranks"),
    (r"anew", "again"),
    (r"but (those|that) of", "except those of"),
    (r"(what|who|which) (is|are) no", "what is not a"),
    (r"(is|are|was|were|be|been|being) met( again)?", "matched, joined or registered again"),
    (r"unsa(y|id)\w*", "withdraw"),
    (r"passed over", "skipped, or does not count"),
    (r"of which (one of the|it|none|each|nobody)", "a sentence with a subject and a verb"),
    (r"in vain", "without success"),
    (r"one and the same", "the same"),
    (r"in good order", "normally"),
    (r"as ever", "as before"),
    (r"not any more", "no longer"),
    (r"g(ives?|ave|iven|iving) (it |them |the \w+ )?back", "release, or return"),
    (r"(spoil(s|t|ed|ing)?|befalls?|befallen)", "corrupt, or happen to"),
    (r"shall", "must, or will"),
    (r"dear(er|est)?", "expensive, or high"),
    (r"(lest|hitherto|thereof|wherein|therein|herein)", "a plain word"),
)
PATTERN = re.compile("|".join(rf"(?P<w{i}>\b{pattern}\b)" for i, (pattern, _) in enumerate(BANNED)), re.I)
ALLOWED = re.compile(r"words: ok|targets? (is|are) met|\b(let|leav)\w* .*\balone\b", re.I)
PAGES = ("*.md", "docs/**/*.md", "bench/*.md", "examples/**/*.md")
CPP = (
    "include",
    "src",
    "tools",
    "python/src",
    "bench",
    "fuzz",
    "tests/support",
    "tests/multiproc",
    "tests/fault",
    "tests/model",
)
SOURCES = (
    *(f"{folder}/**/*.{end}" for folder in CPP for end in ("h", "cc")),
    *(f"{folder}/**/*.py" for folder in ("python/tessera", "examples")),
    "scripts/*.sh",
)


def prose_of_cpp(text: str) -> list[tuple[int, str]]:
    """Comments and string literals, with their lines."""
    found = []
    in_raw_string = False
    for number, line in enumerate(text.splitlines(), 1):
        was_in_raw_string = in_raw_string
        in_raw_string = (in_raw_string or 'R"(' in line) and ')"' not in line
        if was_in_raw_string or in_raw_string:
            found.append((number, line))
        else:
            found += [(number, part) for part in re.findall(r'"(?:[^"\\]|\\.)*"|//.*', line)]
    return found


def prose_of_python(text: str) -> list[tuple[int, str]]:
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        (token.start[0] + offset, line)
        for token in tokens
        if token.type in kinds
        for offset, line in enumerate(token.string.splitlines())
    ]


def prose_of(path: pathlib.Path) -> list[tuple[int, str]]:
    text = path.read_text()
    if path.suffix in {".h", ".cc"}:
        return prose_of_cpp(text)
    if path.suffix == ".py":
        return prose_of_python(text)
    return list(enumerate(text.splitlines(), 1))


def findings(root: pathlib.Path) -> tuple[int, list[str]]:
    paths = sorted({path for pattern in (*PAGES, *SOURCES) for path in root.glob(pattern)})
    found = []
    for path in paths:
        for number, line in prose_of(path):
            if (match := PATTERN.search(line)) and not ALLOWED.search(line):
                instead = BANNED[int(match.lastgroup[1:])][1]
                found.append(f'{path.relative_to(root)}:{number}: "{match.group()}": write {instead}')
    return len(paths), found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    count, found = findings(parser.parse_args().root)
    print(*found, f"words: {count} files, {len(found)} finding(s)", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
