#!/usr/bin/env bash
# Builds the sdist, and out of it wheels that carry what they link, into build/wheelhouse: one for Python 3.11, and one of
# the stable ABI for 3.12 and later.
#   scripts/wheel.sh                   with python3.11, and with the first of python3.12 to 3.14 (in PATH or of pyenv)
#   scripts/wheel.sh --python PATH     with this interpreter; may be given several times
#   scripts/wheel.sh --out DIR         into another folder
#   scripts/wheel.sh --like BUILD      compiled as the build folder BUILD is, so that a compiler cache has seen it all
#   scripts/wheel.sh --test            then use them on bare systems: tests/install/bare_systems.sh
#   scripts/wheel.sh --prepare         only fetch and build what is linked
# On Debian 12, whose libraries are linked as archives: those it has none of (fmt, spdlog, Highway) are built from its
# sources. What is left to the system is glibc and libgcc_s. They are linked as Debian 11 has them (glibc 2.31), since a
# program that is linked to a newer glibc does not start with an older one; `auditwheel` then says which manylinux it is.
. "$(dirname "$0")/lib.sh"
pythons=()
out=$root/build/wheelhouse
like='' prepare='' test=''
while [ $# -gt 0 ]; do
  case $1 in
    --python) [ $# -ge 2 ] || fail 2 "--python needs an interpreter"; pythons+=("$2"); shift 2 ;;
    --out) [ $# -ge 2 ] || fail 2 "--out needs a folder"; out=$(cd "$caller" && realpath -m "$2"); shift 2 ;;
    --like) [ $# -ge 2 ] || fail 2 "--like needs a build folder"; like=$(cd "$caller" && realpath "$2"); shift 2 ;;
    --prepare) prepare=yes; shift ;;
    --test) test=yes; shift ;;
    -h | --help) show_help; exit 0 ;;
    *) fail 2 "unknown argument $1 (see --help)" ;;
  esac
done
grep -qx 'VERSION_CODENAME=bookworm' /etc/os-release || fail 2 "wheels are built on Debian 12; elsewhere: pip install $root"
need_packages "${build_packages[@]}" dpkg-dev

work=$root/build/wheels
bundle=$work/bundle
glibc=$work/glibc
mirror=$(debian_mirror)
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
machine=$(gcc -dumpmachine)

# sources SUITE TYPE: the apt sources of a release of Debian's, in a state of its own
sources() {
  mkdir -p "$work/apt-$1"
  echo "$2 [signed-by=$keyring] $mirror $1 main" >"$work/apt-$1/sources.list"
  apt_apart "$work/apt-$1" apt-get update -qq
}

# source_of PACKAGE: "NAME=VERSION" of the source that an installed package was made from
source_of() { dpkg-query -W -f '${source:Package}=${source:Version}' "$1"; }

# archive NAME SOURCE CMAKE_TARGET [OPTION...]: a static library out of Debian's source, into the bundle
archive() {
  local folder=$work/source/${2%%=*}
  mkdir -p "$folder"
  (cd "$folder" && apt_apart "$work/apt-bookworm" apt-get source -qq --only-source "$2" >/dev/null)
  cmake -G Ninja -S "$(echo "$folder"/*/)" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DCMAKE_CXX_COMPILER_LAUNCHER=ccache "${@:4}" >/dev/null
  CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1 ninja -C "$folder/build" -j "$jobs" --quiet "$3"
  cp "$folder/build/lib$1.a" "$bundle"
}

# Archives of what Debian has as shared libraries only; quick when they are there.
need_bundle() {
  local wanted
  wanted="$(source_of libfmt-dev) $(source_of libspdlog-dev) $(source_of libhwy-dev)"
  [ "$(cat "$bundle/.made" 2>/dev/null)" = "$wanted" ] && return 0
  say "building archives: $wanted"
  rm -rf "$bundle" "$work/source"
  mkdir -p "$bundle"
  sources bookworm deb-src
  archive fmt "$(source_of libfmt-dev)" fmt -DFMT_TEST=OFF -DFMT_DOC=OFF
  archive spdlog "$(source_of libspdlog-dev)" spdlog -DSPDLOG_FMT_EXTERNAL=ON -DSPDLOG_BUILD_EXAMPLE=OFF
  archive hwy "$(source_of libhwy-dev)" hwy -DBUILD_TESTING=OFF -DHWY_ENABLE_EXAMPLES=OFF -DHWY_ENABLE_CONTRIB=OFF
  gcc -O2 -fPIC -c cmake/wheel/newer_glibc.c -o "$bundle/newer_glibc.o"
  rm -rf "$work/source"
  echo "$wanted" >"$bundle/.made"
}

