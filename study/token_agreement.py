#!/usr/bin/env python3
"""The study on token agreement: what a hand-off from an fp16 prefill does to the decoder's tokens.

    python study/token_agreement.py                 run what is missing, half an hour at most, and write the page
    python study/token_agreement.py --list          what has run and what has not
    python study/token_agreement.py --only smollm2-135m-128    cells whose names start so
    python study/token_agreement.py --render        only write the page

A cell is prefilled and compared prompt by prompt; decoding runs all prompts of a batch side by side, which one
length makes possible. Results go to study/results, a file a cell, written whole. Batches of an unfinished cell
and the references are kept in --cache and found again, so that a run may stop anywhere. Run it through
scripts/with-openblas.sh: MLX's own float32 products are ten times slower on Linux.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvbaton
import numpy as np
from batches import Batch, Recorded, record
from cells import CONTINUATION, Cell, cells
from kvbaton import _native
from kvbaton._verify.distributions import Step, compare
from kvbaton._verify.rungs import Thresholds
from kvbaton.verification import write_text
from texts import passages

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "study/results"
BATCH = 8


class OutOfTimeError(Exception):
    """The part of the study that was asked for is over."""


@dataclass(frozen=True)
class Places:
    """Where models, packages and kept work are."""

    models: dict[str, Path]
    packages: Path
    cache: Path

    def package(self, cell: Cell) -> Path:
        """The package of a cell: one for all contexts."""
        return self.packages / f"{cell.model}-{cell.package}.mlpackage"


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smollm2", type=Path, default=ROOT / "demo/out/model", help="its model folder")
    parser.add_argument("--gemma3", type=Path, default=ROOT / "demo/out/gemma3", help="its model folder")
    parser.add_argument("--packages", type=Path, default=ROOT / "study/out", help="where packages are made")
    parser.add_argument("--cache", type=Path, default=ROOT / "study/out", help="where work is kept")
    parser.add_argument("--minutes", type=float, default=30.0, help="stop at the next batch after so long")
    parser.add_argument("--only", default="", help="cells whose names start so")
    parser.add_argument("--list", action="store_true", help="say what has run")
    parser.add_argument("--render", action="store_true", help="only write the page")
    arguments = parser.parse_args()
    models = {"smollm2-135m": arguments.smollm2, "gemma3-270m": arguments.gemma3}
    places = Places(models, arguments.packages, arguments.cache)
    chosen = [cell for cell in cells() if cell.name.startswith(arguments.only)]
    if not chosen:
        print(f"error: no cell's name starts with `{arguments.only}`", file=sys.stderr)
        return 2
    if arguments.list:
        for cell in chosen:
            print(f"{'done' if result(cell) else '    '}  {cell.name}")
        return 0
    if not arguments.render:
        run_all(chosen, places, time.monotonic() + 60 * arguments.minutes)
    from render import render

    found = [r for r in map(result, cells()) if r is not None]
    render(found, [cell for cell in cells() if result(cell) is None])
    return 0


def run_all(chosen: list[Cell], places: Places, until: float) -> None:
    """Runs what is missing until the time is up; cells that cannot run here are named."""
    for cell in chosen:
        if result(cell) is not None:
            continue
        try:
            run(cell, places, until)
        except OutOfTimeError:
            print("time is up; the same command goes on", file=sys.stderr)
            return
        except kvbaton.KvbatonError as error:
            print(f"{cell.name} cannot run: {error}", file=sys.stderr)


def result(cell: Cell) -> dict[str, Any] | None:
    """A cell's result; one that cannot be read counts as missing."""
    return read(RESULTS / f"{cell.name}.json")


def read(path: Path) -> dict[str, Any] | None:
    """A kept document, or ``None``; files are written whole, so what cannot be read was not written here."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


_loaded: dict[tuple[str, str], tuple[Any, Any]] = {}


def load(cell: Cell, places: Places) -> tuple[Any, Any]:
    """The decoder in the cell's type, and its tokenizer; only one is kept."""
    import mlx.core as mx
    import mlx_lm

    key = (cell.model, cell.decoder)
    if key not in _loaded:
        folder = places.models[cell.model]
        if not (folder / "config.json").is_file():
            raise kvbaton.errors.ModelError(f"`{folder}` has no model: make it with demo/convert_*.py")
        _loaded.clear()
        model, tokenizer = mlx_lm.load(str(folder))[:2]
        model.set_dtype(getattr(mx, cell.decoder))
        mx.eval(model.parameters())
        _loaded[key] = (model, tokenizer)
    return _loaded[key]


