#!/usr/bin/env bash
# One command for a machine with a CUDA device: the kernel tests on it, then the kernel benchmark, a JSON line a case.
#
#   bash tests/gpu/run.sh [PYTHON] [arguments of bench_kernels, such as --sweep]
#
# PYTHON (default python3) has torch, triton, transformers and the test tools. Most of the tests' time is compiling, so
# they run in as many processes as pytest-xdist is given cores.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=python3
if [[ $# -gt 0 && $1 != -* ]]; then
    python=$1
    shift
fi
"$python" -m pytest tests/runner/kernels -q -n 8 -p no:cacheprovider
"$python" -m tests.gpu.bench_kernels "$@"
