#!/bin/bash
# Train GPT-2 124M on a rented machine with GPUs, and optionally push it to the Hub:
#   git clone URL-OF-THIS-REPOSITORY ursa-minor && cd ursa-minor
#   make environment && source .venv/bin/activate
#   DRY_RUN=1 bash scripts/run_gpt2_124m.sh             # print the commands without running them
#   HF_TOKEN=... PUSH=1 bash scripts/run_gpt2_124m.sh   # push to the Hub during the training
#   RECIPE=recipes/gpt2_350m.yaml bash scripts/run_gpt2_124m.sh    # another recipe
#   bash scripts/run_gpt2_124m.sh --save_steps 500      # flags are passed to train.py
#
# If the run is interrupted (spot machine, Ctrl-C, power cut), start the script again. The trainer
# resumes from the newest checkpoint. This also works on another machine if runs/ and data/ are on a
# disk that both can use. A lock makes sure that only one run of a name is active.
#
# The cost of recipes/gpt2_124m.yaml:
#   FLOPs per token   6 N + 12 L d T = 6 x 123.7M + 12 x 12 x 768 x 1,024 = 855 MFLOP
#   tokens            19,073 steps x 524,288 = 10.0B
#   FLOPs             8.55e18
#   price             hours x PRICE_PER_MACHINE_HOUR (of the whole machine, in your currency)
# These figures are estimated (ursa_minor/preflight/estimate.py), not measured. Evaluations and
# checkpoints are not included.
#   machine        tokens/s     hours
#   8x h100        3,500,000     0.8
#   8x a100        1,600,000     1.7
#   1x h200          500,000     5.6
#   1x h100          440,000     6.3
#   1x a100          210,000    13.4
#   1x rtx4090       120,000    22.6
#   1x a6000          94,000    29.6
#
# Environment variables:
#   RECIPE                   the recipe file. Its name is the name of the run, of the run folder
#                            (runs/NAME) and of the repository on the Hub (private, in your account)
#   PUSH=1                   push to the Hub
#   HUB_MODEL_ID=OWNER/NAME  push to this repository
#   HF_TOKEN                 token with write access, needed to push. It is never printed
#   DRY_RUN=1                print the commands without running them
#   PRICE_PER_MACHINE_HOUR   print the price of this call at the end
#   PREPARE=1                tokenize all data before the training. Otherwise the data is streamed
#                            during the training. It helps if the download is slower than the GPUs.
#                            Do it on a machine without GPUs that shares the disk
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
RECIPE=${RECIPE:-recipes/gpt2_124m.yaml}
NAME=$(basename -- "$RECIPE" .yaml)
RUN=runs/$NAME
refuse() {
    printf 'error: %q: %s\n' "$1" "$2" >&2
    exit 2
}
for name in RECIPE HUB_MODEL_ID; do
    [[ /${!name:-} != */-* ]] || refuse "$name" "a name that begins with - would be read as a flag"
done
[[ -f $RECIPE ]] || refuse "RECIPE=$RECIPE" "there is no such file"
# A --recipe flag would reach train.py only, and not the check and the preparation before it.
for flag in "$@"; do
    [[ $flag != --recipe && $flag != --recipe=* ]] ||
        refuse "$flag" "give RECIPE=FILE in the environment"
done

# Run a command. With DRY_RUN=1, print it quoted for a shell and without secrets instead.
run() {
    if [[ ${DRY_RUN:-0} != 1 ]]; then "$@"; return; fi
    python -c '
import shlex, sys
from ursa_minor.base.redaction import redact
print(shlex.join(map(redact, sys.argv[1:])))' "$@"
}

# Find the GPUs. Without a driver, nvidia-smi prints its error to the standard output, so the output
# counts only if nvidia-smi succeeds.
GPU_LIST=$(nvidia-smi -L 2>/dev/null) || GPU_LIST=""
NAMES=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) || NAMES=""
COUNT=$(grep -c '^GPU ' <<<"$GPU_LIST") || COUNT=0
[[ $COUNT == 0 ]] && NAMES=""

# Choose the file in accelerate_configs/. If there is none for this number of GPUs, the file for one
# GPU is used, and the number is given as a flag.
PRESET=$(python -c '
import sys
from ursa_minor.base import gpus
print(gpus.preset(sys.argv[1], int(sys.argv[2])))' "${NAMES%%$'\n'*}" "$COUNT")
LAUNCH=(accelerate launch --quiet --config_file "accelerate_configs/$PRESET.yaml")
if ((COUNT > 1)) && [[ $PRESET != *_x$COUNT ]]; then
    LAUNCH+=(--multi_gpu --num_processes "$COUNT")
fi

PUSHED=()
if [[ ${PUSH:-0} == 1 || -n ${HUB_MODEL_ID:-} ]]; then
    PUSHED=(--push_to_hub true --hub_model_id "${HUB_MODEL_ID:-$NAME}")
fi

if [[ ${DRY_RUN:-0} == 1 ]] && ((COUNT == 0)); then
    echo "nvidia-smi lists no GPU. Without DRY_RUN, the script would stop here" >&2
fi
if [[ ${DRY_RUN:-0} != 1 ]]; then
    if ((COUNT == 0)); then
        echo "error: nvidia-smi lists no GPU, and a CPU is too slow. Try make train" >&2
        exit 1
    fi
    if ((${#PUSHED[@]})) && [[ -z ${HF_TOKEN:-} ]]; then
        echo "error: PUSH or HUB_MODEL_ID is set, but HF_TOKEN is not, so no push would work." \
            "Export HF_TOKEN, a token with write access" >&2
        exit 1
    fi
    mkdir -p runs
    exec 9>"$RUN.lock"
    if ! flock -n 9; then
        echo "error: another run of this script holds $RUN.lock" >&2
        exit 1
    fi
fi

run python check_setup.py --recipe "$RECIPE" # if it fails, the script stops here
[[ ${PREPARE:-0} == 1 ]] && run python prepare_data.py --recipe "$RECIPE"
run "${LAUNCH[@]}" train.py --recipe "$RECIPE" "${PUSHED[@]+"${PUSHED[@]}"}" "$@"
if [[ ${DRY_RUN:-0} != 1 && -n ${PRICE_PER_MACHINE_HOUR:-} ]]; then
    awk -v s="$SECONDS" -v p="$PRICE_PER_MACHINE_HOUR" \
        'BEGIN { printf "this call: %.2f h x %s = %.2f\n", s / 3600, p, s / 3600 * p }'
fi
exit 0
