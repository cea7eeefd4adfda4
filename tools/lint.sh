#!/usr/bin/env bash
# Format, lint, types, budgets and leftovers. Every check runs, then the script fails if one did.
# Needs the `dev` extra on PATH: make lint EXTRA=dev
set -u
cd "$(dirname "$0")/.."
failed=()
check() {
  local name=$1
  shift
  local output
  if output=$("$@" 2>&1); then
    echo "ok    $name"
  else
    echo "FAIL  $name"
    printf '%s\n' "$output" | tail -n 60
    failed+=("$name")
  fi
}
unformatted() {  # names files, not every place in them
  local status=0 file
  for file; do
    clang-format --dry-run --Werror --ferror-limit=1 "$file" >/dev/null 2>&1 || {
      echo "$file: run clang-format -i"
      status=1
    }
  done
  return $status
}
mapfile -t native < <(git ls-files 'csrc/*.h' 'csrc/*.cuh' 'csrc/*.cpp' 'csrc/*.cu')
mapfile -t python < <(git ls-files '*.py')
check "ruff format" ruff format --check "${python[@]}"
check "ruff" ruff check "${python[@]}"
check "mypy (strict)" mypy
check "clang-format" unformatted "${native[@]}"
check "budgets" python3 tools/check_budget.py
check "bash syntax" bash -n .ci/run tools/*.sh
if ((${#failed[@]})); then
  echo "failed: ${failed[*]}"
  exit 1
fi
