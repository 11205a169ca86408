#!/bin/sh
# Prepare an image: setup.sh [PACKAGE...]. Installs packages of Debian, and creates the user and its folders.
# ROOT is the folder of the image (default /).
set -eu

root=${ROOT:-/}
if [ "$#" -gt 0 ]; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "$@"
    rm -rf /var/lib/apt/lists/*
fi
useradd --prefix "$root" --uid 10001 --user-group --home-dir /var/lib/helexa --no-create-home --shell /usr/sbin/nologin \
    helexa
for folder in var/lib/helexa var/lib/cortex var/cache/helexa; do
    install -d -o 10001 -g 10001 -m 750 "$root/$folder"
done
