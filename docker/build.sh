#!/bin/sh
# Installs fedglad and Flower into an environment of their own: docker/build.sh /opt/fedglad
#
# TORCH   what pip is told of PyTorch, by default its name; the version is that of constraints.txt
# EXTRAS  of fedglad, by default flower,metrics
set -eu
prefix=${1:?say where to: docker/build.sh /opt/fedglad}
source=$(cd "$(dirname "$0")/.." && pwd)

python3 -m venv "$prefix"
install() { "$prefix/bin/python" -m pip --disable-pip-version-check install --no-cache-dir "$@"; }
# torch goes first and alone, so that its pin decides the build before anything else asks for it.
# shellcheck disable=SC2086 - TORCH may be several words
install -c "$source/constraints.txt" ${TORCH:-torch}
install -c "$source/constraints.txt" "$source[${EXTRAS:-flower,metrics}]"

# What is not there, or does not start, shall show here and not on the day of the first run.
for command in fedglad flwr flower-superlink flower-supernode; do
    "$prefix/bin/$command" --version
done
