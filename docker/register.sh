#!/bin/sh
# Tells a SuperLink which nodes belong to the federation: docker/register.sh ADDRESS KEYS
#
# Each public key in the folder is registered under its file's name. One that is registered already
# is no mistake.
set -eu
address=${1:?say where the SuperLink is: docker/register.sh superlink:9092 /keys}
keys=${2:?say where the keys are: docker/register.sh superlink:9092 /keys}
home=${FLWR_HOME:-$HOME/.flwr}

mkdir -p "$home"
cat >"$home/config.toml" <<TOML
[superlink.ours]
address = "$address"
root-certificates = "$keys/ca.pem"
TOML

for key in "$keys"/*.pub; do
    name=$(basename "$key" .pub)
    said=$(flwr supernode register "$key" ours --name "$name" 2>&1) && echo "$name: registered" && continue
    case $said in
    *already*) echo "$name: registered before" ;;
    *) echo "$said" >&2 && exit 1 ;;
    esac
done
