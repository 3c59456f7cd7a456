#!/usr/bin/env python3
"""Packs a cross-built module and the Python package into a wheel for arm64 macOS.

    pack-wheel.py lib_native.dylib dist/

The metadata is maturin's own; only the tag is set here.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TAG = "cp311-abi3-macosx_13_0_arm64"


def main() -> None:
    """Writes the wheel and prints its name."""
    module, out = Path(sys.argv[1]), Path(sys.argv[2])
    files: dict[str, bytes] = {}
    package = ROOT / "python/kvbaton"
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package.parent).as_posix()
        if path.is_file() and "__pycache__" not in name and not name.endswith(".so"):
            files[name] = path.read_bytes()
    files["kvbaton/_native.abi3.so"] = module.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        maturin = Path(sys.executable).parent / "maturin"
        subprocess.run(
            [maturin, "pep517", "write-dist-info", "--metadata-directory", folder],
            check=True,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        (info,) = Path(folder).glob("*.dist-info")
        for path in sorted(info.rglob("*")):
            if path.is_file() and path.name != "RECORD":
                files[f"{info.name}/{path.relative_to(info).as_posix()}"] = path.read_bytes()
        name = f"{info.name.removesuffix('.dist-info')}-{TAG}.whl"
        wheel = f"{info.name}/WHEEL"
        lines = [line for line in files[wheel].decode().splitlines() if line and not line.startswith("Tag:")]
        files[wheel] = "\n".join([*lines, f"Tag: {TAG}", ""]).encode()
        record = "".join(f"{n},sha256={digest(c)},{len(c)}\n" for n, c in files.items())
        files[f"{info.name}/RECORD"] = (record + f"{info.name}/RECORD,,\n").encode()
    out.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(out / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    print(out / name)


def digest(content: bytes) -> str:
    """As RECORD wants it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


main()
