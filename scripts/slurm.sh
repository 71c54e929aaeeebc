#!/bin/bash
# Train on any number of nodes and GPUs with Slurm. Start this script in the root of the repository,
# in an environment that has accelerate:
#   sbatch scripts/slurm.sh                   # 2 nodes with 8 GPUs each, recipes/gpt2_124m.yaml
#   sbatch --nodes 4 --gpus-per-node 4 scripts/slurm.sh --recipe recipes/gpt2_1558m.yaml
#   DRY_RUN=1 SLURM_JOB_NUM_NODES=4 SLURM_GPUS_PER_NODE=4 bash scripts/slurm.sh
# Flags are passed to train.py. DRY_RUN=1 prints the command without running it, and needs no Slurm.
#
# Environment variables, in addition to those of sbatch (SBATCH_ACCOUNT, SBATCH_PARTITION, ...):
#   VENV=FOLDER              environment to activate on each node
#   CONTAINER=IMAGE          image for srun --container-image (pyxis)
#   CONTAINER_MOUNTS=FROM:TO,...   further folders that the container can see
#   INTERFACE=ib0            network between the nodes for NCCL and gloo
#   NODE_CACHE=/local/disk   local folder of each node for the files of torch.compile
#   ACCELERATE_YAML=FILE     configuration of accelerate (default:
#                            accelerate_configs/multi_node_2x8.yaml). Its numbers of nodes and
#                            processes are replaced. For FSDP2, use accelerate_configs/fsdp2_x8.yaml
#   REQUEUE=0                do not queue the job again at the time limit
#
# - Each node starts one process for each GPU that Slurm allocated there, whether it was requested
#   with --gpus-per-node, --gres or --gpus. All nodes must have the same number of GPUs.
# - All nodes must see the repository, runs/ and data/.
# - A crash on a node restarts all processes, up to 3 times. After a preemption or the failure of a
#   node, Slurm queues the job again (--requeue).
# - 5 minutes before the time limit, the trainer saves a checkpoint and stops, and the job is queued
#   again (in a job array, only this task). A run that has finished or failed is not queued again.
# - Each start resumes from the newest checkpoint. `scancel` ends the job for good.
#
# This script was not tried on a cluster. docs/cluster.md states what was tested.
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

SIZE="SLURM_JOB_NUM_NODES=2 SLURM_GPUS_PER_NODE=8"
if [[ ${DRY_RUN:-0} == 1 ]]; then
    if [[ -z ${SLURM_JOB_NUM_NODES:-} || -z ${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-}} ]]; then
        echo "Sizes that are not set are those of the #SBATCH lines: $SIZE" >&2
    fi
elif [[ -z ${SLURM_JOB_ID:-} ]] || ! command -v srun >/dev/null; then
    echo "error: this is not a Slurm job. Submit it with: sbatch scripts/slurm.sh." \
        "To print its command without Slurm: DRY_RUN=1 $SIZE bash scripts/slurm.sh" >&2
    exit 2
fi

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

# Count the GPUs.
NODES=${SLURM_JOB_NUM_NODES:-2}
GPUS_PER_NODE=$(count_gpus "${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-8}}")
if ((GPUS_PER_NODE == 0)); then
    echo "error: Slurm allocated no GPU on this node." \
        "Request some, for example with --gpus-per-node 4" >&2
    exit 2
fi
PROCESSES=$((NODES * GPUS_PER_NODE))
TOTAL_GPUS=$(count_gpus "${SLURM_GPUS:-$PROCESSES}") # set if the job requests them with --gpus
if ((TOTAL_GPUS != PROCESSES)); then
    echo "error: the $TOTAL_GPUS GPUs are not divided evenly among $NODES nodes." \
        "Request them with --gpus-per-node" >&2
    exit 2
fi

# The processes meet on the first node. The port depends on the job, because two jobs can share a
# node.
JOB=${SLURM_JOB_ID:-0}
HOST=FIRST_NODE
PORT=$((20000 + JOB % 20000))
if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
    HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
fi
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240 # seconds to save after a signal (default: 30)
if [[ -n ${INTERFACE:-} ]]; then
    export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
fi
if [[ -n ${NODE_CACHE:-} ]]; then
    export TORCHINDUCTOR_CACHE_DIR=$NODE_CACHE/inductor TRITON_CACHE_DIR=$NODE_CACHE/triton
fi

# A single GPU needs no launcher. Otherwise each node runs one accelerate. With several nodes, the
# rendezvous backend is c10d: if one node restarts its processes, all nodes do. With accelerate's
# default, static, a node restarts only for its own failures.
LAUNCH=(python)
if ((PROCESSES > 1)); then
    LAUNCH=(accelerate launch --quiet --machine_rank NODE_ID
        --config_file "${ACCELERATE_YAML:-accelerate_configs/multi_node_2x8.yaml}"
        --num_machines "$NODES" --num_processes "$PROCESSES" --max_restarts 3
        --main_process_ip "$HOST" --main_process_port "$PORT")
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

# train.py creates this file when a signal has stopped it. The exit status does not show this,
# because `accelerate launch` also ends with 1 when the training fails.
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
        echo "The time limit is near. The trainer saves a checkpoint and stops."
    fi
    wait "$step" || status=$?
    step_ended=1
}
trap stop_step USR1

# Run train.py on all nodes. Each node replaces NODE_ID by its number.
# shellcheck disable=SC2016  # SLURM_NODEID in single quotes is expanded by the shell of each node
"${STEP[@]}" bash -c '
    if [[ -n ${VENV:-} ]]; then source "$VENV/bin/activate"; fi
    if [[ $1 == accelerate ]]; then set -- "${@:1:4}" "$SLURM_NODEID" "${@:6}"; fi
    exec "$@"' launch "${LAUNCH[@]}" train.py "$@" &
step=$!
step_status=0
wait "$step" || step_status=$?
trap '' USR1
# If the signal has interrupted this wait, stop_step has set the status.
if ((step_ended == 0)); then status=$step_status; fi

# Find out whether the time limit has stopped the run.
interrupted=0
case $status in
    # SIGTERM. Without our warning, it came from scancel or from a preemption.
    143) interrupted=$warned ;;
    # SIGUSR1, SIGUSR2 or SIGXCPU: Slurm has sent its warning to the step itself.
    138 | 140 | 152) interrupted=1 ;;
    *) if [[ -f $URSA_MINOR_STOPPED_FILE ]]; then interrupted=$warned; fi ;;
esac
rm -f "$URSA_MINOR_STOPPED_FILE"
if ((interrupted)); then
    if [[ ${REQUEUE:-1} == 1 ]]; then
        # In a job array, the number of the job would queue all tasks again.
        task=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}
        scontrol requeue "${task:-$SLURM_JOB_ID}"
    else
        echo "The job is not queued again, because REQUEUE=$REQUEUE."
    fi
    exit 0
fi
# Slurm would not queue a preempted job again if its script ended first. Wait until Slurm ends it.
if ((status != 0)) && scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then
    sleep 900
fi
exit "$status"
