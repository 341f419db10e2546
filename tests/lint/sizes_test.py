#!/usr/bin/env python3
"""scripts/check_sizes.py on sources that are too long, that are short enough, and that give a reason."""

import pathlib
import subprocess
import sys
import tempfile

CHECK = pathlib.Path(__file__).resolve().parents[2] / "scripts/check_sizes.py"


def function(name, lines, before=""):
    """A function of so many lines, with braces in literals and comments."""
    body = ['  const char* text = "}{";  // }'] + ["  f({1, 2}, [] { return '{'; });"] * (lines - 3)
    return f"{before}int {name}(int a = {{}}) {{\n" + "\n".join(body) + "\n}\n"


def members(kind, name, count, suffix, before=""):
    fields = "\n".join(f"  std::map<int, std::vector<int>> a{i}{suffix} = {{}};" for i in range(count - 2))
    return (
        f"{before}{kind} {name} final : public Base<int> {{\n public:\n  explicit {name}(int a) : b_(a) {{}}\n"
        f"  int get() const {{ return b_; }}\n  using Map = std::map<int, int>;\n"
        f"  static constexpr int k{suffix} = 1;\n  struct Part {{\n    int inner = 0;\n  }};\n{fields}\n"
        f"  std::function<void(int)> b{suffix}, c{suffix} GUARDED_BY(mutex_);\n}};\n"
    )


def findings(text):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "src").mkdir()
        (root / "src/a.cc").write_text(text)
        done = subprocess.run([sys.executable, CHECK, "--root", root], capture_output=True, text=True)
    assert done.returncode == (1 if done.stdout else 0) and not done.stderr, done
    return done.stdout


CASES = [
    (function("ends", 60), ""),
    (function("goes_on", 61), "goes_on() has 61 lines, more than 60"),
    (function("template_one", 61, "template <typename T, int n>\n"), "template_one() has 62 lines"),
    ("namespace a {\n" + function("within", 61) + "}  // namespace a\n", "within() has 61 lines"),
    (function("told", 61, "// sizes: function, a table of cases\n"), ""),
    (function("untold", 61, "// sizes: function\n"), "untold() has 61 lines"),
    (members("class", "Few", 20, "_"), ""),
    (members("class", "Many", 21, "_"), "Many has 21 data members, more than 20"),
    (members("struct", "Machine", 21, "_"), "Machine has 21 data members"),
    (members("struct", "Options", 40, ""), ""),
    (members("struct", "Too", 41, ""), "Too has 41 data members, more than 40"),
    (members("class", "Told", 21, "_", "// sizes: members, they change together\n"), ""),
    ("//\n" * 500, ""),
    ("//\n" * 501, "501 lines, more than 500"),
    ("// sizes: file, generated\n" + "//\n" * 501, ""),
]


def main():
    failed = 0
    for text, expected in CASES:
        found = findings(text)
        if (expected not in found) if expected else found:
            print(f"expected {expected!r}, found {found!r} in:\n{text[:200]}")
            failed += 1
    print(f"{len(CASES)} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
