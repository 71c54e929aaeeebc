#!/bin/bash
# GPT-2 124M as a job on Hugging Face's machines, on from the newest push where there is one:
#   export HF_TOKEN=...                              # with write access; the job gets it as a secret, by its name only
#   GIT_URL=https://... HUB_MODEL_ID=ME/gpt2 DRY_RUN=1 bash scripts/hf_jobs.sh      # hf prints the job, submits none
#   GIT_URL=https://... HUB_MODEL_ID=ME/gpt2 bash scripts/hf_jobs.sh --save_steps 500        # flags go to train.py
# Not run on a cloud. Tested: hf's own parser reads this command, and the run that it starts continues, to the bit, from a Hub on
# the tests' machine.
#
# A job's disk is gone with the job, so all that stays is what was pushed: the model with a full checkpoint, at each save. Time
# up, machine lost, job canceled? Start the same command again; what came after the last push is done again. A push of GPT-2
# 124M's checkpoint is 1.5 GB (estimated: 124M parameters, two moments each, fp32; a client without hf_xet sends the weights
# twice, 2.0 GB): save no oftener than the uplink sends that.
# The data is streamed anew by each job, from its beginning to where the run is.
#
# Environment: GIT_URL (a clone of this repository that the job may read, https or ssh) and GIT_REVISION (main);
# HUB_MODEL_ID=OWNER/NAME; RECIPE; FLAVOR (hf jobs hardware lists them with prices), TIMEOUT (the job's, 12h: TRL's docs say that
# without one a job ends after 30 minutes, and a limit is what bounds the bill), ATTEMPTS, DRY_RUN=1.
# What hf prints is redacted here; the job's page shows the flags as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
refuse() {
    echo "error: $*" >&2
    exit 2
}
[[ -n ${GIT_URL:-} ]] || refuse "GIT_URL: the address of a clone that the job may read is missing"
[[ -n ${HUB_MODEL_ID:-} ]] || refuse "HUB_MODEL_ID: OWNER/NAME of the repository to push to, and to resume from, is missing"
for name in GIT_URL GIT_REVISION HUB_MODEL_ID RECIPE FLAVOR TIMEOUT ATTEMPTS; do
    [[ /${!name:-} != */-* ]] || refuse "$name: a name that begins with - would be taken for a flag"
done
# git runs what an ext:: address holds.
USER_AT='[A-Za-z0-9_][A-Za-z0-9_.-]*@'
HOST='[A-Za-z0-9][A-Za-z0-9.-]*'
ADDRESS="^((https://|ssh://($USER_AT)?)$HOST(:[0-9]+)?/|$USER_AT$HOST:)[^@:?#[:space:]]+\$" # bash 3.2 wants it in a variable
[[ $GIT_URL =~ $ADDRESS ]] || refuse "GIT_URL: give https://HOST/PATH, ssh://git@HOST/PATH or git@HOST:PATH," \
    "without a password or a query, which the job's page would show"

DRY=()
[[ ${DRY_RUN:-0} == 1 ]] && DRY=(--dry-run)

# hf takes a flag that it does not know for the image; behind "--" it takes none at all.
# shellcheck disable=SC2016  # the single quotes leave the variables to the job's own shell
NO_COLOR=1 hf jobs run "${DRY[@]+"${DRY[@]}"}" --detach --name "${HUB_MODEL_ID##*/}" \
    --flavor "${FLAVOR:-h200}" --timeout "${TIMEOUT:-12h}" --attempts "${ATTEMPTS:-3}" \
    --secrets HF_TOKEN --env HUB_MODEL_ID="$HUB_MODEL_ID" --env RECIPE="${RECIPE:-recipes/gpt2_124m.yaml}" \
    --env GIT_URL="$GIT_URL" --env GIT_REVISION="${GIT_REVISION:-main}" \
    -- python:3.12 bash -c '
        set -euo pipefail
        git clone --depth 1 --branch "$GIT_REVISION" -- "$GIT_URL" ursa-minor
        cd ursa-minor
        make environment
        source .venv/bin/activate
        exec bash scripts/run_gpt2_124m.sh --hub_strategy checkpoint --resume_from_checkpoint "hub://$HUB_MODEL_ID" "$@"
    ' job "$@" 2>&1 |
    python3 -c 'import sys; from ursa_minor.base.redaction import redact; sys.stdout.write(redact(sys.stdin.read()))'
