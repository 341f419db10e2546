#!/usr/bin/env bash
# Makes the sdist and, out of it, a wheel by scripts/wheel.sh; looks at both, installs the wheel and uses it.
#   wheel_test.sh BUILD SOURCE PYTHON
# Compiled as the BUILD is, so that a compiler cache has seen it all.
set -euo pipefail
grep -qx VERSION_CODENAME=bookworm /etc/os-release || exit 77  # scripts/wheel.sh works on Debian 12 only
build=$1 source=$2 python=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$source/scripts/wheel.sh" --python "$python" --like "$build" --out "$work/out"
sdist=$(echo "$work"/out/tessera_tensors-*.tar.gz)
wheel=$(echo "$work"/out/tessera_tensors-*-manylinux_*.whl)

# holds LIST FILE...: the names in a list are there
holds() {
  local file
  for file in "${@:2}"; do
    grep -qE "(^|/)$file( |$)" "$1" || { echo "$file is not in it:"; cat "$1"; exit 1; }
  done
}
tar tzf "$sdist" | sed 's,^[^/]*/,,' >"$work/sources"
holds "$work/sources" pyproject.toml LICENSE README.md CMakeLists.txt cmake/TesseraDependencies.cmake include/tessera/bus.h \
  src/bus/bus.cc tools/main.cc python/src/module_py.cc python/exports.map python/tessera/_core.pyi python/tessera/py.typed
! grep -E '^(build|\.venv|\.git|fuzz/corpus)/|__pycache__|\.(o|a|so|whl)$' "$work/sources"
"$python" -m zipfile -l "$wheel" >"$work/files"
holds "$work/files" tessera/py.typed tessera/_core.pyi tessera/bin/tessera tessera/tensor_bus.py tessera/_bus/batch.py
! grep -E '\.(cc|h|a|so\.[0-9.]+)$|/tests/' "$work/files"

# What is missing is named, with the packages that bring it.
# refuses TEXT COMMAND...
refuses() {
  if "${@:2}" >"$work/said" 2>&1; then echo "this did not fail: ${*:2}"; exit 1; fi
  grep -qF "$1" "$work/said" || { echo "it does not say '$1':"; cat "$work/said"; exit 1; }
}
refuses "apt install libfmt-dev libspdlog-dev libre2-dev" "$python" -m pip wheel --disable-pip-version-check --no-deps \
  --no-build-isolation --wheel-dir "$work/none" "$sdist" \
  --config-settings=cmake.define.CMAKE_DISABLE_FIND_PACKAGE_{fmt,re2}=ON
refuses "apt install g++" env CXX="$work/no-compiler" cmake -G Ninja -S "$source" -B "$work/unconfigured"

"$python" -m venv --without-pip "$work/venv"
site=$(echo "$work"/venv/lib/python3*/site-packages)
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/numpy_and_torch.pth"
"$python" -m pip --python "$work/venv/bin/python" install --quiet --disable-pip-version-check --no-index --no-deps "$wheel"

# What is in the wheel asks the system only for glibc, and names no folder of this machine.
allowed='lib(c|m|dl|rt|pthread|gcc_s)\.so\.[0-9]|ld-linux-[a-z0-9-]*\.so\.[0-9]'
for file in "$site"/tessera/_core*.so "$site/tessera/bin/tessera"; do
  readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' >"$work/needed"
  grep -q '^libc\.so' "$work/needed"
  if grep -vxE "$allowed" "$work/needed"; then echo "$file needs these of the system"; exit 1; fi
  if strings "$file" | grep -F -m3 -e "$source/src/" -e "${TMPDIR:-/tmp}/pip-"; then echo "$file has these paths in it"; exit 1; fi
done
cd "$work"
"$work/venv/bin/python" "$source/tests/install/first_use.py" "$work/venv" \
  "$("$python" -c 'import importlib.metadata; print(importlib.metadata.version("torch"))')"
