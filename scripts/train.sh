#!/usr/bin/env bash
# Trains a small Llama with GTP, from nothing:
#
#   ./scripts/train.sh [NUM_RANKS] [torchtitan options]
#   ./scripts/train.sh 4 --training.steps 100 --gtp.tensor_parallel_num_weight_shards 4
#
# A second call resumes from the checkpoint of the first. NUM_RANKS: one process a GPU, or CPU processes where there is
# no GPU; default: as many as the degrees in the TOML and the options make. Environment: CONFIG, another TOML
# (default train_configs/llama3_debug.toml); NPROC, as NUM_RANKS; PYTHON, an interpreter to use without installing.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CONFIG=${CONFIG:-$ROOT/train_configs/llama3_debug.toml}
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    NPROC=$1
    shift
fi
for option in "$@"; do
    if [[ $option =~ ^--job\.config[-_]file ]]; then
        echo "train.sh: name the TOML in the environment, CONFIG=..., not with $option" >&2
        exit 1
    fi
done
if [ ! -f "$CONFIG" ]; then
    echo "train.sh: CONFIG=$CONFIG: no such file" >&2
    exit 1
fi
CONFIG=$(cd "$(dirname "$CONFIG")" && pwd)/$(basename "$CONFIG")

. "$ROOT/scripts/setup_venv.sh"

NPROC=${NPROC:-$("$PYTHON" -m titan_integration.num_ranks --job.config_file "$CONFIG" "$@")}
cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
# Folders in the TOML (./outputs/...) are relative to the repository, wherever this is called from.
cd "$ROOT"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$NPROC" \
    -m titan_integration.train --job.config_file "$CONFIG" "$@"
