#!/usr/bin/env bash
# Export the packages that the study's cells name into study/out (or the folder given). What is there stays.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-study/out}
mkdir -p "$out"

export_one() { # model folder, name, more flags
    local package=$out/$2.mlpackage
    if [ ! -e "$package" ]; then
        .venv/bin/kvbaton export "$1" "$package" --buckets 128,256,512,1024 --context 2048,4096,8192 "${@:3}" >/dev/null
        echo "$package"
    fi
}

for model in demo/out/model:smollm2-135m demo/out/gemma3:gemma3-270m; do
    folder=${model%%:*} name=${model##*:}
    if [ ! -e "$folder/config.json" ]; then
        echo "skipped $name: $folder is missing (demo/convert_gemma3.py makes it)" >&2
        continue
    fi
    export_one "$folder" "$name-fp16"
    for precision in int8 int4-block32; do
        export_one "$folder" "$name-$precision" --quantize "$precision"
    done
done
