#!/usr/bin/env bash
# Builds both libraries for another machine: no GPU and no CUDA build of torch is needed here.
#
#   tools/build_for.sh [FOLDER]        # default build/for-gpu
#
# Carry FOLDER/lib over; there: XSTAGE_LIB_DIR=/where/lib tools/gpu_check.sh
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/for-gpu}
nvcc=${CUDACXX:-${CUDA_HOME:-/usr/local/cuda}/bin/nvcc}
if [ ! -x "$nvcc" ]; then
  echo "xstage build: no nvcc at $nvcc; set CUDA_HOME to a CUDA toolkit" >&2
  exit 1
fi
cmake -S . -B "$folder" -G Ninja -DXSTAGE_LIB_DIR="$(realpath -m "$folder")/lib" \
  -DCMAKE_CUDA_COMPILER="$nvcc"
cmake --build "$folder" -j "$(python3 tools/build_facts.py --jobs)"
python3 tools/ptxas_report.py "$folder"
python3 tools/check_abi.py "$folder/lib"
ls -l "$folder"/lib/*.abi3.so
