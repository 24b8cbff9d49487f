#!/usr/bin/env bash
# Make carry/ (not in git) with everything that a GPU machine with torch, timm and scipy, but without our other dependencies and
# without a network, needs to train and rank supernets on CIFAR-10.
#
#   bash benchmarks/scripts/carry.sh cifar10-jpeg.tar.xz nas-bench-macro_cifar10.json    # on this machine; then copy
# the checkout with carry/ to the GPU machine   . benchmarks/scripts/carried.sh
# # on the GPU machine, before each command
set -euo pipefail
cd "$(dirname "$0")/../.."
images=$(realpath "$1") truth=$(realpath "$2") wheels=$(mktemp -d)
mkdir -p carry/py
cp "$images" carry/cifar10-jpeg.tar.xz
cp "$truth" carry/nas-bench-macro_cifar10.json
download() { python3 -m pip download --quiet --disable-pip-version-check --dest "$wheels" --python-version 3.12 --only-binary=:all: "$@"; }
download pydantic
download --no-deps pymoo moocore cffi platformdirs  # for the searches of studies, with those of pymoo's dependencies that are used
for wheel in "$wheels"/*.whl; do python3 -m zipfile -e "$wheel" carry/py; done
rm -r "$wheels"
find carry/py -name '*.cpp' -delete
du -sh carry
