#!/bin/sh
# Copies a target's seeds into its corpus: fuzz/seeds.sh TARGET
set -eu
target=${1:?usage: fuzz/seeds.sh TARGET}
cd "$(dirname "$0")/.."
case $target in
    mil_manifest) files=Manifest.json ;;
    mil_program) files="*.mlmodel" ;;
    mil_weights) files=weight.bin ;;
    layout_toml) files='*.toml' ;;
    chain_toml) files='*.toml' ;;
    *) echo "no target $target" >&2; exit 2 ;;
esac
case $target in
    mil_*) folders='crates/mil/testdata crates/exec/testdata crates/kvbaton/testdata python/tests/foreign fuzz/seeds/mil_program' ;;
    layout_toml) folders='crates/layout/presets' ;;
    chain_toml) folders='fuzz/seeds/chain_toml' ;;
esac
mkdir -p "fuzz/corpus/$target"
# shellcheck disable=SC2086 # several folders
find $folders -name "$files" -size -64k | while read -r seed; do
    cp "$seed" "fuzz/corpus/$target/$(sha256sum "$seed" | cut -c1-16)"
done
