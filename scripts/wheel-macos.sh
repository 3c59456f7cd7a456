#!/usr/bin/env bash
# Cross-build a macOS wheel (arm64) on Linux, and check what came out.
#
# There is no Apple software here. The compiler and the standard library's sources are those of check-macos.sh; the
# linker is Zig's, from PyPI; and the frameworks are stubs that say their install names and nothing else: symbols are
# looked up when the module is loaded. `scripts/inspect-macho.py` then reads the module's load commands. Nothing of it
# has run: on a Mac, `kvbaton selftest` is what tells.
#
# usage: wheel-macos.sh [output folder, dist/ by default]
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:-dist}
python=${PYTHON:-.venv/bin/python}
export MACOSX_DEPLOYMENT_TARGET=13.0  # the first with float16 in and out of Core ML
tools=$PWD/target/wheel-macos
mkdir -p "$tools" "$out"

if [ ! -x "$tools/zig/ziglang/zig" ]; then
    "$python" -m pip download --quiet --no-deps --dest "$tools" 'ziglang>=0.17,<0.18'
    "$python" -m zipfile -e "$tools"/ziglang-*.whl "$tools/zig"
    chmod +x "$tools/zig/ziglang/zig"
fi

# One stub a framework: where it lies on a Mac.
frameworks="CoreFoundation CoreGraphics CoreML CoreVideo Foundation IOSurface ImageIO Metal"
stub() {
    printf -- '--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\ninstall-name: %s\n...\n' "'$1'" >"$2"
}
for name in $frameworks; do
    mkdir -p "$tools/sdk/$name.framework"
    stub "/System/Library/Frameworks/$name.framework/Versions/A/$name" "$tools/sdk/$name.framework/$name.tbd"
done
stub /usr/lib/libobjc.A.dylib "$tools/sdk/libobjc.tbd"
stub /usr/lib/libiconv.2.dylib "$tools/sdk/libiconv.tbd"

# By this name rustc passes a C compiler's arguments.
cat >"$tools/cc" <<END
#!/usr/bin/env bash
# rustc's arguments, less those that Zig's linker does not know.
arguments=()
skip=0
for argument in "\$@"; do
    if [ "\$skip" = 1 ]; then skip=0; continue; fi
    case "\$argument" in
    -arch | -isysroot | --target | -Wl,-exported_symbols_list) skip=1 ;;
    -mmacosx-version-min=* | --target=* | -Wl,-exported_symbols_list,*) ;;
    *) arguments+=("\$argument") ;;
    esac
done
exec "$tools/zig/ziglang/zig" cc -target aarch64-macos.13.0 -F"$tools/sdk" -L"$tools/sdk" \
    -undefined dynamic_lookup "\${arguments[@]}"
END
chmod +x "$tools/cc"
export SDKROOT=$tools/sdk  # so that rustc does not look for Xcode
export CARGO_TARGET_AARCH64_APPLE_DARWIN_LINKER=$tools/cc
# For the one dependency with a C file.
printf '#!/usr/bin/env bash\nexec "%s" ar "$@"\n' "$tools/zig/ziglang/zig" >"$tools/ar"
chmod +x "$tools/ar"
export CC_aarch64_apple_darwin=$tools/cc AR_aarch64_apple_darwin=$tools/ar

scripts/check-macos.sh build --release --package kvbaton-python --features pyo3/extension-module
module=${CARGO_TARGET_DIR:-target/macos-check}/aarch64-apple-darwin/release/lib_native.dylib
"$python" scripts/inspect-macho.py "$module"
wheel=$("$python" scripts/pack-wheel.py "$module" "$out")
# What pip on a Mac makes of its name, tags and metadata.
"$python" -m pip install --quiet --disable-pip-version-check --dry-run --platform macosx_13_0_arm64 \
    --only-binary=:all: --no-deps --target "$tools/none" "$wheel"
echo "$wheel"
