#!/bin/bash
# Runs torchrun at one node of a site. srun starts it, with these variables from the batch script:
#   SITE_NODES    the nodes of the site, as Slurm writes lists of nodes
#   SITE_NAME     distinguishes the site, and each start of it, from others at the same node
#   RDZV_CONF     options of the rendezvous: certificates, or insecure=true
set -euo pipefail
mapfile -t nodes < <(scontrol show hostnames "$SITE_NODES")

# The address of the site's peer, which is in the process of rank 0, at whichever node that is.
export AVERAGING_ADVERTISE="$SLURMD_NODENAME:${PEER_PORT:-4222}"
export AVERAGING_LISTEN="0.0.0.0:${PEER_PORT:-4222}"
if [ -n "${LISTEN_AT_NODE:-}" ]; then # several nodes share one machine
  export AVERAGING_LISTEN="$AVERAGING_ADVERTISE"
fi

exec torchrun \
  --nnodes="${#nodes[@]}" \
  --nproc-per-node="${PROCESSES_PER_NODE:-gpu}" \
  --max-restarts=10 \
  --rdzv-backend=averaging \
  --rdzv-endpoint="${nodes[0]}:${RDZV_PORT:-29400}" \
  --rdzv-id="$SITE_NAME" \
  --rdzv-conf="$RDZV_CONF" \
  --local-addr="$SLURMD_NODENAME" \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  "$@"
