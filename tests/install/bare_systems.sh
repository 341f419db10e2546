#!/usr/bin/env bash
# Installs wheels on bare systems, where none of the libraries that they were built with can be seen, and uses them there
# (first_use.py): with torch 2.6, with the newest that CI knows, and with none.
#   bare_systems.sh WHEELS [SYSTEMS]    SYSTEMS: a folder for the systems and torch, some 20 GB; default build/bare
# Debian 11 (glibc 2.31), 12 and 13, made by debootstrap, as root. Debian 11 has no Python of 3.11: there, it is compiled
# from Debian 12's source. Each system has the wheel for its Python: 13 that of the stable ABI.
. "$(dirname "$0")/../../scripts/lib.sh"
[ $# -ge 1 ] || { show_help; exit 2; }
wheels=$(cd "$caller" && realpath "$1")
systems=$(cd "$caller" && realpath -m "${2:-$root/build/bare}")
mirror=$(debian_mirror)
torches=("" 2.6.0 "${torch_wheels[0]#torch==}")
[ "$(id -u)" -eq 0 ] || fail 2 "bare systems are made and entered by root only"
need_packages debootstrap dpkg-dev python3-venv

# within SUITE COMMAND: with processes, devices and mounts of its own, which end with it
within() {
  unshare --mount --pid --fork bash -euc '
    mount -t proc proc "$0/proc"
    mount --rbind /dev "$0/dev"
    mount --bind "$1" "$0/wheels"
    mount --bind "$2" "$0/site"
    mount --bind "$3" "$0/install"
    exec env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive chroot "$0" bash -euc "$4"
  ' "$systems/$1" "$wheels" "$site" "$root/tests/install" "$2"
}

# A bare Debian, with its Python if that is new enough; quick when it is there.
need_system() {
  [ -e "$systems/$1/.made" ] && return 0
  say "bare system: $1"
  local include=()
  [ "$1" = bullseye ] || include=(--include=python3,python3-venv)
  rm -rf "${systems:?}/$1"
  mkdir -p "$systems"
  debootstrap --variant=minbase "${include[@]}" "$1" "$systems/$1" "$mirror" >"$systems/$1.log" 2>&1 ||
    fail 1 "debootstrap made no $1, see $systems/$1.log"
  mkdir -p "$systems/$1/"{wheels,site,install,src}
  [ "$1" != bullseye ] || compile_python
  touch "$systems/$1/.made"
}

compile_python() {
  local apt=$systems/apt
  mkdir -p "$apt"
  echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main" >"$apt/sources.list"
  apt_apart "$apt" apt-get update -qq
  (cd "$systems/bullseye/src" && apt_apart "$apt" apt-get source --download-only -qq python3.11)
  cp /etc/resolv.conf "$systems/bullseye/etc/"
  within bullseye '
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends gcc make libc6-dev zlib1g-dev libffi-dev libssl-dev >/dev/null
    cd /src && tar xf *.orig.tar.* && cd Python-*
    { ./configure --prefix=/opt/python && make -j2 && make install; } >/src/log 2>&1 || { tail /src/log; exit 1; }'
}

# need_site MINOR TORCH: what a wheel needs besides: NumPy, and torch or none. PyPI's torch brings CUDA's libraries.
need_site() {
  site=$systems/site/3.$1-torch-${2:-none}
  [ -e "$site/.installed" ] && return 0
  say "for Python 3.$1: NumPy, torch: ${2:-none}"
  local platforms=() glibc wanted=(numpy)
  for glibc in _2_{5..28} 1 2010 2014; do platforms+=(--platform "manylinux${glibc}_$(uname -m)"); done
  [ -z "$2" ] || wanted+=("torch==$2")
  rm -rf "$site"
  "$systems/pip/bin/python" -m pip install --quiet --disable-pip-version-check --target "$site" --no-cache-dir \
    --implementation cp --python-version "3.$1" --only-binary=:all: "${platforms[@]}" "${wanted[@]}" ||
    fail 1 "could not install ${wanted[*]} for Python 3.$1: is there a network?"
  touch "$site/.installed"
}

# use SUITE PYTHON MINOR TORCH
use() {
  local wheel
  wheel=$(cd "$wheels" && ls tessera_tensors-*-cp311-cp311-*.whl)
  [ "$3" = 11 ] || wheel=$(cd "$wheels" && ls tessera_tensors-*-abi3-*.whl)
  need_site "$3" "$4"
  say "$1: $wheel, torch: ${4:-none}"
  within "$1" "
    ! ls /usr/lib/*/lib{fmt,spdlog,hwy,re2}.* 2>/dev/null
    rm -rf /venv
    $2 -m venv /venv
    echo /site >\$(echo /venv/lib/python3*/site-packages)/site.pth
    /venv/bin/pip install --quiet --disable-pip-version-check --no-index --no-deps /wheels/$wheel
    /venv/bin/python /install/first_use.py /venv $4"
}

mkdir -p "$systems"
[ -x "$systems/pip/bin/pip" ] || python3 -m venv "$systems/pip"
site=$systems
for suite in bookworm bullseye trixie; do need_system "$suite"; done
for torch in "${torches[@]}"; do
  use bookworm python3 11 "$torch"
  use bullseye /opt/python/bin/python3.11 11 "$torch"
  use trixie python3 13 "$torch"
done
say "all wheels work on all systems"
