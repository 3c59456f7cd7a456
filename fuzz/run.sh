#!/bin/sh
# Builds one fuzz target with the stable toolchain and runs it: fuzz/run.sh TARGET [libFuzzer flags]
set -eu
target=${1:?usage: fuzz/run.sh TARGET [libFuzzer flags]}
shift
cd "$(dirname "$0")"
host=$(rustc -vV | sed -n 's/^host: //p')
# The flags that cargo-fuzz passes; they are unstable, hence RUSTC_BOOTSTRAP.
coverage="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1"
RUSTC_BOOTSTRAP=1 RUSTFLAGS="$coverage -Zsanitizer=address --cfg fuzzing" \
    cargo build --release --target "$host" --bin "$target"

./seeds.sh "$target"
corpus=corpus/$target
mkdir -p "artifacts/$target"
exec "target/$host/release/$target" -artifact_prefix="artifacts/$target/" "$@" "$corpus"
