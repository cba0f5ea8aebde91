#!/usr/bin/env bash
# Runs MoK's GPU tests and benchmarks from a bundle; docs/gpu.md explains.
set -uo pipefail

usage() {
  cat <<'TEXT'
usage: run.sh {check|unit|pytest|benchmarks|all}

  check       no GPU needed: the files are whole, the wheel fits this Python, the benchmark harness
              and an example run on the CPU
  unit        the C++ test programs, on one GPU and on all
  pytest      the Python tests, on one GPU and on all
  benchmarks  all benchmarks; the tables, JSON and plots go to the results folder
  all         check, unit, pytest, benchmarks; goes on after a failure

Variables:
  PYTHON              the Python that has PyTorch; default python3
  MOK_BUNDLE_WORK     where to install and to write results; default: the folder work here
  MOK_BUNDLE_TIMEOUT  seconds that one program may take; default 1200
  CUDA_VISIBLE_DEVICES  the GPUs to use, as numbers
The exit status is the number of steps that failed.
TEXT
}

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python3}"
work="${MOK_BUNDLE_WORK:-$here/work}"
limit="${MOK_BUNDLE_TIMEOUT:-1200}"
site="$work/site"
results="$work/results"
failed=0

# Runs one step: a label, then a command. Its output goes to the terminal and to a log.
step() {
  local label="$1" status
  shift
  echo "=== $label"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$results/$label.log"
  status="${PIPESTATUS[0]}"
  if [[ "$status" -eq 0 ]]; then
    echo "--- $label: passed"
  else
    echo "--- $label: FAILED, exit status $status"
    failed=$((failed + 1))
  fi
}

# Unpacks the wheel, and beside it the tests that belong into its package.
install() {
  local wheel tag
  wheel="$(echo "$here"/wheel/*.whl)"
  tag="$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')" || return 1
  if [[ "$wheel" != *"-$tag-"* ]]; then
    echo "$(basename "$wheel") is not for $python ($tag): build the bundle for it, or set PYTHON"
    return 1
  fi
  rm -rf "$site"
  mkdir -p "$site" "$results"
  "$python" -m zipfile -e "$wheel" "$site" || return 1
  cp -r "$here"/tests/. "$here"/benchmarks/. "$here"/examples/. "$site"
  export PYTHONPATH="$site" PYTHONDONTWRITEBYTECODE=1
  cd "$work" || return 1
}

# The GPUs to use, one a word.
gpus() {
  if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
    echo "${CUDA_VISIBLE_DEVICES//,/ }"
  else
    "$python" -c 'import torch; print(*range(torch.cuda.device_count()))'
  fi
}

require_gpus() {
  read -ra devices <<<"$(gpus)"
  if [[ "${#devices[@]}" -eq 0 ]]; then
    echo "no GPU: only '$0 check' can run here"
    exit 1
  fi
  # What every suite runs on: the first GPU, and all of them.
  device_sets=("${devices[0]}")
  if [[ "${#devices[@]}" -gt 1 ]]; then device_sets+=("$(IFS=,; echo "${devices[*]}")"); fi
}

run_check() {
  step files env --chdir="$here" sha256sum --quiet --check --strict MANIFEST
  step import "$python" -c 'import mok_torch, torch; print(mok_torch.__file__, torch.__version__)'
  step harness "$python" -m benchmarks.layer.layer --backend=gloo --device=cpu --ranks=2 \
    --model=tiny --family=model --tokens=32 --iterations=1 --warm_ups=0
  step example "$python" -m examples.train_lm.train_lm --ranks=2 --batch=2 --steps=2 --sample=0 \
    --checkpoint="$work/train_lm.pt" --plot="$results/train_lm.png"
}

run_unit() {
  require_gpus
  local set
  for set in "${device_sets[@]}"; do
    export CUDA_VISIBLE_DEVICES="$set"
    step "emulator_validation_$set" "$here/bin/emulator_validation_main" \
      "$here/bin/emulator_reference.bin"
    step "schedule_$set" "$here/bin/schedule_gpu_main"
    step "grouped_gemm_$set" "$here/bin/grouped_gemm_gpu_main"
    step "backward_gemm_$set" "$here/bin/backward_gemm_gpu_main"
    step "forward_$set" "$here/bin/forward_gpu_main" small
    step "backward_$set" "$here/bin/backward_gpu_main" small
  done
}

run_pytest() {
  require_gpus
  local set
  for set in "${device_sets[@]}"; do
    # Fails with one GPU instead of passing over what it is for.
    local selected=(--ignore-glob="$site/mok_torch/distributed_*cuda_test.py" "$site/mok_torch")
    [[ "$set" != *,* ]] || selected=("$site/mok_torch" "$site/examples")
    CUDA_VISIBLE_DEVICES="$set" step "pytest_$set" "$python" -m pytest -q -p no:cacheprovider \
      --import-mode=importlib "${selected[@]}"
  done
}

run_benchmarks() {
  require_gpus
  CUDA_VISIBLE_DEVICES="${devices[0]}" step benchmark_grouped_gemm \
    "$python" -m benchmarks.grouped_gemm.grouped_gemm --json="$results/grouped_gemm.json"
  if [[ "${#devices[@]}" -lt 2 ]]; then
    echo "one GPU: no benchmark of transport, layers of one rank"
    CUDA_VISIBLE_DEVICES="${devices[0]}" step benchmark_layer "$python" -m benchmarks.layer.layer \
      --family=model --json="$results/layer.json" --plot="$results/layer.png"
    return
  fi
  CUDA_VISIBLE_DEVICES="${device_sets[0]},${devices[1]}" step benchmark_transport \
    "$python" -m benchmarks.transport.transport --json="$results/transport.json" \
    --plot="$results/transport.png"
  CUDA_VISIBLE_DEVICES="${device_sets[1]}" step benchmark_layer "$python" \
    -m benchmarks.layer.layer --json="$results/layer.json" --plot="$results/layer.png"
}

words=("$@")
[[ "${#words[@]}" -eq 1 ]] || { usage; exit 2; }
[[ "${words[0]}" == all ]] && words=(check unit pytest benchmarks)
case "${words[0]}" in
  check | unit | pytest | benchmarks) ;;
  -h | --help) usage; exit 0 ;;
  *) usage; exit 2 ;;
esac
install || exit 1
for word in "${words[@]}"; do "run_$word"; done
echo "$failed steps failed; logs and results: $results"
exit "$failed"
