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
[ -f build/cpu/compile_commands.json ] || cmake --preset cpu >/dev/null
# A file that passed is not read again until it, a header, or the rules change.
stamps=build/tidy
mkdir -p "$stamps"
headers=$(cat .clang-tidy build/cpu/compile_commands.json $(git ls-files --cached --others --exclude-standard '*.h') | cksum | cut -d' ' -f1)
todo=()
for file in "${sources[@]}"; do
  case $file in *.cc) ;; *) continue ;; esac
  case $file in *_test.cc | tests/* | bench/* | fuzz/*) continue ;; esac
  stamp="$stamps/$(echo "$file" | tr / _).$headers.$(cksum <"$file" | cut -d' ' -f1)"
  [ -e "$stamp" ] || todo+=("$file" "$stamp")
done
echo "$((${#todo[@]} / 2)) files to read"
[ ${#todo[@]} -eq 0 ] && exit 0
printf '%s\0' "${todo[@]}" | xargs -0 -n 2 -P "$jobs" sh -c \
  'clang-tidy-19 -p build/cpu --quiet "$0" 2>/dev/null && touch "$1"'
