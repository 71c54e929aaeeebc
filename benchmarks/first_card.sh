#!/usr/bin/env bash
# What is run when an NVIDIA card is met, part by part, offline. bash benchmarks/first_card.sh lists the parts.
# PYTHON=python3 names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 WANDB_MODE=disabled TOKENIZERS_PARALLELISM=true
export PYTHONUNBUFFERED=1
# first_card.py keeps its own time; this ends one that hangs.
exec timeout --kill-after=10 $((${SECONDS_IN_ALL:-560} + 20)) "${PYTHON:-python3}" benchmarks/first_card.py "$@"
