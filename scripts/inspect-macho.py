#!/usr/bin/env python3
"""Reads a Mach-O module and refuses it unless it is what a Mac loads as kvbaton's.

    inspect-macho.py lib_native.dylib

Checked: 64-bit arm64, a dynamic library, the oldest macOS, install names of system libraries alone, the module's
entry point among the exported symbols, and no symbol that is neither Python's nor of a library it loads by name.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

ARM64, DYLIB = 0x0100000C, 6
LC_SYMTAB, LC_LOAD_DYLIB, LC_BUILD_VERSION, LC_CODE_SIGNATURE = 0x2, 0xC, 0x32, 0x1D
NEWEST_ALLOWED = (13, 0)


def fail(message: str) -> None:
    """Ends with one line."""
    sys.exit(f"error: {sys.argv[1]}: {message}")


def version(packed: int) -> tuple[int, int]:
    """Major and minor of Apple's packed versions."""
    return packed >> 16, packed >> 8 & 0xFF


def text(data: bytes, at: int) -> str:
    """A NUL-terminated string."""
    return data[at : data.index(b"\0", at)].decode()


def main() -> None:
    """Reads the load commands."""
    data = Path(sys.argv[1]).read_bytes()
    magic, cpu, _, kind, count, _, _, _ = struct.unpack_from("<8I", data)
    if magic != 0xFEEDFACF or cpu != ARM64 or kind != DYLIB:
        fail(f"magic {magic:#x}, CPU {cpu:#x}, type {kind}: not an arm64 dynamic library")
    libraries, oldest, signed, defined, wanted, at = [], None, False, set(), set(), 32
    for _ in range(count):
        command, size = struct.unpack_from("<2I", data, at)
        if command & 0x7FFFFFFF in (LC_LOAD_DYLIB, 0x18, 0x1F):
            libraries.append(text(data, at + struct.unpack_from("<I", data, at + 8)[0]))
        elif command == LC_BUILD_VERSION:
            platform, packed = struct.unpack_from("<2I", data, at + 8)
            if platform != 1:
                fail(f"built for platform {platform}, macOS is 1")
            oldest = version(packed)
        elif command == LC_CODE_SIGNATURE:
            signed = True
        elif command == LC_SYMTAB:
            symbols, number, strings, _ = struct.unpack_from("<4I", data, at + 8)
            for index in range(number):
                name, flags, _, _, _ = struct.unpack_from("<IBBHQ", data, symbols + 16 * index)
                if flags & 0xE0 or not flags & 1:  # a debugger's, or not external
                    continue
                (defined if flags & 0x0E else wanted).add(text(data, strings + name))
        at += size
    print(f"arm64 dynamic library for macOS {oldest} or later, {len(data)} bytes, signed: {signed}")
    for name in libraries:
        print(f"  loads {name}")
    if oldest is None or oldest > NEWEST_ALLOWED:
        fail(f"needs macOS {oldest}, {NEWEST_ALLOWED} is promised")
    for name in libraries:
        if not name.startswith(("/System/Library/Frameworks/", "/usr/lib/")):
            fail(f"loads `{name}`, which is no part of macOS")
    if "/System/Library/Frameworks/CoreML.framework/Versions/A/CoreML" not in libraries:
        fail("does not load Core ML")
    if "_PyInit__native" not in defined:
        fail("does not export PyInit__native")
    if not signed:
        fail("is not signed: arm64 macOS kills it when it is loaded")
    python = {s for s in wanted if s.startswith(("_Py", "__Py"))}
    print(
        f"  {len(python)} of Python's symbols, {len(wanted - python)} of the system's, looked up when it is loaded"
    )
    if not python:
        fail("wants none of Python's symbols: it was not built as an extension module")


main()
