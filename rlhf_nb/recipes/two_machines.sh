#!/bin/bash
# PPO on two machines of eight GPUs, started by hand. On each of them, within a few minutes:
#   FIRST=10.0.0.1 bash two_machines.sh 0      (on the first; FIRST is its address, and both reach it)
#   FIRST=10.0.0.1 bash two_machines.sh 1      (on the second)
# Both have the same versions, models and data, and output_dir is on a disk that both share. After a failure, add
# --resume. If they do not find each other, open the port, and name the network card in NCCL_SOCKET_IFNAME and
# GLOO_SOCKET_IFNAME.
NUMBER=${1:?which machine, 0 or 1} FIRST=${FIRST:?the address of the first machine}
RECIPES=$(python -c 'from rlhf_nb.cli import RECIPES; print(RECIPES)')
RUN="ppo --config tldr_pythia_1b.yaml --output_dir runs/ppo --ddp_timeout 900"

if [ "${2:-accelerate}" = torchrun ]; then  # bash two_machines.sh 0 torchrun: DDP
    torchrun --nnodes 2 --nproc_per_node 8 --node_rank "$NUMBER" --master_addr "$FIRST" --master_port 29500 \
        -m rlhf_nb.cli $RUN --bf16 true
else  # ddp, fsdp2, zero2, zero3
    accelerate launch --config_file "$RECIPES/${LAYOUT:-zero3}.yaml" --num_machines 2 --num_processes 16 \
        --machine_rank "$NUMBER" --main_process_ip "$FIRST" --main_process_port 29500 -m rlhf_nb.cli $RUN
fi
