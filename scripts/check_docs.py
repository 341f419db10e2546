#!/usr/bin/env python3
"""Checks that ARCHITECTURE.md is short and true: under 120 lines, and every path and `name` in it exists in the tree.

    scripts/check_docs.py

A `path/like/this` in backquotes must exist; a `CamelCase` or `snake_case()` name must occur in a source file.
"""
import pathlib
import re
import sys

root = pathlib.Path(__file__).resolve().parent.parent
findings = []
sources = "\n".join(
    path.read_text()
    for folder in ("include", "src", "tools")
    for path in (root / folder).rglob("*")
    if path.suffix in {".h", ".cc"}
)

for document in ("ARCHITECTURE.md", "README.md", "CONTRIBUTING.md"):
    text = (root / document).read_text()
    lines = text.splitlines()
    if document == "ARCHITECTURE.md" and len(lines) >= 120:
        findings.append(f"{document}: {len(lines)} lines; it must stay under 120")
    in_fence = False
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            in_fence = not in_fence
        if in_fence:
            continue
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", line):
            if not (root / target).exists():
                findings.append(f"{document}:{number}: link to {target}, which does not exist")
        for name in re.findall(r"`([^`]+)`", line):
            if re.fullmatch(r"(src|include|tools|tests|bench|examples|docs|scripts|cmake|fuzz|\.ci)/[\w./-]*", name):
                if not (root / name).exists():
                    findings.append(f"{document}:{number}: path {name} does not exist")
            elif re.fullmatch(r"([A-Z][a-z0-9]+){2,}|[a-z_0-9]+\(\)", name):
                if not re.search(rf"\b{re.escape(name.removesuffix('()'))}\b", sources):
                    findings.append(f"{document}:{number}: name {name} occurs nowhere in the sources")
for line in findings:
    print(line)
print(f"docs: {len(findings)} finding(s)")
sys.exit(1 if findings else 0)
