#!/bin/bash
# Two nodes of eight cards, by Slurm. From the repository's root, in the environment that has accelerate:
#   sbatch scripts/slurm_2x8.sh                                                      # recipes/gpt2_124m.yaml
#   sbatch --partition NAME scripts/slurm_2x8.sh --recipe recipes/gpt2_1558m.yaml    # flags go to train.py
# The repository, runs/ and data/ must lie where both nodes see them.
# Going on by itself: a crash on either node restarts all 16 processes, up to 3 times; a preemption or a dead node puts the job
# back into the queue (--requeue); 5 minutes before the time limit the trainer saves, stops and the job queues itself again.
# Each start resumes from the newest checkpoint. `scancel` ends it for good.
# Not tried on a cluster. Tried without cards, on two network namespaces with stand-ins for sbatch, srun and scontrol: training on
# both, the restart when a trainer is killed, the time limit and the job that continues (tests/scripts/test_two_machines.py).
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

# The first node's name and a port of this job's own: two jobs may share a node's network.
HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
PORT=$((20000 + SLURM_JOB_ID % 20000))
export HOST PORT
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240 # seconds that a stopping trainer has to save; torch gives 30

# shellcheck disable=SC2329  # the trap calls it
again() {
    echo "time is nearly up: the trainer saves and stops, the job queues again"
    kill -TERM "$!"
    wait "$!" || true
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap again USR1

# One accelerate a node. c10d: the launchers meet at HOST:PORT, and when one node restarts its processes the other does too; with
# static, accelerate's default, a node restarts for its own failures only. A flag, as accelerate 1.15 does not read it from a YAML.
# shellcheck disable=SC2016  # the single quotes leave SLURM_NODEID to each node's own shell
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 bash -c '
    exec accelerate launch --config_file accelerate_configs/multi_node_2x8.yaml \
        --machine_rank "$SLURM_NODEID" --main_process_ip "$HOST" --main_process_port "$PORT" \
        --rdzv_backend c10d --max_restarts 3 train.py "$@"' launch "$@" &
status=0
wait "$!" || status=$?
# A preempted job whose script ends by itself would count as done: wait until Slurm takes it away and queues it again.
if scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then sleep 900; fi
exit "$status"
