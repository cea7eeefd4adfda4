#!/usr/bin/env bash
# Every GPU check in one call: one-GPU tests, two-rank tests, the benchmarks whose figures stand in
# benchmarks/results/ (rewritten there), the whole sweep. Each step has its own time limit, so that one
# hang does not lose the rest; a short table closes the output.
#
#   tools/gpu_check.sh                                  # the installed libraries
#   XSTAGE_LIB_DIR=/where/lib tools/gpu_check.sh        # built elsewhere (tools/build_for.sh)
#   tools/gpu_check.sh tests dist                       # only steps whose name holds a word
#
# Not run as a whole on GPUs yet: of its steps, tests-gpu ran through it on two H200, the benchmarks,
# calibrate and validate by their own commands.
#
# Logs lie in ${OUTDIR:-build/gpu-check}. LIMIT_S scales every limit (default 1).
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export XSTAGE_TIMEOUT_MS=${XSTAGE_TIMEOUT_MS:-20000}
logs=${OUTDIR:-build/gpu-check}
mkdir -p "$logs"
wanted=("$@")
rows=()
failures=0

is_wanted() {
  ((${#wanted[@]} == 0)) && return 0
  local word
  for word in "${wanted[@]}"; do [[ $1 == *"$word"* ]] && return 0; done
  return 1
}

step() {  # name, limit in seconds, command...
  local name=$1 limit=$2
  shift 2
  is_wanted "$name" || return 0
  local start=$SECONDS status
  limit=$(awk -v l="$limit" -v k="${LIMIT_S:-1}" 'BEGIN { printf "%d", l * k }')
  echo "=== $name: $*"
  timeout -k 10 "$limit" "$@" >"$logs/$name.log" 2>&1
  status=$?
  case $status in
    0) verdict=ok ;;
    124 | 137) verdict="TIME LIMIT" ;;
    *) verdict="FAILED ($status)" ;;
  esac
  [ $status -ne 0 ] && { failures=$((failures + 1)) && tail -n 40 "$logs/$name.log"; }
  local last
  last=$(grep -v '^\s*$' "$logs/$name.log" | tail -n 1 | cut -c1-90)
  if [[ $status -eq 0 && $last =~ ^[0-9]+\ skipped\ in ]]; then  # nothing was checked
    verdict=SKIPPED
    failures=$((failures + 1))
  fi
  rows+=("$(printf '%-16s %-12s %4d s  %s' "$name" "$verdict" $((SECONDS - start)) "$last")")
}

ranks=2
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
launch=(python3 -m torch.distributed.run --nproc-per-node "$ranks")

step import 60 python3 -c '
import torch, xstage_ext
from xstage_ext import _binary
assert _binary.CUDA_LIBRARY_ERROR is None, _binary.CUDA_LIBRARY_ERROR
print("torch", torch.__version__, torch.cuda.get_device_name(), "kernels loaded")'
step tests-gpu 240 python3 -m pytest -q tests/gpu
XSTAGE_TEST_LEVEL=2 step sanitizer 240 python3 -m pytest -q tests/gpu -k sanitizer
if [ "$gpus" -ge "$ranks" ]; then
  for file in tests/dist/test_*.py; do
    name=$(basename "$file" .py)
    step "dist-${name#test_}" 240 "${launch[@]}" -m pytest -q "$file"
  done
  step bench-handshake 120 "${launch[@]}" benchmarks/bench_handshake.py
  step bench-burst 120 python3 benchmarks/bench_burst.py
  step bench-a2a 180 "${launch[@]}" benchmarks/bench_a2a.py
  step bench-alone 180 python3 benchmarks/bench_attention.py
  step bench-attention 240 "${launch[@]}" benchmarks/bench_attention.py
  step bench-megamoe 240 "${launch[@]}" benchmarks/bench_megamoe.py
  step calibrate 120 python3 -m xstage_ext.cli calibrate --out "$logs/profile.json"
  step validate 120 python3 -m xstage_ext.cli validate --profile "$logs/profile.json" \
    --out "$logs/validation"
  step sweep 480 "${launch[@]}" benchmarks/sweep_84.py --record
else
  rows+=("two-rank checks  skipped: $gpus GPU visible, $ranks needed")
fi

printf '\n%s\n' "check            result         time  last line"
printf '%s\n' "${rows[@]}"
exit $((failures > 0))
