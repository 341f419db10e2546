#!/usr/bin/env bash
# Sets up a fresh Debian or Ubuntu machine, cross-compiles the codec layer for 64-bit Arm, and runs its tests under
# qemu-user, so that the NEON kernels give the reference's bytes, too.
#   scripts/neon.sh              codec_test and quantize_test
#   scripts/neon.sh -- ARGS      further arguments for ctest, e.g. -- -R NEON
# The libraries for Arm are unpacked below build/neon; no package for Arm is installed.
. "$(dirname "$0")/lib.sh"
while [ $# -gt 0 ]; do
  case $1 in
    --) shift; break ;;
    -h | --help) show_help; exit 0 ;;
    *) fail 2 "unknown argument $1 (see --help)" ;;
  esac
done
[ "$(uname -m)" != aarch64 ] || { echo "this machine is one: scripts/test.sh runs the NEON kernels"; exit 0; }
need_packages "${neon_packages[@]}"

sysroot=$root/build/neon/sysroot
apt=$root/build/neon/apt

# arm64 PROGRAM COMMAND [ARGUMENT...]: apt-get or apt-cache for arm64.
arm64() { apt_apart "$apt" "$1" -o APT::Architecture=arm64 -o APT::Architectures=arm64 "${@:2}"; }

# The packages, and the libraries to which those for development are tied, as libfmt-dev to "libfmt9 (= 9.1.0)".
with_libraries() {
  printf '%s\n' "$@"
  arm64 apt-cache show --no-all-versions "$@" | sed -n 's/^Depends: //p' | tr , '\n' | sed -n 's/^ *\(lib[^ ]*\) (= .*/\1/p'
}

# Into $apt/debs. Of the lists, only those that the packages are in need be there.
download() {
  mkdir -p "$apt/debs"
  if grep -qx ID=ubuntu /etc/os-release; then  # Arm has other mirrors
    local codename
    codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    printf 'deb [signed-by=/usr/share/keyrings/ubuntu-archive-keyring.gpg] http://ports.ubuntu.com/ubuntu-ports %s main universe\n' \
      "$codename" "$codename-updates" >"$apt/sources.list"
  fi
  arm64 apt-get update -qq || true
  local packages
  mapfile -t packages < <(with_libraries "$@" | sort -u)
  cd "$apt/debs" && arm64 apt-get download -qq "${packages[@]}"
}

# Unpacks the packages into the sysroot; quick when they are there.
need_sysroot() {
  [ "$(cat "$sysroot/.unpacked" 2>/dev/null)" = "$*" ] && return 0
  say "unpacking for Arm: $*"
  rm -rf "$sysroot" "$apt"
  mkdir -p "$sysroot"
  (download "$@") || fail 1 "could not download $*: is there a network?"
  local package
  for package in "$apt"/debs/*.deb; do dpkg-deb -x "$package" "$sysroot"; done
  rm -rf "$apt"
  echo "$*" >"$sysroot/.unpacked"
}

need_sysroot "${neon_libraries[@]}"
build neon
say "testing (neon)"
ctest --test-dir build/neon --output-on-failure --no-tests=error -j "$jobs" "$@"
