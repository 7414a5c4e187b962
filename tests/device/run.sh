#!/usr/bin/env bash
# Everything that a GPU proves of this checkout, in at most eight minutes on one card: tests/device/run.sh
#
# Needs python3 with torch, an NVIDIA driver and NVRTC (torch's, the wheel nvidia-cuda-nvrtc, or a CUDA toolkit's); no network, and no
# installation of dspark. What needs more (cuda-bindings, TensorRT, the exporter's packages, pytest) is skipped where that is absent.
# Exit code: 0 nothing failed, 1 something failed, 2 there is no card or no torch.
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
# The checkout's folders as the package dspark, and the version that its commands ask for.
mkdir -p "$scratch/packages/dspark" "$scratch/packages/dspark-0.dist-info"
for folder in export runtime plugins; do ln -s "$root/$folder" "$scratch/packages/dspark/$folder"; done
version="$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")"
printf 'Metadata-Version: 2.1\nName: dspark\nVersion: %s\n' "$version" > "$scratch/packages/dspark-0.dist-info/METADATA"
# Kernels are compiled here from nothing, into a cache of this run.
export XDG_CACHE_HOME="$scratch/cache" PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH="$scratch/packages:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
python3 -m device.everything "$scratch"
