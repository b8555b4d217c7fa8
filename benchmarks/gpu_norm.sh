#!/bin/sh
# The norm family on a GPU machine, one command: correctness, then timing. `sh benchmarks/gpu_norm.sh [results.jsonl]`
# Shows: pytest's summary; per case accel, upstream, the memory floor; host time; launch configurations side by side.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
out=${1:-benchmarks/results/h200/norm.jsonl}
python3 -m pytest -q --maxfail=8 -m gpu compat_tests/kernels/test_norm_gpu.py 2>&1 | tail -40
python3 benchmarks/ops/norm.py --out "$out"
python3 benchmarks/ops/norm.py --sweep fwd --rounds 10
python3 benchmarks/ops/norm.py --sweep bwd --rounds 10
