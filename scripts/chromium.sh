#!/usr/bin/env bash
# Install Debian's Chromium where no browser is found, for the tests that open reports in one. Needs root; without it,
# those tests say that they are skipped, and why.
set -euo pipefail

for name in chromium chromium-browser google-chrome chrome; do
    if command -v "$name" >/dev/null; then
        exit 0
    fi
done
if [ -n "${CHROMIUM:-}" ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "no Chromium, and no root with apt-get to install it" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install -y --no-install-recommends chromium >/dev/null
