#!/usr/bin/env bash
# Every GPU check in one call: one-GPU tests, two-rank tests, the benchmarks whose figures stand in
# benchmarks/results/ (rewritten there), the whole sweep, the machine's profile and its proof. About
# twenty minutes on two H200, on a machine that does nothing else. Each step has its own time limit, so that one
# hang does not lose the rest; a short table closes the output.
#
#   tools/gpu_check.sh                                  # the installed libraries
#   XSTAGE_LIB_DIR=/where/lib tools/gpu_check.sh        # built elsewhere (tools/build_for.sh)
#   tools/gpu_check.sh tests dist                       # only steps whose name holds a word
#
# Logs, the profile and its validation lie in ${OUTDIR:-build/gpu-check}; PROFILE names the profile (here).
# LIMIT_S scales every limit (default 1). Outside of git write the commit into a file COMMIT: it stands in
# every result.
#
# On two H200 all steps but the sweep ran through this script, in several calls; the sweep by the same command.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export XSTAGE_TIMEOUT_MS=${XSTAGE_TIMEOUT_MS:-20000}
logs=$(realpath -m "${OUTDIR:-build/gpu-check}")
profile=${PROFILE:-here}
mkdir -p "$logs"
rm -f "$logs"/*.row
wanted=("$@")
steps=()

is_wanted() {
  ((${#wanted[@]} == 0)) && return 0
  local word
  for word in "${wanted[@]}"; do [[ $1 == *"$word"* ]] && return 0; done
  return 1
}

run() {  # name, limit in seconds, command...: leaves NAME.log and one line of the table in NAME.row
  local name=$1 limit=$2 start=$SECONDS status verdict last
  shift 2
  limit=$(awk -v l="$limit" -v k="${LIMIT_S:-1}" 'BEGIN { printf "%d", l * k }')
  timeout -k 10 "$limit" "$@" >"$logs/$name.log" 2>&1
  status=$?
  last=$(grep -v '^\s*$' "$logs/$name.log" | tail -n 1 | cut -c1-90)
  case $status in
    0) verdict=ok ;;
    124 | 137) verdict="TIME LIMIT" ;;
    *) verdict="FAILED ($status)" ;;
  esac
  # Nothing was checked where everything skipped.
  [[ $status -eq 0 && $last =~ ^[0-9]+\ skipped\ in ]] && verdict=SKIPPED
  printf '%-16s %-12s %4d s  %s\n' "$name" "$verdict" $((SECONDS - start)) "$last" >"$logs/$name.row"
  [[ $verdict == ok ]] || { echo "--- $name: $verdict" && tail -n 40 "$logs/$name.log"; }
}

step() {  # as run; the next step begins when this one has ended
  is_wanted "$1" || return 0
  echo "=== $1: ${*:3}"
  steps+=("$1")
  run "$@"
}

step_beside() {  # as run, on the second GPU; the next step begins at once, `wait` waits
  is_wanted "$1" || return 0
  echo "=== $1 (beside): ${*:3}"
  steps+=("$1")
  CUDA_VISIBLE_DEVICES=1 run "$@" &
}

ranks=2
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
launch=(python3 -m torch.distributed.run --nproc-per-node "$ranks")
xstage=(env -C "$logs" python3 -m xstage_ext.cli)

step import 60 python3 -c '
import torch, xstage_ext
from xstage_ext import _binary
assert _binary.CUDA_LIBRARY_ERROR is None, _binary.CUDA_LIBRARY_ERROR
print("torch", torch.__version__, torch.cuda.get_device_name(), "kernels loaded")'
aside=step
((gpus >= ranks)) && aside=step_beside
$aside sanitizer 240 env XSTAGE_TEST_LEVEL=2 python3 -m pytest -q tests/gpu -k sanitizer
step tests-gpu 240 python3 -m pytest -q tests/gpu
wait
step bench-at-home 300 python3 benchmarks/bench_at_home.py --record
if ((gpus >= ranks)); then
  for file in tests/dist/test_*.py; do
    name=$(basename "$file" .py)
    [[ $name == test_workspace ]] || step "dist-${name#test_}" 240 "${launch[@]}" -m pytest -q "$file"
  done
  # What changes with the kernels first, so that a limit on the whole hits what does not.
  step bench-attention 240 "${launch[@]}" benchmarks/bench_attention.py
  step bench-alone 180 python3 benchmarks/bench_attention.py
  step bench-megamoe 240 "${launch[@]}" benchmarks/bench_megamoe.py
  step bench-a2a 180 "${launch[@]}" benchmarks/bench_a2a.py
  step bench-models 90 "${launch[@]}" benchmarks/bench_model.py flux qwen-image wan2.2-720p hunyuan \
    --proxy-world 8 --pairs 20 --out models.jsonl
  step sweep 660 "${launch[@]}" benchmarks/sweep_84.py --record --budget-s 600
  step traces 60 python3 benchmarks/evidence.py spans --measure --record
  step bench-handshake 120 "${launch[@]}" benchmarks/bench_handshake.py
  step bench-burst 120 python3 benchmarks/bench_burst.py
  step calibrate 120 "${xstage[@]}" calibrate --out "$profile.json"
  step validate 120 "${xstage[@]}" validate --profile "$profile.json" --out validation
  step doctor 60 "${xstage[@]}" doctor --profile "$profile.json"
  # Last, since a minute of it is waiting for processes that are killed.
  step dist-workspace 240 "${launch[@]}" -m pytest -q tests/dist/test_workspace.py
fi

printf '\n%s\n' "check            result         time  last line"
failures=0
for name in "${steps[@]}"; do
  row=$(cat "$logs/$name.row")
  echo "$row"
  [[ $row =~ ^[a-z0-9_-]+\ +ok\  ]] || failures=$((failures + 1))
done
((gpus >= ranks)) || echo "two-rank checks  skipped: $gpus GPU visible, $ranks needed"
exit $((failures > 0))
