#!/usr/bin/env bash
# Fetch Debian's OpenBLAS into the user's cache folder, for `kvbaton bench prefill --compare` and for test
# references. Preloaded, it takes over the matrix products of MLX's Linux build, which are slow otherwise.
# Nothing is installed system-wide.
#
# usage: openblas.sh [folder]     default: kvbaton/openblas in the user's cache folder
set -euo pipefail

folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/kvbaton/openblas}
if [ -e "$folder/libopenblas.so.0" ]; then
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder"
(
    cd "$work"
    # A package index of its own, so that the machine's lists stay as they are.
    mkdir -p state/lists/partial cache/archives/partial
    options=(-qq -o "Dir::State=$work/state" -o Dir::State::status=/var/lib/dpkg/status -o "Dir::Cache=$work/cache")
    [ "$(id -u)" -ne 0 ] || options+=(-o APT::Sandbox::User=root)
    apt-get "${options[@]}" update
    apt-get "${options[@]}" download libopenblas0-pthread libgfortran5
    for deb in ./*.deb; do dpkg -x "$deb" unpacked; done
)
find "$work/unpacked" \( -name 'libopenblas.so.0' -o -name 'libopenblasp*.so' -o -name 'libgfortran.so*' \) \
    -exec cp -P {} "$folder" \;
test -e "$folder/libopenblas.so.0"
echo "OpenBLAS in $folder" >&2
