#!/usr/bin/env bash
# Builds the site of the documentation into build/site, from docs/ and the package's docstrings; a warning is an error.
. "$(dirname "$0")/lib.sh"
case ${1:-} in
  -h | --help) show_help; exit 0 ;;
esac
need_packages "${build_packages[@]}"
need_python
need_venv "${docs_wheels[@]}"
build cpu tessera_python
say "documentation"
PYTHONPATH="$root/build/cpu/python" "$TESSERA_VENV/bin/python" -m sphinx -E -W --keep-going -q -b html docs build/site
grep -q '<svg ' build/site/guide/plans.html || fail 1 "the site lacks the pictures of docs/guide/plans.ipynb"
echo "build/site/index.html"
