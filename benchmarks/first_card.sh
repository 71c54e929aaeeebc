#!/usr/bin/env bash
# What is run when an NVIDIA card is met, part by part, each within 9 minutes and offline.
# bash benchmarks/first_card.sh lists the parts; ... a b runs two of them. PYTHON=python3 names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 WANDB_MODE=disabled TOKENIZERS_PARALLELISM=true
export PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}
(($#)) || exec "$PYTHON" benchmarks/first_card.py
status=0
for part in "$@"; do
    # first_card.py keeps its own time (SECONDS_PER_PART); this ends one that hangs.
    timeout --kill-after=10 $((${SECONDS_PER_PART:-510} + 30)) "$PYTHON" benchmarks/first_card.py "$part" || status=$?
done
exit "$status"
