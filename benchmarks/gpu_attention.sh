#!/bin/sh
# Attention and the building blocks on a GPU machine: `sh benchmarks/gpu_attention.sh [results.jsonl] [part...]`
# Parts: gemm tests bench sweep (default: the first three). Shows pytest's summaries; the GEMM beside torch.matmul; per case
# every provider; launch configurations side by side.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
out=${1:-benchmarks/results/h200/attention.jsonl}
[ $# -gt 0 ] && shift
for part in ${*:-gemm tests bench}; do
  echo "== $part"
  case $part in
    gemm)
      timeout 60 python3 -m pytest -q --maxfail=4 -m gpu compat_tests/kernels/test_blocks_gpu.py 2>&1 | tail -25
      timeout 60 python3 benchmarks/ops/blocks.py --out "$(dirname "$out")/blocks.jsonl" ;;
    tests) timeout 120 python3 -m pytest -q --maxfail=12 -m gpu compat_tests/kernels/test_attention_gpu.py 2>&1 | tail -60 ;;
    bench) timeout 120 python3 benchmarks/ops/attention.py --out "$out" ;;
    sweep)
      for case in b4_l4096_h32_8_d128_causal b8_l2048_h16_16_d64_causal b16_l577_h16_16_d64_full b2_l4096_h32_32_d96_causal b2_l4096_h16_2_d256_causal; do
        timeout 60 python3 benchmarks/ops/attention.py --sweep --rounds 5 --case $case
      done ;;
    *) echo "unknown part $part: gemm, tests, bench or sweep" >&2; exit 2 ;;
  esac
done
