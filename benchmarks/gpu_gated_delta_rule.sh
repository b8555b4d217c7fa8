#!/bin/sh
# The gated delta rule on a GPU machine: `sh benchmarks/gpu_gated_delta_rule.sh [results.jsonl] [part...]`
# Parts: quick tests split bench cold decode certify sanitizer (default: tests bench). Shows pytest's summaries; what each
# of the chunked kernels takes; per case every provider; a process's first call; what certification finds.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
out=${1:-benchmarks/results/h200/gated_delta_rule.jsonl}
[ $# -gt 0 ] && shift
tests=compat_tests/kernels/test_gated_delta_rule_chunk_gpu.py
for part in ${*:-tests bench}; do
  echo "== $part"
  case $part in
    quick) timeout 120 python3 -m pytest -q -x --tb=short -m gpu $tests -k "quick" 2>&1 | tail -40 ;;
    tests) timeout 280 python3 -m pytest -q --maxfail=12 --tb=short -m gpu $tests 2>&1 | tail -60 ;;
    split) timeout 60 python3 -W ignore benchmarks/ops/gated_delta_rule_chunk.py --split ;;
    bench) timeout 200 python3 -W ignore benchmarks/ops/gated_delta_rule_chunk.py --out "$out" ;;
    cold) timeout 240 python3 -W ignore benchmarks/ops/gated_delta_rule_chunk.py --cold --out "$out" ;;
    decode) timeout 140 python3 -W ignore benchmarks/ops/gated_delta_rule.py --out "$out" ;;
    certify) timeout 500 python3 -W ignore -m accel certify gated_delta_rule.sm90_fwd ;;
    sanitizer)
      timeout 200 compute-sanitizer --tool memcheck --kernel-regex kns=kernel_cutlass --print-limit 5 \
        python3 -m pytest -q -x -p no:cacheprovider -m gpu $tests -k "quick" 2>&1 | grep -E "=====|passed|failed|error" | tail -12 ;;
    *) echo "unknown part $part" >&2; exit 2 ;;
  esac
done
