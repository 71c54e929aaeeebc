#!/usr/bin/env bash
# Measure an NVIDIA GPU part by part, offline. Without arguments, the script lists the parts.
# It prints one table row per part, and writes JSON to benchmarks/results/.
# The environment variable PYTHON is the interpreter (default: python3).
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 WANDB_MODE=disabled TOKENIZERS_PARALLELISM=true
export PYTHONUNBUFFERED=1
# The program observes SECONDS_IN_ALL. This limit ends a program that hangs.
exec timeout --kill-after=10 $((${SECONDS_IN_ALL:-560} + 20)) "${PYTHON:-python3}" -m benchmarks.first_card "$@"
