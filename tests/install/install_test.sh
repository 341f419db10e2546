#!/usr/bin/env bash
# Installs BUILD into a folder of its own and builds a client against it, as a user's project would.
#   install_test.sh BUILD SOURCE
set -euo pipefail
build=$1 source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/prefix" >/dev/null
"$work/prefix/bin/tessera" --version
cmake -G Ninja -S "$source" -B "$work/client" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_BUILD_TYPE=Release >/dev/null
ninja -C "$work/client" --quiet
TESSERA_RUNTIME_DIR="$work/run" "$work/client/client"
