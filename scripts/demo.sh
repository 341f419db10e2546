#!/usr/bin/env bash
# The main job: a real model moves from a running 4-process job into a 2-process job, three versions, every element checked.
#   scripts/demo.sh                       the packaged 90 MB sentence model (all-MiniLM-L6-v2); then examples/weight_sync:
#                                         one job fine-tunes that model while another one serves it; then
#                                         examples/etp_finetune: 2 processes that share its weights fine-tune it, and end
#                                         with the bytes of one process; then
#                                         examples/rl_loop: 4 processes train a language model, 2 others write samples
#                                         with every version and send them back with scores; then
#                                         examples/etp_train.cc: 1, 2 and 4 processes end with the same weights
#   scripts/demo.sh --checkpoint PATH     any other .safetensors file, index or folder, without the examples
. "$(dirname "$0")/lib.sh"
case ${1:-} in
  -h | --help) show_help; exit 0 ;;
esac
need_packages "${build_packages[@]}"
need_python
build cpu tessera_cli tessera_python etp_train
cd "$caller"  # relative paths of --checkpoint start here
"$TESSERA_VENV/bin/python" "$root/scripts/demo.py" "$@"
[ $# -eq 0 ] || exit 0
cd "$root"
PYTHONPATH=$root/build/cpu/python "$TESSERA_VENV/bin/python" "$root/examples/weight_sync/run.py"
say "ETP: 2 processes share the weights of MiniLM, 1 process keeps all of them"
PYTHONPATH=$root/build/cpu/python "$TESSERA_VENV/bin/python" "$root/examples/etp_finetune/run.py" --steps 2
say "RL loop: 4 processes train a language model, 2 others write samples with every version"
PYTHONPATH=$root/build/cpu/python "$TESSERA_VENV/bin/python" "$root/examples/rl_loop/run.py" --steps 10 --versions 3
scripts/demo_etp.sh
