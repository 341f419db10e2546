#!/usr/bin/env bash
# Fuzzes every reader of untrusted bytes (fuzz/), beginning with the committed corpora.
#   scripts/fuzz.sh                        every target for 20 s, one per CPU at a time
#   scripts/fuzz.sh --seconds 600 bus      these targets, that long
#   scripts/fuzz.sh --seeds                write the seeds again, after a change of format
#   scripts/fuzz.sh --minimize [TARGET...] keep only those found-* in the corpora that reach something new
# A failure leaves its input in build/fuzz/found/ and prints how to run it. After the fix, put it into fuzz/corpus/TARGET/
# under a name that says what it was: fuzz_test replays it from then on.
. "$(dirname "$0")/lib.sh"
seconds=20
mode=run
names=()
while [ $# -gt 0 ]; do
  case $1 in
    --seconds)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || fail 2 "--seconds needs a number"
      seconds=$2
      shift 2
      ;;
    --seeds | --minimize) mode=${1#--}; shift ;;
    -h | --help) show_help; exit 0 ;;
    -*) fail 2 "unknown argument $1 (see --help)" ;;
    *) names+=("$1"); shift ;;
  esac
done
for name in "${names[@]}"; do [ -d "fuzz/corpus/$name" ] || fail 2 "no target $name in fuzz/corpus/"; done
[ ${#names[@]} -gt 0 ] || mapfile -t names < <(ls fuzz/corpus)

need_packages "${build_packages[@]}"
if [ "$mode" = seeds ]; then
  build cpu fuzz_seeds
  rm -f fuzz/corpus/*/seed-*
  exec build/cpu/bin/fuzz_seeds fuzz/corpus
fi
build asan fuzz_targets

export ASAN_OPTIONS="detect_leaks=1:allow_addr2line=1"
export UBSAN_OPTIONS="print_stacktrace=1:allow_addr2line=1"
found=$root/build/fuzz/found
mkdir -p "$found"
# Limits of a single allocation and of an input: what a reader allocates must be in proportion to its input.
limits=(-malloc_limit_mb=64 -rss_limit_mb=1024 -timeout=10 -max_len=32768)

# fuzz TARGET
fuzz() {
  local grown=$root/build/fuzz/corpus/$1 dictionary=fuzz/$1.dict log=$found/$1.log options=("${limits[@]}")
  mkdir -p "$grown"
  [ -e "$dictionary" ] && options+=("-dict=$dictionary")
  if "build/asan/bin/fuzz_$1" "${options[@]}" -max_total_time="$seconds" -print_final_stats=1 \
    -artifact_prefix="$found/$1-" "$grown" "fuzz/corpus/$1" >"$log" 2>&1; then
    awk -v name="$1" '/number_of_executed_units/ { runs = $2 } / cov: / { cov = $4 } /peak_rss/ { rss = $2 }
      END { printf "%-12s %9d inputs, %5d edges, %4d MiB\n", name, runs, cov, rss }' "$log"
    return 0
  fi
  local input
  input=$(sed -n 's/.*Test unit written to //p' "$log" | tail -1)
  grep -m1 -A25 -E 'ERROR:|runtime error|broken invariant|uncaught exception' "$log" || tail -30 "$log"
  echo "$1 FAILED; run it again: build/asan/bin/fuzz_$1 ${limits[*]} ${input:-(no input, see $log)}"
  return 1
}

# minimize TARGET: libFuzzer's merge, seeds first, into found-HASH
minimize() {
  local grown=$root/build/fuzz/corpus/$1 merged file
  merged=$(mktemp -d)
  cp fuzz/corpus/"$1"/* "$merged"
  "build/asan/bin/fuzz_$1" "${limits[@]}" -max_len=512 -merge=1 "$merged" "$grown" >/dev/null 2>&1
  for file in "$merged"/*; do
    [ -e "fuzz/corpus/$1/${file##*/}" ] || cp "$file" "fuzz/corpus/$1/found-$(cksum <"$file" | cut -d' ' -f1)"
  done
  rm -r "$merged"
}

if [ "$mode" = minimize ]; then
  for name in "${names[@]}"; do minimize "$name"; done
  exit 0
fi
say "fuzzing ${names[*]} for $seconds s each"
status=0
running=0
for name in "${names[@]}"; do
  if [ "$running" -ge "$jobs" ]; then wait -n || status=1; running=$((running - 1)); fi
  fuzz "$name" &
  running=$((running + 1))
done
while [ "$running" -gt 0 ]; do wait -n || status=1; running=$((running - 1)); done
exit $status
