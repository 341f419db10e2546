#!/usr/bin/env bash
# Makes a wheel as `pip install .` does, installs it into a folder of its own and uses it from there.
#   wheel_test.sh BUILD SOURCE PYTHON
# Compiled as the BUILD is, so that a compiler cache has seen it all.
set -euo pipefail
build=$1 source=$2 python=$3
options=()
for name in CMAKE_CXX_COMPILER CMAKE_CXX_FLAGS_RELWITHDEBINFO CMAKE_UNITY_BUILD CMAKE_UNITY_BUILD_BATCH_SIZE TESSERA_WERROR; do
  value=$(sed -n "s/^$name:[^=]*=//p" "$build/CMakeCache.txt")
  [ -z "$value" ] || options+=("--config-settings=cmake.define.$name=$value")
done
type=$(sed -n 's/^CMAKE_BUILD_TYPE:[^=]*=//p' "$build/CMakeCache.txt")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$work" \
  --config-settings=build-dir="$source/build/wheel" --config-settings=cmake.build-type="$type" "${options[@]}" "$source"
wheel=$(echo "$work"/tessera_tensors-*.whl)
"$python" -m zipfile -l "$wheel" >"$work/list"
for file in tessera/py.typed tessera/_core.pyi tessera/bin/tessera tessera/tensor_bus.py tessera/_bus/batch.py; do
  grep -q "^$file " "$work/list" || { echo "$wheel lacks $file"; cat "$work/list"; exit 1; }
done
! grep -E '\.(cc|h|a)$|/tests/' "$work/list"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$work/site" "$wheel"
cd "$work"
export PYTHONPATH=$work/site TESSERA_RUNTIME_DIR=$work/run
"$work/site/bin/tessera" --version
"$python" -m tessera plan --shape 8x4 --dtype bf16 --src 2:S0 --dst 2@2-3:S1 >/dev/null
"$python" - <<'EOF'
import sys
import tessera
assert tessera.__file__.startswith(sys.path[1]), (tessera.__file__, sys.path)
assert "torch" not in sys.modules
print(tessera.__version__, tessera.plan((8, 4), "bf16", "2:S0", "2@2-3:S1"))
try:
    tessera.connect("weights", role="alone", peer="nobody", rank=0, world=1, timeout=0.1)
except tessera.DeadlineExceededError as error:
    assert "nobody" in str(error), error
else:
    sys.exit("nobody came")
EOF
