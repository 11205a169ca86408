#!/bin/sh
# Install helexa with all its files into a folder: the contents of the Debian package, the RPM and the container images.
#
#   install_tree.sh WHEEL ROOT [EXTRAS]
#
# WHEEL   helexa's wheel, or a requirement such as `helexa==0.1.0`
# ROOT    the folder that becomes / of the target machine
# EXTRAS  helexa's optional dependencies; default: neuron,postgres,oidc,bench. Without neuron, a package is small, but
#         has no node
#
# Variables: PYTHON is the interpreter of the target machine (default /usr/bin/python3). PIP is the command of pip >= 22.3
# (default `PYTHON -m pip`). pip's variables, such as PIP_INDEX_URL, choose the package indexes.
set -eu

wheel=$1
root=$2
extras=${3-neuron,postgres,oidc,bench}
python=$(readlink -f "${PYTHON:-/usr/bin/python3}")
pip=${PIP:-$python -m pip}
deploy=$(cd "$(dirname "$0")/.." && pwd)
docs=$deploy/../docs

mkdir -p "$root"
root=$(cd "$root" && pwd)
environment=$root/opt/helexa
"$python" -m venv --without-pip --symlinks "$environment"
$pip --python "$environment/bin/python" install --quiet --no-compile --no-warn-script-location \
    "$wheel${extras:+[$extras]}"

# The files name the folder in which they are now, instead of the folder in which they will be.
for script in "$environment"/bin/*; do
    if [ ! -L "$script" ] && head -c 2 "$script" | grep -q '#!'; then
        sed -i "s|$environment|/opt/helexa|g" "$script"
    fi
done
sed -i "s|$environment|/opt/helexa|g" "$environment/pyvenv.cfg" "$environment"/bin/activate*
find "$environment" -name direct_url.json -delete
# The services cannot write here. -j 0: all CPUs.
"$environment/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash -s "$root" -p / \
    "$environment/lib" >/dev/null || true  # some packages contain templates that are not valid Python

install -d "$root/usr/bin"
for command in helexa cortex neuron helexa-bench; do
    ln -s "/opt/helexa/bin/$command" "$root/usr/bin/$command"
done
install -D -m 644 -t "$root/usr/lib/systemd/system" "$deploy"/systemd/*.service
install -D -m 644 "$deploy/systemd/helexa.sysusers.conf" "$root/usr/lib/sysusers.d/helexa.conf"
install -D -m 644 -t "$root/usr/lib/firewalld/services" "$deploy"/firewalld/*.xml
install -D -m 644 -t "$root/etc/cortex" "$deploy/config/cortex.toml" "$deploy/config/models.toml"
install -D -m 644 -t "$root/etc/neuron" "$deploy/config/neuron.toml"
install -D -m 644 -t "$root/etc/helexa-bench" "$deploy/config/helexa-bench.toml"
install -D -m 644 -t "$root/usr/share/doc/helexa" "$docs"/*.example.toml "$deploy/../LICENSE" "$deploy/../CHANGELOG.md"
install -D -m 644 -t "$root/usr/share/helexa/nginx" "$deploy/nginx/helexa.conf"
install -D -m 644 -t "$root/usr/share/helexa/prometheus" "$deploy/prometheus/prometheus.yml" \
    "$deploy/prometheus/helexa.rules.yml"
install -D -m 644 -t "$root/usr/share/helexa/grafana" "$deploy/grafana/helexa.json"
