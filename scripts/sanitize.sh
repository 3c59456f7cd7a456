#!/usr/bin/env bash
# Run the tests of the crates that use `unsafe` under AddressSanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target/sanitize}
exec cargo test --target x86_64-unknown-linux-gnu --lib --tests \
    -p kvbaton-memory -p kvbaton-kernels -p kvbaton-copy "$@"
