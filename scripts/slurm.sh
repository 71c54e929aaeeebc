#!/bin/bash
# Any number of nodes of any number of cards, by Slurm. From the repository's root, in the environment that has accelerate:
#   sbatch scripts/slurm.sh                                                                # 2 x 8 cards, recipes/gpt2_124m.yaml
#   sbatch --nodes 4 --gpus-per-node 4 scripts/slurm.sh --recipe recipes/gpt2_1558m.yaml   # flags go to train.py
#   DRY_RUN=1 SLURM_JOB_NUM_NODES=4 SLURM_GPUS_PER_NODE=4 bash scripts/slurm.sh            # prints the command; needs no Slurm
# sbatch itself reads SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_TIMELIMIT and its other variables. Ours:
#   VENV=FOLDER                  environment to activate on each node
#   CONTAINER=IMAGE              for srun --container-image (pyxis), with CONTAINER_MOUNTS=FROM:TO,...
#   INTERFACE=ib0                network between the nodes, for NCCL and gloo
#   NODE_CACHE=/local/disk       folder of each node's own for what torch.compile makes
#   ACCELERATE_YAML=FILE         accelerate_configs/multi_node_2x8.yaml (its counts do not matter), or fsdp2_x8.yaml
#   REQUEUE=0                    do not queue again at the time limit
# Each node starts one process per GPU that Slurm allocated there, whether it was requested by --gpus-per-node, --gres or --gpus.
# All nodes must have the same number of GPUs.
# The repository, runs/ and data/ must lie where all nodes see them. A crash on a node restarts all processes, up to 3 times; a
# preemption or a dead node puts the job back into the queue (--requeue). 5 minutes before the time limit, the trainer saves and
# stops, and the job (in a job array, this task only) is queued again. A run that has finished or failed is not queued again.
# Each start resumes from the newest checkpoint. `scancel` ends the job for good.
# Not tried on a cluster: docs/cluster.md says what was.
#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --output=%x-%j.out
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

# Add up the numbers of a list of GPUs as Slurm writes it: 4, a100:4 or a100:2,h100:2.
count_gpus() {
    local item total=0
    for item in ${1//,/ }; do
        if [[ ! ${item##*:} =~ ^[0-9]+$ ]]; then
            echo "error: cannot read the number of GPUs from '$1'" >&2
            return 2
        fi
        total=$((total + ${item##*:}))
    done
    echo "$total"
}

NODES=${SLURM_JOB_NUM_NODES:-2}
CARDS=$(count_gpus "${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-8}}")
if ((CARDS == 0)); then
    echo "error: Slurm allocated no GPU on this node. Request some, for example with --gpus-per-node 4" >&2
    exit 2
fi
ALL_CARDS=$(count_gpus "${SLURM_GPUS:-$((NODES * CARDS))}") # of a job that requests them with --gpus
if ((ALL_CARDS != NODES * CARDS)); then
    echo "error: the $ALL_CARDS GPUs are not divided evenly among $NODES nodes. Request them with --gpus-per-node" >&2
    exit 2
fi
JOB=${SLURM_JOB_ID:-0}
HOST=FIRST_NODE
# The first node's name and a port of this job's own: two jobs may share a node's network.
if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p); fi
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240 # seconds that a stopping trainer has to save; torch gives 30
if [[ -n ${INTERFACE:-} ]]; then export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE; fi
if [[ -n ${NODE_CACHE:-} ]]; then export TORCHINDUCTOR_CACHE_DIR=$NODE_CACHE/inductor TRITON_CACHE_DIR=$NODE_CACHE/triton; fi

# One card needs no launcher. Else one accelerate a node; with several nodes c10d: the launchers meet at HOST:PORT, and when one
# node restarts its processes the others do too (with static, accelerate's default, a node restarts for its own failures only).
LAUNCH=(python)
if ((NODES * CARDS > 1)); then
    LAUNCH=(accelerate launch --machine_rank NODE_ID --config_file "${ACCELERATE_YAML:-accelerate_configs/multi_node_2x8.yaml}"
        --num_machines "$NODES" --num_processes "$((NODES * CARDS))" --max_restarts 3
        --main_process_ip "$HOST" --main_process_port "$((20000 + JOB % 20000))")
fi
if ((NODES > 1)); then LAUNCH+=(--rdzv_backend c10d); fi
STEP=(srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-32}" --kill-on-bad-exit=1)
if [[ -n ${CONTAINER:-} ]]; then
    STEP+=(--container-image="$CONTAINER" --container-workdir="$PWD"
        --container-mounts="$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
fi
if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "${STEP[@]}" "${LAUNCH[@]}" train.py "$@"
    echo
    exit 0
fi

# train.py creates this file when a signal has stopped it. The status does not show that: `accelerate launch` ends with 1 both then
# and when training fails.
export URSA_MINOR_STOPPED_FILE=$PWD/.stopped-$JOB
rm -f "$URSA_MINOR_STOPPED_FILE"

step=
step_ended=0
status=0
warned=0
# shellcheck disable=SC2329  # the trap calls it
stop_step() {
    trap '' USR1
    if [[ -z $step ]]; then return; fi
    if kill -TERM "$step" 2>/dev/null; then
        warned=1
        echo "time is nearly up: the trainer saves and stops"
    fi
    wait "$step" || status=$?
    step_ended=1
}
trap stop_step USR1

# shellcheck disable=SC2016  # the single quotes leave SLURM_NODEID to each node's own shell
"${STEP[@]}" bash -c '
    if [[ -n ${VENV:-} ]]; then source "$VENV/bin/activate"; fi
    if [[ $1 == accelerate ]]; then set -- "${@:1:3}" "$SLURM_NODEID" "${@:5}"; fi
    exec "$@"' launch "${LAUNCH[@]}" train.py "$@" &
step=$!
step_status=0
wait "$step" || step_status=$?
trap '' USR1
if ((step_ended == 0)); then status=$step_status; fi # else the trap has interrupted this wait

interrupted=0
case $status in
    143) interrupted=$warned ;;             # SIGTERM; without a warning it came from scancel, or from a preemption
    138 | 140 | 152) interrupted=1 ;;       # SIGUSR1, SIGUSR2 or SIGXCPU: a warning that Slurm sent to the step itself
    *) if [[ -f $URSA_MINOR_STOPPED_FILE ]]; then interrupted=$warned; fi ;;
esac
rm -f "$URSA_MINOR_STOPPED_FILE"
if ((interrupted)); then
    if [[ ${REQUEUE:-1} == 1 ]]; then
        # In a job array, the job's own number would queue all tasks again.
        task=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}
        scontrol requeue "${task:-$SLURM_JOB_ID}"
    else
        echo "not queued again: REQUEUE=$REQUEUE"
    fi
    exit 0
fi
# A preempted job whose script ends by itself would count as done: wait until Slurm takes it away and queues it again.
if ((status != 0)) && scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then sleep 900; fi
exit "$status"
