#!/bin/sh
# Decode attention on a GPU machine: `sh benchmarks/gpu_decode.sh [results.jsonl] [part...]`
# Parts: tests bench grid sweep (default: all). Shows pytest's summary; per case every provider beside the memory floor;
# many shapes beside upstream; splits and launch configurations side by side.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
out=${1:-benchmarks/results/h200/attention.jsonl}
[ $# -gt 0 ] && shift
for part in ${*:-tests bench grid sweep}; do
  echo "== $part"
  case $part in
    tests) timeout 140 python3 -m pytest -q --maxfail=12 --tb=short -m gpu compat_tests/kernels/test_attention_decode_gpu.py 2>&1 | tail -60 ;;
    bench) timeout 140 python3 -W ignore benchmarks/ops/attention_decode.py --out "$out" ;;
    grid) timeout 100 python3 -W ignore benchmarks/ops/attention_decode.py --grid ;;
    sweep) timeout 140 python3 benchmarks/ops/attention_decode.py --sweep --rounds 10 ;;
    *) echo "unknown part $part: tests, bench, grid or sweep" >&2; exit 2 ;;
  esac
done
