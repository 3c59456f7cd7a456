#!/usr/bin/env bash
# Run a command with OpenBLAS under MLX's matrix products, where openblas.sh has fetched it; else as it is.
set -euo pipefail
library=${XDG_CACHE_HOME:-$HOME/.cache}/kvbaton/openblas/libopenblas.so.0
if [ -e "$library" ]; then
    export LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}
    export LD_LIBRARY_PATH=${library%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
exec "$@"
