#!/usr/bin/env bash
# Makes every figure of docs/cost.md and docs/plan.md that streaming, long contexts, other routes and predictions have:
#   scripts/measure-cost.sh FOLDER
# Wants a quiet machine (it says the load), 14 GB of memory and an hour or more; goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?a folder for the results}
mkdir -p "$out"
bin=.venv/bin
with=scripts/with-openblas.sh
echo "load: $(cut -d' ' -f1-3 /proc/loadavg 2>/dev/null || uptime)" | tee "$out/load.txt"

once() { # FILE COMMAND…: runs it unless its output is there
    local file=$1
    shift
    [ -s "$file" ] && return
    echo "== $(basename "$file")"
    "$@" >"$file.part" && mv "$file.part" "$file"
}
package() { # FILE MODEL FLAGS…
    local file=$1
    shift
    [ -d "$file" ] || $bin/kvbaton export "$@" "$file" >/dev/null
}

package "$out/chunks.mlpackage" demo/out/model --context 4608 --chunk 512
once "$out/streaming.json" $with $bin/kvbaton bench run --prefill "$out/chunks.mlpackage" --decode demo/out/model \
    --dtype float32 --context 4097 --max-tokens 8 --repeats 3 --report "$out/streaming.html" --json
once "$out/peers.txt" $bin/python bench/handoff_peers.py --context 8192
once "$out/long.txt" $bin/python bench/long_handoff.py --svg "$out/plots"

# Three models: SmolLM2-135M, Gemma 3 270M, random weights of Qwen3-0.6B's shape.
$bin/python demo/convert_gemma3.py demo/out/gemma3
$bin/python - "$out" <<'PY'
import pathlib
import sys

sys.path.insert(0, "bench")
import prediction_study

prediction_study.random_model("qwen3-0.6b", pathlib.Path(sys.argv[1]))
PY
pairs=()
study() { # NAME FOLDER ARGUMENT
    package "$out/$1-prefill.mlpackage" "$2" --buckets 128,512 --context 2304 --chunk 256
    package "$out/$1-decode.mlpackage" "$2" --kind decode --context 2304
    pairs+=("$3=$out/$1-prefill.mlpackage,$out/$1-decode.mlpackage")
}
study smollm2 demo/out/model demo/out/model
study gemma3 demo/out/gemma3 demo/out/gemma3
study qwen3 "$out/random-qwen3-0.6b" random:qwen3-0.6b
$with $bin/python bench/prediction_study.py "${pairs[@]}" --out "$out/prediction.json" --markdown \
    | tee "$out/prediction.md"
