#!/usr/bin/env bash
# Train the GPT of train_gpt.py on the nodes of a Slurm job: one torchrun on each, which starts its ranks.
#
#     sbatch --nodes 2 examples/slurm.sh --preset small --reduction-order tree
#
# The directory of a run must be one that all nodes see. After a fault torchrun starts all ranks again, up to
# MAX_RESTARTS times; a node that Slurm takes away ends the job, and --requeue starts it again from its checkpoint.
#SBATCH --job-name=fshard
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=1
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc_per_node "${RANKS_PER_NODE:-2}" --max-restarts "${MAX_RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:29400" \
    examples/train_gpt.py --directory "${DIRECTORY:-runs/$SLURM_JOB_NAME}" "$@"