# Debian 11's glibc, to link with; quick when it is there.
need_glibc() {
  [ -e "$glibc/.unpacked" ] && return 0
  say "unpacking Debian 11's glibc"
  rm -rf "$glibc"
  mkdir -p "$glibc/debs"
  sources bullseye deb
  (cd "$glibc/debs" && apt_apart "$work/apt-bullseye" apt-get download -qq libc6 libc6-dev) ||
    fail 1 "could not download Debian 11's libc6: is there a network?"
  local file
  for file in "$glibc"/debs/*.deb; do dpkg-deb -x "$file" "$glibc"; done
  while read -r file; do  # links that begin at the root begin at this one's
    ln -sfn "$glibc$(readlink "$file")" "$file"
  done < <(find "$glibc" -lname '/*')
  touch "$glibc/.unpacked"
}

# Interpreters of 3.11, and of 3.12 or later, that run and have their headers.
find_pythons() {
  local places=("" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/) series place python
  for series in "3.11" "3.12 3.13 3.14"; do
    for minor in $series; do
      for place in "${places[@]}"; do
        python=${place}python$minor
        "$python" -c 'import os, sysconfig, venv; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || continue
        pythons+=("$python")
        continue 3
      done
    done
    fail 2 "no Python of ${series// / or } with its headers is in PATH or of pyenv: name one with --python"
  done
}

# wheel PYTHON: builds it, repairs it into $out
wheel() {
  local version options=() name value type=Release raw
  version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  local TESSERA_PYTHON=$1 TESSERA_VENV=$work/venv-$version
  need_venv "${python_wheels[@]:0:2}" "${wheel_wheels[@]}"
  [ -z "$prepare" ] || return 0
  if [ -n "$like" ]; then
    for name in CMAKE_CXX_COMPILER CMAKE_CXX_FLAGS_RELWITHDEBINFO CMAKE_UNITY_BUILD CMAKE_UNITY_BUILD_BATCH_SIZE TESSERA_WERROR; do
      value=$(sed -n "s/^$name:[^=]*=//p" "$like/CMakeCache.txt")
      [ -z "$value" ] || options+=("--config-settings=cmake.define.$name=$value")
    done
    type=$(sed -n 's/^CMAKE_BUILD_TYPE:[^=]*=//p' "$like/CMakeCache.txt")
  fi
  say "wheel for Python $version"
  raw=$work/raw-$version
  rm -rf "$raw"
  "$TESSERA_VENV/bin/python" -c 'import sys; from scikit_build_core import build; build.build_sdist(sys.argv[1])' "$raw" >/dev/null
  CMAKE_BUILD_PARALLEL_LEVEL=$jobs LDFLAGS="$link_flags" "$TESSERA_VENV/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
    --no-build-isolation --wheel-dir "$raw" --config-settings=cmake.build-type="$type" \
    --config-settings=cmake.define.TESSERA_BUNDLE="$bundle" "${options[@]}" "$raw"/*.tar.gz
  PATH=$TESSERA_VENV/bin:$PATH "$TESSERA_VENV/bin/python" -m auditwheel repair --wheel-dir "$raw/repaired" "$raw"/*.whl 2>&1
  if "$TESSERA_VENV/bin/python" -m zipfile -l "$raw"/repaired/*.whl | grep -F '.libs/'; then
    fail 1 "the wheel still links these: they belong into cmake/TesseraDependencies.cmake"
  fi
  mkdir -p "$out"
  mv "$raw"/*.tar.gz "$raw"/repaired/*.whl "$out"
}

need_bundle
need_glibc
link_flags="--sysroot=$glibc -B$glibc/usr/lib/$machine/ -L$glibc/usr/lib/$machine -L$glibc/lib/$machine"
# libgcc_s is the machine's, and asks for a newer glibc itself. The rest of glibc was in libraries of its own.
link_flags+=" -Wl,--allow-shlib-undefined $bundle/newer_glibc.o -Wl,--push-state,--no-as-needed -lpthread -ldl -lrt -lm -Wl,--pop-state"
[ ${#pythons[@]} -gt 0 ] || [ -n "$prepare" ] || find_pythons
for python in "${pythons[@]}"; do wheel "$python"; done
[ -n "$prepare" ] || ls -1 "$out"
[ -z "$test" ] || tests/install/bare_systems.sh "$out"
