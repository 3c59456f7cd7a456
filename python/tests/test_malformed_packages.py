"""Packages that somebody spoilt, on the command line: one line that names the place, exit code 2, no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Run

SOUND = ROOT / "crates/kvbaton/testdata/prefill.mlpackage"
MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


def cut(path: str, keep: float) -> Callable[[Path], None]:
    def spoil(package: Path) -> None:
        file = package / path
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])

    return spoil


def overwrite(path: str, at: int, data: bytes) -> Callable[[Path], None]:
    def spoil(package: Path) -> None:
        content = bytearray((package / path).read_bytes())
        content[at : at + len(data)] = data
        (package / path).write_bytes(content)

    return spoil


def without(path: str) -> Callable[[Path], None]:
    return lambda package: (package / path).unlink()


def manifest(text: str) -> Callable[[Path], None]:
    def spoil(package: Path) -> None:
        (package / "Manifest.json").write_text(text)

    return spoil


def of_another_version(package: Path) -> None:
    file = package / "Manifest.json"
    file.write_text(file.read_text().replace("1.0.0", "9.0.0"))


def climbing(package: Path) -> None:
    manifest = json.loads((package / "Manifest.json").read_text())
    for entry in manifest["itemInfoEntries"].values():
        entry["path"] = "../../" + entry["path"]
    (package / "Manifest.json").write_text(json.dumps(manifest))


def renamed(package: Path) -> None:
    file = package / MODEL
    file.write_bytes(file.read_bytes().replace(b"weights/weight.bin", b"weights/other0.bin"))


# A blob's metadata follows the header of 64 bytes: sentinel, type, size, offset of the data.
SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "no manifest": (without("Manifest.json"), "Manifest.json"),
    "manifest is no JSON": (manifest("{"), "Manifest.json"),
    "manifest without items": (manifest('{"fileFormatVersion": "1.0.0"}'), "Manifest.json"),
    "manifest of another version": (of_another_version, "9.0.0"),
    "manifest that climbs out": (climbing, "../.."),
    "no model": (without(MODEL), "model.mlmodel"),
    "an empty model": (cut(MODEL, 0), "model.mlmodel"),
    "a model cut in half": (cut(MODEL, 0.5), "model.mlmodel"),
    "a model of another kind": (overwrite(MODEL, 0, b"\xff" * 64), "model.mlmodel"),
    "no weights": (without(WEIGHTS), "weight.bin"),
    "empty weights": (cut(WEIGHTS, 0), "weight.bin"),
    "weights cut in half": (cut(WEIGHTS, 0.5), "weight.bin"),
    "weights of another version": (overwrite(WEIGHTS, 4, b"\x09"), "weight.bin"),
    "a wrong sentinel": (overwrite(WEIGHTS, 64, b"\0\0\0\0"), "weight.bin"),
    "another element type": (overwrite(WEIGHTS, 68, b"\x0e"), "weight.bin"),
    "a size beyond the file": (overwrite(WEIGHTS, 72, b"\xff" * 6), "weight.bin"),
    "an offset beyond the file": (overwrite(WEIGHTS, 80, b"\xff" * 6), "weight.bin"),
    "weights under another name": (renamed, "other0.bin"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_package_is_refused_in_one_line(kind: str, kvbaton_cli: Run, tmp_path: Path) -> None:
    spoil, place = SPOILT[kind]
    package = tmp_path / "m.mlpackage"
    shutil.copytree(SOUND, package)
    spoil(package)
    for command in (
        ("inspect", package),
        ("run", "--prefill", package, "--decode", tmp_path, "--prompt", "a"),
        ("bench", "prefill", package, "--tokens", "4"),
    ):
        done = kvbaton_cli(*command)
        where = f"{command[0]}: {done.stderr}"
        assert done.code == 2, where
        assert done.stdout == "", where
        assert "Traceback" not in done.stderr, where
        assert "panicked" not in done.stderr, where
        errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        assert len(errors) == 1, where
        assert place in errors[0], where


def test_the_sound_package_opens(kvbaton_cli: Run) -> None:
    assert kvbaton_cli("inspect", SOUND).code == 0
