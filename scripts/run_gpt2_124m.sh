#!/bin/bash
# GPT-2 124M on a rented machine, from nothing to a model on the Hub:
#   git clone URL-OF-THIS-REPOSITORY ursa-minor && cd ursa-minor && make environment && source .venv/bin/activate
#   DRY_RUN=1 bash scripts/run_gpt2_124m.sh                                  # prints the commands, runs none
#   HF_TOKEN=... PUSH=1 bash scripts/run_gpt2_124m.sh                        # pushes while it trains; without PUSH nothing
#   RECIPE=recipes/gpt2_350m.yaml bash scripts/run_gpt2_124m.sh              # another recipe: its run folder, its repository
# Interrupted (spot machine, Ctrl-C, power cut)? Run it again: the trainer resumes from the newest checkpoint, on another machine
# too if runs/ and data/ lie on a disk that stays. A lock lets only one run at a time. Flags go to train.py: ... --save_steps 500
#
# The arithmetic (recipes/gpt2_124m.yaml):
#   FLOPs a token  6 N + 12 L d T = 6 x 123.7M + 12 x 12 x 768 x 1,024 = 855 MFLOP
#   tokens         19,073 steps x 524,288 = 10.0B          FLOPs  8.55e18
#   price          hours x PRICE_PER_MACHINE_HOUR (of the whole machine, in your currency)
#   machine        tokens/s     hours   all estimated (ursa_minor/preflight/estimate.py), none measured; evaluating and saving come on top
#   8x h100        3,500,000     0.8
#   8x a100        1,600,000     1.7
#   1x h200          500,000     5.6
#   1x h100          440,000     6.3
#   1x a100          210,000    13.4
#   1x rtx4090       120,000    22.6
#   1x a6000          94,000    29.6
#
# Environment: RECIPE, whose name is the run's, the run folder's (runs/NAME) and the repository's (yours, private); PUSH=1, or
# HUB_MODEL_ID=OWNER/NAME for another repository; HF_TOKEN (only from here; never printed), DRY_RUN=1, PRICE_PER_MACHINE_HOUR, and
# PREPARE=1, which tokenizes all data before training. That is not needed: the data is streamed while training. It helps where
# the download is slower than the cards, and is best done on a machine without cards that shares the disk.
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
    [[ /${!name:-} != */-* ]] || refuse "$name" "a name that begins with - would be taken for a flag"
done
[[ -f $RECIPE ]] || refuse "RECIPE=$RECIPE" "there is no such file"
for flag in "$@"; do # the check and the preparation would be another recipe's
    [[ $flag != --recipe && $flag != --recipe=* ]] || refuse "$flag" "give RECIPE=FILE in the environment"
done

run() { # in a dry run print a command as a shell takes it, without secrets; else run it
    if [[ ${DRY_RUN:-0} != 1 ]]; then "$@"; return; fi
    python -c 'import shlex, sys; from ursa_minor.base.redaction import redact; print(shlex.join(map(redact, sys.argv[1:])))' "$@"
}

# The cards: nvidia-smi without a driver says so on its standard output, so only a success counts.
CARDS=$(nvidia-smi -L 2>/dev/null) || CARDS=""
NAMES=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) || NAMES=""
COUNT=$(grep -c '^GPU ' <<<"$CARDS") || COUNT=0
[[ $COUNT == 0 ]] && NAMES=""
PRESET=$(python -c 'import sys; from ursa_minor.base import gpus; print(gpus.preset(sys.argv[1], int(sys.argv[2])))' \
    "${NAMES%%$'\n'*}" "$COUNT")
LAUNCH=(accelerate launch --config_file "accelerate_configs/$PRESET.yaml")
if ((COUNT > 1)) && [[ $PRESET != *_x$COUNT ]]; then # no YAML for so many: the single card's, with their number
    LAUNCH+=(--multi_gpu --num_processes "$COUNT")
fi

PUSHED=()
if [[ ${PUSH:-0} == 1 || -n ${HUB_MODEL_ID:-} ]]; then
    PUSHED=(--push_to_hub true --hub_model_id "${HUB_MODEL_ID:-$NAME}")
fi

if [[ ${DRY_RUN:-0} == 1 ]] && ((COUNT == 0)); then
    echo "nvidia-smi lists no card here: without DRY_RUN this stops before the first command" >&2
fi
if [[ ${DRY_RUN:-0} != 1 ]]; then
    if ((COUNT == 0)); then
        echo "nvidia-smi lists no card, and this run is not for a CPU. What is: make train" >&2
        exit 1
    fi
    if ((${#PUSHED[@]})) && [[ -z ${HF_TOKEN:-} ]]; then
        echo "PUSH or HUB_MODEL_ID is set but HF_TOKEN is not: no push would work. export HF_TOKEN, with write access" >&2
        exit 1
    fi
    mkdir -p runs
    exec 9>"$RUN.lock"
    flock -n 9 || { echo "$RUN.lock: another run of this script is at it" >&2; exit 1; }
fi

run python check_setup.py --recipe "$RECIPE" # exit status 1 stops here
[[ ${PREPARE:-0} == 1 ]] && run python prepare_data.py --recipe "$RECIPE"
run "${LAUNCH[@]}" train.py --recipe "$RECIPE" "${PUSHED[@]+"${PUSHED[@]}"}" "$@"
if [[ ${DRY_RUN:-0} != 1 && -n ${PRICE_PER_MACHINE_HOUR:-} ]]; then
    awk -v s="$SECONDS" -v p="$PRICE_PER_MACHINE_HOUR" 'BEGIN { printf "this call: %.2f h x %s = %.2f\n", s / 3600, p, s / 3600 * p }'
fi
exit 0
