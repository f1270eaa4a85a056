#!/bin/sh
# Makes what a federation with TLS and node authentication needs: docker/keys.sh FOLDER NODES [NAME]
#
# An authority (ca.pem, ca.key), the SuperLink's certificate for NAME and 127.0.0.1 (server.pem,
# server.key), and a key for each node (node0, node0.pub, …). What is there is kept.
set -eu
folder=${1:?say where to and how many nodes: docker/keys.sh keys 3}
nodes=${2:?say how many nodes: docker/keys.sh keys 3}
name=${3:-superlink}
umask 077
mkdir -p "$folder"
cd "$folder"

curve="-newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes"
if [ ! -e server.pem ]; then
    # shellcheck disable=SC2086 - these are words
    openssl req -x509 $curve -days 365 -keyout ca.key -out ca.pem -subj "/CN=our federation"
    # shellcheck disable=SC2086
    openssl req $curve -keyout server.key -out server.csr -subj "/CN=$name" \
        -addext "subjectAltName=DNS:$name,IP:127.0.0.1"
    openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial \
        -copy_extensions copy -days 365 -out server.pem
    rm server.csr
fi 2>/dev/null

k=0
while [ "$k" -lt "$nodes" ]; do
    [ -e "node$k" ] || ssh-keygen -q -t ecdsa -b 384 -N "" -C "node$k" -f "node$k"
    k=$((k + 1))
done
ls
