#!/usr/bin/env bash
# The main job: a real model moves from a running 4-process job into a 2-process job, three versions, every element checked.
#   scripts/demo.sh                       the packaged 90 MB sentence model (all-MiniLM-L6-v2); then examples/weight_sync:
#                                         one job fine-tunes that model while another one serves it
#   scripts/demo.sh --checkpoint PATH     any other .safetensors file, index or folder, without the example
. "$(dirname "$0")/lib.sh"
case ${1:-} in
  -h | --help) show_help; exit 0 ;;
esac
need_packages "${build_packages[@]}"
need_python
build cpu tessera_cli tessera_python
cd "$caller"  # relative paths of --checkpoint start here
"$TESSERA_VENV/bin/python" "$root/scripts/demo.py" "$@"
[ $# -gt 0 ] || PYTHONPATH=$root/build/cpu/python "$TESSERA_VENV/bin/python" "$root/examples/weight_sync/run.py"
