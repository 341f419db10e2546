#!/usr/bin/env bash
# Sets up a fresh Debian or Ubuntu machine, builds, and runs every test except the slow ones.
#   scripts/test.sh                  unit, property, multi-process, command and install tests
#   scripts/test.sh --slow           the slow lane as well
#   scripts/test.sh --preset asan    under a sanitizer (asan, tsan)
#   scripts/test.sh [...] -- ARGS    further arguments for ctest, e.g. -- -R planner
. "$(dirname "$0")/lib.sh"
preset=cpu
labels=(-LE slow)
options=()
while [ $# -gt 0 ]; do
  case $1 in
    --preset) [ $# -ge 2 ] || fail 2 "--preset needs a name: cpu, asan or tsan"; preset=$2; shift 2 ;;
    --slow) labels=(); options=(-DTESSERA_BUILD_SLOW_TESTS=ON); shift ;;
    --) shift; break ;;
    -h | --help) show_help; exit 0 ;;
    *) fail 2 "unknown argument $1 (see --help)" ;;
  esac
done
need_packages "${build_packages[@]}"
if [ "$preset" = cpu ]; then
  need_python
  ! grep -qx VERSION_CODENAME=bookworm /etc/os-release || scripts/wheel.sh --prepare --python "$TESSERA_VENV/bin/python"
fi
build "$preset" "${options[@]}"
if [ ${#labels[@]} -eq 0 ]; then build release; fi  # each source on its own, with the headers that it names itself
say "testing ($preset)"
suppressions="suppressions='$root/scripts/sanitizers.supp'"  # quoted for their parsers: a path may hold blanks
export ASAN_OPTIONS="detect_leaks=1:abort_on_error=0:allow_addr2line=1:$suppressions"
export LSAN_OPTIONS="$suppressions"
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:$suppressions"
export UBSAN_OPTIONS="print_stacktrace=1:allow_addr2line=1:$suppressions"
# Under a sanitizer, where Python's are left out, most of the time goes to tests that wait for each other's processes.
[ "$preset" = cpu ] || jobs=$((jobs + 2))
ctest --test-dir "build/$preset" --output-on-failure -j "$jobs" "${labels[@]}" "$@"
