#!/bin/sh
# Attention and the building blocks on a GPU machine: `sh benchmarks/gpu_attention.sh [results.jsonl] [part...]`
# Parts: gemm tests bench (default: all). Shows pytest's summaries; the GEMM beside torch.matmul; per case every provider.
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
    *) echo "unknown part $part: gemm, tests or bench" >&2; exit 2 ;;
  esac
done
