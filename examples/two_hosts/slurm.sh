#!/bin/bash
# Two nodes with two ranks each train examples/ddp.py: shared memory in a node, the network between them.
#
#     sbatch examples/two_hosts/slurm.sh          in the folder that has examples/
#
# Slurm writes the output to slurm-<job>.out. Rank 0 prints a line for each epoch.
#
# What was run: these commands with another script, on two emulated hosts with a stand-in for srun. What was not run:
# this file under Slurm, because the project's machines have none.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2

export GLOO_SOCKET_IFNAME=eth0 # the interface between the nodes: `ip route` lists them
export OMP_NUM_THREADS=1

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --ntasks-per-node=1 torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=2 \
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:29500" examples/ddp.py
