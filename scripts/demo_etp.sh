#!/usr/bin/env bash
# Trains a small language model (examples/etp_train.cc) with its weights sharded over 1, 2 and 4 processes, by each
# format in which weights can travel, and compares the weights that they end with.
#   scripts/demo_etp.sh [STEPS [FORMAT...]]     60 steps; f32 bf16 mxfp8 nvfp4. Once it is built (scripts/demo.sh)
. "$(dirname "$0")/lib.sh"
case ${1:-} in
  -h | --help) show_help; exit 0 ;;
esac
steps=${1:-60}
formats=("${@:2}")
[ ${#formats[@]} -gt 0 ] || formats=(f32 bf16 mxfp8 nvfp4)
train=$root/build/cpu/bin/etp_train
[ -x "$train" ] || fail 2 "$train is not built: run scripts/demo.sh"
weights=$(mktemp -d)
trap 'rm -rf "$weights"' EXIT

say "ETP: a model of 2 million parameters, sharded over 1, 2 and 4 processes, $steps steps"
for format in "${formats[@]}"; do
  for ranks in 1 2 4; do
    "$train" "$ranks" "$format" "$steps" "$weights/$ranks" >"$weights/losses"
    first=$(sed -n '1s/.*loss //p' "$weights/losses")
    last=$(sed -n '$s/.*loss //p' "$weights/losses")
    differ=$({ cmp -l "$weights/1" "$weights/$ranks" || true; } | wc -l)
    echo "$format gathers, $ranks processes: loss $first -> $last; $differ of $(stat -c %s "$weights/1") bytes of the" \
      "weights differ from those of 1 process"
    [ "$differ" -eq 0 ] || fail 1 "$ranks processes end with other weights than 1"
  done
  rm -f "$weights"/[124]
done
