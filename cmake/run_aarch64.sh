#!/bin/sh
# Runs a program of the preset `neon`: run_aarch64.sh PROGRAM [ARGUMENT...]. To the program this script is itself, so
# that a death test, which starts the program again with other options, comes by here as well.
case $1 in
  -*) ;;
  *) export TESSERA_EMULATED="$1"; shift ;;
esac
exec qemu-aarch64 -L /usr/aarch64-linux-gnu -0 "$0" "$TESSERA_EMULATED" "$@"
