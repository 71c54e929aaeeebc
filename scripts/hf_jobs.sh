#!/bin/bash
# Train GPT-2 124M as a job on the machines of Hugging Face. If the run was pushed before, the job
# continues it from the newest push.
#   export HF_TOKEN=...   # token with write access. The job gets it as a secret
#   export GIT_URL=https://... HUB_MODEL_ID=ME/gpt2
#   DRY_RUN=1 bash scripts/hf_jobs.sh            # hf prints the job without submitting it
#   bash scripts/hf_jobs.sh --save_steps 500     # flags are passed to train.py
#
# This script was not run on Hugging Face's machines. Tests check that hf parses the command, and
# that the run which it starts resumes bitwise identically from a Hub on the test machine.
#
# The disk of a job is deleted at its end. Only the pushes stay: the model and a full checkpoint at
# each save. If the job ends early (time limit, lost machine, canceled), start the same command
# again. It repeats the updates after the last push, and streams the data again from the beginning
# to the position of the run.
#
# A push of a GPT-2 124M checkpoint has 1.5 GB (estimated: 124M parameters with two moments each in
# fp32). A client without hf_xet sends the weights twice, 2.0 GB in all. Choose --save_steps so that
# the network can send a push before the next save.
#
# Environment variables:
#   GIT_URL                  clone of this repository that the job can read, by https or ssh
#   GIT_REVISION             branch or tag (default: main)
#   HUB_MODEL_ID=OWNER/NAME  repository to push to, and to resume from
#   RECIPE                   recipe file (default: recipes/gpt2_124m.yaml)
#   FLAVOR                   machine (default: h200). `hf jobs hardware` lists them with prices
#   TIMEOUT                  time limit of the job, which also limits the price (default: 12h).
#                            TRL's documentation states that a job without a limit ends after 30
#                            minutes
#   ATTEMPTS                 number of attempts (default: 3)
#   DRY_RUN=1                print the job without submitting it
# Secrets are removed from what hf prints here. The page of the job shows the flags unchanged.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
refuse() {
    echo "error: $*" >&2
    exit 2
}
[[ -n ${GIT_URL:-} ]] || refuse "GIT_URL: set it to the address of a clone that the job can read"
[[ -n ${HUB_MODEL_ID:-} ]] ||
    refuse "HUB_MODEL_ID: set it to OWNER/NAME of the repository to push to and to resume from"
for name in GIT_URL GIT_REVISION HUB_MODEL_ID RECIPE FLAVOR TIMEOUT ATTEMPTS; do
    [[ /${!name:-} != */-* ]] || refuse "$name: a name that begins with - would be read as a flag"
done
# Accept https and ssh only, because git runs the command in an ext:: address. The pattern is in a
# variable because bash 3.2 cannot read it otherwise.
USER_AT='[A-Za-z0-9_][A-Za-z0-9_.-]*@'
HOST='[A-Za-z0-9][A-Za-z0-9.-]*'
ADDRESS="^((https://|ssh://($USER_AT)?)$HOST(:[0-9]+)?/|$USER_AT$HOST:)[^@:?#[:space:]]+\$"
[[ $GIT_URL =~ $ADDRESS ]] ||
    refuse "GIT_URL: give https://HOST/PATH, ssh://git@HOST/PATH or git@HOST:PATH," \
        "without a password or a query, which the page of the job would show"

DRY=()
[[ ${DRY_RUN:-0} == 1 ]] && DRY=(--dry-run)

# "--" is needed because hf would use an unknown flag as the name of the image.
# shellcheck disable=SC2016  # the variables in single quotes are expanded by the shell of the job
NO_COLOR=1 hf jobs run "${DRY[@]+"${DRY[@]}"}" --detach --name "${HUB_MODEL_ID##*/}" \
    --flavor "${FLAVOR:-h200}" --timeout "${TIMEOUT:-12h}" --attempts "${ATTEMPTS:-3}" \
    --secrets HF_TOKEN --env HUB_MODEL_ID="$HUB_MODEL_ID" \
    --env RECIPE="${RECIPE:-recipes/gpt2_124m.yaml}" \
    --env GIT_URL="$GIT_URL" --env GIT_REVISION="${GIT_REVISION:-main}" \
    -- python:3.12 bash -c '
        set -euo pipefail
        git clone --depth 1 --branch "$GIT_REVISION" -- "$GIT_URL" ursa-minor
        cd ursa-minor
        make environment
        source .venv/bin/activate
        exec bash scripts/run_gpt2_124m.sh --hub_strategy checkpoint --resume_from_checkpoint "hub://$HUB_MODEL_ID" "$@"
    ' job "$@" 2>&1 |
    python3 -c '
import sys
from ursa_minor.base.redaction import redact
sys.stdout.write(redact(sys.stdin.read()))'
