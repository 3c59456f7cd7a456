#!/usr/bin/env bash
# Type-check the workspace for macOS (aarch64-apple-darwin) on a Linux machine.
#
# rustup is not needed: this unpacks Debian's own Rust compiler together with its
# standard-library sources into a cache folder (nothing is installed system-wide), and lets cargo check the standard
# library from source for the Apple target. Nothing is linked or run: it proves that the code type-checks, no more.
#
# usage: check-macos.sh [check|clippy|build] [cargo arguments, e.g. -p my-crate --all-features -- -D warnings]
# Targets whose dependencies compile C for macOS (the benches: criterion) cannot be checked here.
# The cache folder can be moved with MACOS_CHECK_CACHE; a first run needs Debian's package registry and about 1 minute.
set -euo pipefail

cache=${MACOS_CHECK_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/check-macos}
root=$cache/root
if [ ! -x "$root/usr/bin/rustc" ]; then
    mkdir -p "$cache/debs" "$root"
    (
        cd "$cache/debs"
        apt-get update -qq
        # the compiler, its libraries and the matching standard-library sources, whatever version Debian now serves
        llvm_and_std=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
            --no-replaces --no-enhances rustc-web |
            grep -E '^(libstd-rust-web-[0-9.]+|libllvm[0-9]+)$' | sort -u)
        apt-get download -qq rustc-web rust-web-clippy libstd-rust-web-dev rust-web-src $llvm_and_std
        for deb in ./*.deb; do dpkg -x "$deb" "$root"; done
    )
fi
export LD_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export RUSTC="$root/usr/bin/rustc" RUSTC_BOOTSTRAP=1 PATH="$root/usr/bin:$PATH"  # cargo itself stays the installed one
export PYO3_NO_PYTHON=1  # the stable ABI of the extension module needs no interpreter of the target
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target/macos-check}
verb=check
case "${1:-}" in check | clippy | build) verb=$1 && shift ;; esac
# The one C file among the dependencies, which catches Objective-C's exceptions, needs a compiler for macOS: its build
# script is run to build, not to check.
without_c=()
if [ "$verb" != build ]; then
    without_c=(--config 'target.aarch64-apple-darwin.objc2_exception_helper_0_1.rustc-link-lib=[]')
fi
exec cargo "$verb" -Zbuild-std=std,panic_abort --target aarch64-apple-darwin "${without_c[@]}" "$@"
