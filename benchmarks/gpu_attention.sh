#!/bin/sh
# Attention and the building blocks on a GPU machine: `sh benchmarks/gpu_attention.sh [results.jsonl] [part...]`
# Parts: gemm tests robust bench masks cold generate sanitizer sweep (default: gemm tests bench). Shows pytest's summaries; the
# GEMM beside torch.matmul; per case every provider; a process's first call; a whole generate(); what the sanitizer finds;
# launch configurations side by side.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# cudnn-frontend and FlashAttention-4 compile each kernel in seconds, and keep it only if told to.
export FLEX_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
out=${1:-benchmarks/results/h200/attention.jsonl}
[ $# -gt 0 ] && shift

sanitized() { # tool, test files, pytest's -k
  if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer is not installed"
    return
  fi
  echo "-- $1: $3"
  timeout 150 compute-sanitizer --tool "$1" --kernel-regex kns=kernel_cutlass --print-limit 5 \
    python3 -m pytest -q -x -p no:cacheprovider -m gpu "$2" -k "$3" >"/tmp/sanitizer.$1" 2>&1
  [ $? -eq 124 ] && echo "out of time"
  grep -E "=====|passed|failed|error" "/tmp/sanitizer.$1" | tail -12
}

for part in ${*:-gemm tests bench}; do
  echo "== $part"
  case $part in
    gemm)
      timeout 60 python3 -m pytest -q --maxfail=4 -m gpu compat_tests/kernels/test_blocks_gpu.py 2>&1 | tail -25
      timeout 60 python3 benchmarks/ops/blocks.py --out "$(dirname "$out")/blocks.jsonl" ;;
    tests) timeout 200 python3 -m pytest -q --maxfail=12 -m gpu compat_tests/kernels/test_attention_gpu.py 2>&1 | tail -60 ;;
    robust) timeout 240 python3 -m pytest -q --maxfail=6 --tb=short -m gpu compat_tests/kernels/test_attention_robust_gpu.py 2>&1 | tail -60 ;;
    bench) timeout 240 python3 -W ignore benchmarks/ops/attention.py --out "$out" ;;
    masks) timeout 240 python3 -W ignore benchmarks/ops/attention_masks.py --out "$out" ;;
    cold) timeout 240 python3 benchmarks/ops/attention_cold.py --out "$out" ;;
    generate) timeout 240 python3 -W ignore benchmarks/models/generate.py --out "$(dirname "$out")/models.jsonl" ;;
    sanitizer)
      for tool in memcheck racecheck; do
        sanitized $tool compat_tests/kernels/test_attention_robust_gpu.py sanitizer
      done ;;
    sweep)
      for case in b4_l4096_h32_8_d128_causal b8_l2048_h16_16_d64_causal b16_l577_h16_16_d64_full b2_l4096_h32_32_d96_causal b2_l4096_h16_2_d256_causal; do
        timeout 60 python3 benchmarks/ops/attention.py --sweep --rounds 5 --case $case
      done ;;
    *) echo "unknown part $part: gemm, tests, robust, bench, masks, cold, generate, sanitizer or sweep" >&2; exit 2 ;;
  esac
done
