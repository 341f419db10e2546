#!/usr/bin/env bash
# Format, layers, documents and clang-tidy: for people and for CI alike.
#   scripts/lint.sh          check everything
#   scripts/lint.sh --fix    format in place, then check
#   scripts/lint.sh --quick  all but clang-tidy
. "$(dirname "$0")/lib.sh"
need_packages "${build_packages[@]}" "${lint_packages[@]}"
mode=${1:-}

mapfile -t sources < <(git ls-files --cached --others --exclude-standard 'include/*.h' 'src/*.h' 'src/*.cc' 'tools/*.h' 'tools/*.cc' \
  'tests/*.h' 'tests/*.cc' 'bench/*.h' 'bench/*.cc' 'examples/*.cc' 'fuzz/*.cc')
say "clang-format (${#sources[@]} files)"
if [ "$mode" = --fix ]; then clang-format-19 -i "${sources[@]}"; fi
clang-format-19 --dry-run --Werror "${sources[@]}"

say "layers and documents"
python3 scripts/check_layers.py
python3 scripts/check_docs.py
[ "$mode" = --quick ] && exit 0

say "clang-tidy"
cmake --preset lint >/dev/null
python3 -c 'import json; [print(entry["file"]) for entry in json.load(open("build/lint/compile_commands.json"))]' |
  xargs -P "$jobs" -I{} clang-tidy-19 -p build/lint --quiet {} 2> >(grep -v 'warnings generated' >&2)
