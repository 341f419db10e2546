#!/usr/bin/env python3
"""scripts/check_words.py on files with words that we do not write, and with words that only look like them."""

import pathlib
import subprocess
import sys
import tempfile

CHECK = pathlib.Path(__file__).resolve().parents[2] / "scripts/check_words.py"

WRONG = {
    "README.md": [
        "A rank alone is served.",
        "It is told anew.",
        "All but those of rank 0.",
        "A value that what is no tensor has.",
    ],
    "docs/guide/page.md": [
        "The job is met again.",
        "Its fellows wait.",
        "A launcher of which one of the two is missing is passed over.",
    ],
    "docs/faq.md": [
        "It holds tensors of which nobody knows.",
        "It waited in vain.",
        "Both are one and the same.",
        "It ends in good order.",
        "All is as ever.",
        "A rank that waits, not any more.",
        "The last one gives the rank back.",
        "A rank that is spoilt.",
        "It shall end.",
        "A copy is dearer.",
        "Wait, lest it fails.",
    ],
    "tests/support/some.h": ["// Lets a rank wait in vain."],
    "tools/some.cc": ['fmt::print("on rank {} alone", rank);', "// Withdrawn: the version is unsaid."],
}
RIGHT = {
    "CHANGELOG.md": [
        "All targets are met.",
        "Standalone programs.",
        "Leave the file alone.",
        "The word anew is not written. words: ok",
        "Give me more, and come back: whoever calls shallow() gets it.",
    ],
    "tools/other.cc": ["int alone = 0;  // one process", "run(alone);", "const bool met = anew(fellow);"],
    "tools/page.py": ["alone = met(anew)"],
}


def run(files: dict[str, list[str]]) -> tuple[int, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in files.items():
            path = pathlib.Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n")
        done = subprocess.run(
            [sys.executable, str(CHECK), "--root", folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    return done.returncode, done.stdout.splitlines()


def main() -> int:
    status, lines = run(RIGHT)
    if status != 0 or not lines[-1].endswith(" 0 finding(s)"):
        print(f"status {status} for what is right:", *lines, sep="\n")
        return 1
    status, lines = run(WRONG)
    found = {line.split(": ")[0] for line in lines[:-1]}
    wanted = {f"{name}:{number}" for name, text in WRONG.items() for number in range(1, len(text) + 1)}
    if status != 1 or found != wanted:
        print(
            f"status {status}; missed: {sorted(wanted - found)}; not wrong: {sorted(found - wanted)}", *lines, sep="\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
