#!/bin/sh
# The norm family on a GPU machine: correctness, the sanitizer, timing. `sh benchmarks/gpu_norm.sh [results.jsonl] [part...]`
# Parts: tests sanitizer bench sweep (default: all). Shows pytest's summary; the sanitizer's error count; per case accel, upstream,
# the memory floor and host time; launch configurations side by side.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
out=${1:-benchmarks/results/h200/norm.jsonl}
[ $# -gt 0 ] && shift
for part in ${*:-tests sanitizer bench sweep}; do
  echo "== $part"
  case $part in
    tests) python3 -m pytest -q --maxfail=8 -m gpu compat_tests/kernels/test_norm_gpu.py 2>&1 | tail -30 ;;
    sanitizer)
      if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do
          echo "-- $tool"
          compute-sanitizer --tool $tool --kernel-regex kns=kernel_cutlass python3 -m pytest -q -m gpu -x \
            compat_tests/kernels/test_norm_gpu.py -k "test_case and (1000 or heads or 37x6)" 2>&1 | grep -E "=====|passed|failed" | tail -8
        done
      else
        echo "compute-sanitizer is not installed"
      fi ;;
    bench) python3 benchmarks/ops/norm.py --out "$out" ;;
    sweep)
      python3 benchmarks/ops/norm.py --sweep fwd --rounds 15
      python3 benchmarks/ops/norm.py --sweep bwd --rounds 10 ;;
    *) echo "unknown part $part: tests, sanitizer, bench or sweep" >&2; exit 2 ;;
  esac
done