def run(cell: Cell, places: Places, until: float) -> None:
    """Runs the batches of a cell that are missing."""
    package = places.package(cell)
    if not package.is_dir():
        raise kvbaton.errors.UsageError(f"`{package}` is missing: see docs/study-token-agreement.md")
    model, tokenizer = load(cell, places)
    prompts = passages(tokenizer, cell.context - CONTINUATION, cell.prompts)
    producer = open_package(package, cell.numerics)
    rows: list[dict[str, Any]] = []
    start = time.monotonic()
    for first in range(0, len(prompts), BATCH):
        kept = places.cache / "batches" / f"{cell.name}-{first}.json"
        known = read(kept)
        if known is None:
            if time.monotonic() > until:
                raise OutOfTimeError
            batch = prompts[first : first + BATCH]
            known = {"prompts": compare_batch(cell, places, model, producer, batch, first)}
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_text(kept, json.dumps(known))
        rows += known["prompts"]
        print(f"{cell.name}: {len(rows)} of {len(prompts)} prompts", file=sys.stderr)
    document = {
        **cell.to_dict(),
        "continuation": CONTINUATION,
        "package_weights": (producer.model or {}).get("weights_digest"),
        "versions": {
            "kvbaton": kvbaton.__version__,
            "machine": platform.machine(),
            "system": platform.system(),
        },
        "seconds": time.monotonic() - start,
        "prompts": rows,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_text(RESULTS / f"{cell.name}.json", json.dumps(document, indent=1) + "\n")


def open_package(package: Path, numerics: str) -> Any:
    """A producer that rounds as the cell says."""
    if "numerics" in inspect.signature(kvbaton.Prefill.__init__).parameters:
        more: dict[str, Any] = {"numerics": numerics}
        return kvbaton.Prefill(package, **more)
    if numerics != "f16-storage":
        raise kvbaton.errors.UnavailableError(f"this kvbaton cannot round as `{numerics}`")
    return kvbaton.Prefill(package)


def compare_batch(
    cell: Cell, places: Places, model: Any, producer: Any, prompts: list[list[int]], first: int
) -> list[dict[str, Any]]:
    """One row a prompt: bytes, values, and the steps of the reference's continuation."""
    kept = places.cache / "references" / f"{cell.model}-{cell.context}-{cell.decoder}-{first}"
    reference = Recorded.open(kept) or record(model, prompts, CONTINUATION, kept)
    handed, rungs = [], []
    for number, tokens in enumerate(prompts):
        source = producer(tokens[:-1]).cache
        caches = kvbaton.to_mlx(source, model, tokens, measure_memcpy=False).prompt_cache
        arrived = kvbaton.from_mlx(caches, model, tokens=tokens[:-1])
        expected = reference.view(model, number, tokens[:-1])
        limits = json.dumps(Thresholds().__dict__)
        rungs.append(
            (
                json.loads(_native.verify_bytes(source._native, arrived._native)),
                json.loads(_native.verify_values(expected._native, arrived._native, limits, cell.decoder)),
            )
        )
        del arrived, expected
        handed.append(caches)
    batch = Batch(model, handed, [tokens[-1] for tokens in prompts])
    steps: list[list[Step]] = [[] for _ in prompts]
    for index in range(CONTINUATION):
        logits = reference.logits(index)
        for number in range(len(prompts)):
            steps[number].append(compare(logits[number], batch.logits[number]))
        if index + 1 < CONTINUATION:
            batch.step([int(np.argmax(row)) for row in logits])
    return [row(*rungs[n], steps[n]) for n in range(len(prompts))]


def row(bytes_: dict[str, Any], values: dict[str, Any], steps: list[Step]) -> dict[str, Any]:
    """What is kept of a prompt."""
    parted = next((i for i, s in enumerate(steps) if not s.agrees), None)
    return {
        "bytes": bytes_["status"],
        "elements": bytes_["elements"],
        "min_cosine": values["min_cosine"],
        "max_norm_error": values["max_norm_error"],
        "max_row_error": values["max_row_error"],
        "kl": [float(s.kl) for s in steps],
        "difference": [float(s.difference) for s in steps],
        "top5": sum(s.top5 for s in steps) / len(steps),
        "agreed": sum(s.agrees for s in steps),
        "steps": len(steps),
        "margins": [float(s.margin) for s in steps if not s.agrees],
        "first_difference": parted,
    }


if __name__ == "__main__":
    sys.exit(main())
