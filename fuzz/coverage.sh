#!/bin/sh
# Prints the share of a parser's regions that a target's corpus reaches: fuzz/coverage.sh [TARGET…]
#
# Each target is built again with coverage counters and run once over its corpus (`fuzz/run.sh TARGET` makes one). A
# region is LLVM's: a run of code with one counter. Counted are those of the files that read what the target feeds them,
# error paths included, tests not. Needs llvm-profdata and llvm-cov, of the component llvm-tools (rustup component add
# llvm-tools) or of another LLVM from 19 on, whose folder LLVM_TOOLS names.
set -eu
cd "$(dirname "$0")"
host=$(rustc -vV | sed -n 's/^host: //p')
tools=${LLVM_TOOLS:-$(rustc --print sysroot)/lib/rustlib/$host/bin}
[ -x "$tools/llvm-cov" ] || {
    echo "no llvm-cov in $tools: rustup component add llvm-tools, or LLVM_TOOLS=FOLDER" >&2
    exit 2
}

[ $# -gt 0 ] || set -- mil_manifest mil_program mil_weights layout_toml chain_toml
out=target/coverage
mkdir -p "$out"
for target in "$@"; do
    case $target in
        mil_manifest) files='crates/mil/src/container.rs' only=Manifest ;;
        mil_program) files='crates/mil/src/(spec|program|description|lower/[a-z]+)\.rs' only= ;;
        mil_weights) files='crates/mil/src/blob.rs' only= ;;
        layout_toml) files='crates/layout/src/(rules|axes|names|encoding)\.rs' only= ;;
        chain_toml) files='crates/kvbaton/src/chain/file\.rs' only= ;;
        *) echo "no target $target" >&2; exit 2 ;;
    esac
    RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Cinstrument-coverage --cfg fuzzing" \
        cargo build --quiet --release --target "$host" --target-dir "$out" --bin "$target"
    ./seeds.sh "$target"
    binary=$out/$host/release/$target
    LLVM_PROFILE_FILE=$out/$target.profraw "$binary" -runs=0 "corpus/$target" 2>"$out/$target.log" ||
        { cat "$out/$target.log" >&2; exit 1; }
    "$tools/llvm-profdata" merge -sparse "$out/$target.profraw" -o "$out/$target.profdata"
    "$tools/llvm-cov" export "$binary" -instr-profile "$out/$target.profdata" -skip-expansions 2>/dev/null |
        python3 coverage.py "$target" "$files" "$only"
done
