#!/bin/sh
# Build the Debian package: build_deb.sh WHEEL OUTPUT_FOLDER [EXTRAS]. Prints the path of the package.
#
# The package contains a virtual environment with all dependencies, so its installation needs no network. It depends on
# the Python version for which it was built. The variables of install_tree.sh apply. DEB_COMPRESSION is the option -Z of
# dpkg-deb (default zstd).
set -eu

wheel=$1
output=$2
extras=${3-neuron,postgres,oidc,bench}
here=$(cd "$(dirname "$0")" && pwd)
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
chmod 755 "$stage"

"$here/install_tree.sh" "$wheel" "$stage" "$extras"
python=$(readlink -f "$stage/opt/helexa/bin/python")
version=$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')
next=$("$python" -c 'import sys; print(sys.version_info[0], sys.version_info[1] + 1, sep=".")')
helexa=$(basename "$stage"/opt/helexa/lib/python*/site-packages/helexa-*.dist-info .dist-info)
helexa=${helexa#helexa-}
architecture=$(dpkg --print-architecture)
size=$(du -sk --exclude=DEBIAN "$stage" | cut -f1)

mkdir "$stage/DEBIAN"
sed -e "s/@VERSION@/$helexa/" -e "s/@ARCHITECTURE@/$architecture/" -e "s/@SIZE@/$size/" \
    -e "s/@PYTHON@/$version/g" -e "s/@NEXT_PYTHON@/$next/" "$here/debian/control.in" >"$stage/DEBIAN/control"
install -m 755 -t "$stage/DEBIAN" "$here/debian/postinst" "$here/debian/prerm" "$here/debian/postrm"
(cd "$stage" && find etc -type f -printf '/%p\n' | sort) >"$stage/DEBIAN/conffiles"

mkdir -p "$output"
package=$output/helexa_${helexa}_$architecture.deb
dpkg-deb --build --root-owner-group -Z"${DEB_COMPRESSION:-zstd}" "$stage" "$package" >/dev/null
echo "$package"
