#!/usr/bin/env bash
# Checks format, Python, layers, documents and clang-tidy: for people and for CI alike.
#   scripts/lint.sh          check everything
#   scripts/lint.sh --fix    format in place, then check
#   scripts/lint.sh --quick  everything except clang-tidy
. "$(dirname "$0")/lib.sh"
mode=${1:-}
case $mode in
  '' | --fix | --quick) ;;
  -h | --help) show_help; exit 0 ;;
  *) fail 2 "unknown argument $mode (see --help)" ;;
esac
need_packages "${build_packages[@]}" "${lint_packages[@]}"

mapfile -t sources < <(find include src tools tests bench examples fuzz python/src -name '*.h' -o -name '*.cc' | sort)
say "clang-format (${#sources[@]} files)"
if [ "$mode" = --fix ]; then clang-format-19 -i "${sources[@]}"; fi
clang-format-19 --dry-run --Werror "${sources[@]}"

say "Python"
need_python
need_venv "${lint_wheels[@]}"
[ "$mode" = --fix ] && "$TESSERA_VENV/bin/ruff" format && "$TESSERA_VENV/bin/ruff" check --fix
"$TESSERA_VENV/bin/ruff" format --check --quiet
"$TESSERA_VENV/bin/ruff" check
"$TESSERA_VENV/bin/mypy"

say "layers and documents"
python3 scripts/check_layers.py
python3 scripts/check_docs.py
[ "$mode" = --quick ] && exit 0
scripts/docs.sh

say "clang-tidy"
need_venv "${python_wheels[@]}"
cmake --preset lint "-DPython_EXECUTABLE=$TESSERA_VENV/bin/python" >/dev/null
scripts/tidy.py build/lint "$jobs"
