#!/bin/sh
# Build helexa from its sources and install it into a folder: build.sh ROOT EXTRAS. The Dockerfiles run this script.
# With a C compiler, the build contains the CPU kernels. Otherwise nodes compile the kernels on first use.
set -eu

root=$1
extras=$2
source=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHON="${PYTHON:-$(command -v python3)}"
export PIP="${PIP:-$PYTHON -m pip}"
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT

if command -v cc >/dev/null; then
    export HELEXA_PREBUILT_KERNELS=1
fi
$PIP wheel --quiet --no-deps --wheel-dir "$wheels" "$source"
"$source/deploy/packages/install_tree.sh" "$wheels"/helexa-*.whl "$root" "$extras"
install -D -m 755 -t "$root/usr/share/helexa/docker" "$source/deploy/docker/setup.sh" \
    "$source/deploy/docker/healthcheck.py"
