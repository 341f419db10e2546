#!/usr/bin/env bash
# Trainers for real: sets up an environment with Hugging Face's Trainer and accelerate, PEFT, Lightning and packages of
# optimisers beside the usual one (1.5 GB, in .venv-ecosystem or TESSERA_ECOSYSTEM_VENV), builds the package into it, and
# runs what needs both. Not part of CI.
#   scripts/ecosystem.sh                 set-up and tests
#   scripts/ecosystem.sh setup           only the environment and the package; quick when run again
#   scripts/ecosystem.sh test [ARGS]     set-up and python/tests/etp/ecosystem; ARGS for pytest
#   scripts/ecosystem.sh python ARGS     the environment's Python, e.g. for bench/etp_trainer.py or an example
. "$(dirname "$0")/lib.sh"
what=${1:-all}
[ $# -eq 0 ] || shift
case $what in
  -h | --help) show_help; exit 0 ;;
  all | setup | test | python) ;;
  *) fail 2 "unknown argument $what (see --help)" ;;
esac
TESSERA_VENV=$(realpath -ms "${TESSERA_ECOSYSTEM_VENV:-$root/.venv-ecosystem}")
python=$TESSERA_VENV/bin/python

need_packages "${build_packages[@]}"
need_venv "${torch_wheels[@]}"
need_venv "${ecosystem_wheels[@]}"
if [ "$what" != python ] || ! "$python" -c "import tessera" 2>/dev/null; then install_package; fi
case $what in
  all | test) "$python" -m pytest -q -p no:cacheprovider python/tests/etp/ecosystem "$@" ;;
  python) exec "$python" "$@" ;;
esac
