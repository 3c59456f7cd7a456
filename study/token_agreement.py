#!/usr/bin/env python3
"""The study on token agreement: what a hand-off from an fp16 prefill does to the decoder's tokens.

    python study/token_agreement.py                 run what is missing, half an hour at most, and write the page
    python study/token_agreement.py --list          what has run and what has not
    python study/token_agreement.py --only smollm2-135m-128    cells whose names start so
    python study/token_agreement.py --references    only the references: a second run takes them as they come
    python study/token_agreement.py --render        only write the page

A cell is prefilled and compared prompt by prompt; decoding runs the prompts of a batch side by side, which one
length makes possible. Results go to study/results, a file a cell, written whole; a cell that lacks prompts gets
them in the next run. References are kept in --cache and found again. Run it through
scripts/with-openblas.sh: MLX's own float32 products are ten times slower on Linux.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvbaton
import numpy as np
from batches import Prompts, Recorded, forced_logits, parts, references, side_by_side
from bfloat16 import wide_attention, widen
from cells import (
    CONTEXTS,
    CONTINUATION,
    DECODERS,
    MODELS,
    PASSAGES,
    ROUNDS,
    Cell,
    Prefills,
    cells,
    prefills,
)
from kvbaton import _native
from kvbaton._verify.distributions import Step, compare
from kvbaton._verify.rungs import Thresholds
from kvbaton.verification import write_text
from nearer import distances
from texts import passages

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "study/results"

# Tokens of prompts whose references are decoded side by side, a step at a time.
REFERENCE_TOKENS = 16384

# Where the two caches of a bfloat16 decoder are compared with float32's.
NEARER_CONTEXT = 256


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

    def reference(self, model: str, decoder: str, context: int, passage: int) -> Path:
        """Where a prompt's reference is."""
        return self.cache / "references" / f"{model}-{decoder}" / f"{context}-{passage}"

    def kept(self, cell: Cell, passage: int) -> Path:
        """Where a prompt's row is, until its cell is whole."""
        return self.cache / "rows" / cell.name / f"{passage}.json"


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
    parser.add_argument("--threads", type=int, default=0, help="of the executor; all cores if 0")
    parser.add_argument("--references", action="store_true", help="only compute references")
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
            print(f"{'done' if whole(cell) else 'part' if result(cell) else '    '}  {cell.name}")
        return 0
    if not arguments.render:
        study = Study(places, time.monotonic() + 60 * arguments.minutes, arguments.threads)
        try:
            with wide_attention():
                if arguments.references:
                    study.make_references(chosen)
                else:
                    study.run(chosen)
                    study.compare_caches()
        except OutOfTimeError:
            print("time is up; the same command goes on", file=sys.stderr)
        if arguments.references:
            return 0
    from render import render

    found = [r for r in map(result, cells()) if r is not None]
    caches = {m: known for m in MODELS if (known := read(RESULTS / f"{m}-nearer.json")) is not None}
    render(found, caches, [cell for cell in cells() if result(cell) is None])
    return 0


def result(cell: Cell) -> dict[str, Any] | None:
    """A cell's result; one that cannot be read counts as missing."""
    return read(RESULTS / f"{cell.name}.json")


def read(path: Path) -> dict[str, Any] | None:
    """A kept document, or ``None``; files are written whole, so what cannot be read was not written here."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


class Study:
    """A run of what is missing, until the time is up."""

    def __init__(self, places: Places, until: float, threads: int) -> None:
        self._places = places
        self._until = until
        self._threads = threads
        self._name = ""
        self._decoders: dict[str, Any] = {}
        self._prompts: list[list[int]] = []
        self._passages: dict[str, list[list[int]]] = {}

    def make_references(self, chosen: list[Cell]) -> None:
        """The references of the cells, in the order in which :meth:`run` asks for them."""
        for work in prefills():
            for cell in (c for c in work.cells if c in chosen):
                where = [
                    self._places.reference(cell.model, cell.decoder, cell.context, p) for p in work.passages
                ]
                lacking = [p for p, w in zip(work.passages, where, strict=True) if Recorded.open(w) is None]
                for batch in parts(lacking, REFERENCE_TOKENS // cell.context):
                    self._check_time()
                    self._references(cell.model, cell.decoder, cell.context, batch)
                    said = f"{cell.model}, {cell.decoder}: references of {cell.context} tokens"
                    print(f"{said}, passages {batch}", file=sys.stderr)

    def run(self, chosen: list[Cell]) -> None:
        """The cells, in the order of :func:`prefills`; those that cannot run here are named."""
        finish(chosen, self._places)
        for work in prefills():
            try:
                for batch in parts(work.passages, side_by_side(work.longest.context)):
                    if any(self._lacking(cell, batch) for cell in work.cells if cell in chosen):
                        self._check_time()
                        self._prefill(work, batch, chosen)
            except kvbaton.KvbatonError as error:
                print(f"{work.longest.name} cannot run: {error}", file=sys.stderr)

    def compare_caches(self) -> None:
        """How far both caches of a bfloat16 decoder are from float32's, in a short context."""
        for name in MODELS:
            base = Cell(name, NEARER_CONTEXT)
            file = RESULTS / f"{name}-nearer.json"
            package = self._places.package(base)
            if read(file) is not None or not package.is_dir():
                continue
            self._check_time()
            self._load(name)
            producer = kvbaton.Prefill(package, threads=self._threads)
            some = list(ROUNDS[0])
            exact, own = (self._references(name, d, base.context, some) for d in DECODERS)
            found = []
            for at, passage in enumerate(some):
                tokens = self._prompts[passage][: base.context - CONTINUATION - 1]
                found.append(distances(producer(tokens).cache, exact[at], own[at]))
            write_text(file, json.dumps({"context": base.context, "prompts": found}, indent=1) + "\n")

    def _check_time(self) -> None:
        if time.monotonic() > self._until:
            raise OutOfTimeError

    def _lacking(self, cell: Cell, batch: list[int]) -> list[int]:
        """The passages of a batch that a cell has no row of yet."""
        have = known_rows(cell, self._places)
        return [p for p in batch if p not in have]

    def _prefill(self, work: Prefills, batch: list[int], chosen: list[Cell]) -> None:
        """Prefills a batch with one package and compares it in every cell that takes it."""
        package = self._places.package(work.longest)
        if not package.is_dir():
            raise kvbaton.errors.UsageError(f"`{package}` is missing: see docs/study-token-agreement.md")
        self._load(work.longest.model)
        numerics: Any = work.longest.numerics
        producer = kvbaton.Prefill(package, numerics=numerics, threads=self._threads)
        weights = (producer.model or {}).get("weights_digest")
        wanted = {cell: self._lacking(cell, batch) for cell in work.cells if cell in chosen}
        longest: dict[int, int] = {}
        for cell, lacking in wanted.items():
            longest.update({p: max(cell.context, longest.get(p, 0)) for p in lacking})
        caches = {
            p: producer(self._prompts[p][: context - CONTINUATION - 1]).cache
            for p, context in longest.items()
        }
        for cell, lacking in wanted.items():
            for some in parts(lacking, side_by_side(cell.context)):
                tokens = cell.context - CONTINUATION - 1
                rows = self._compare(cell, some, [caches[p].prefix(tokens) for p in some])
                for passage, found in zip(some, rows, strict=True):
                    kept = self._places.kept(cell, passage)
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    write_text(kept, json.dumps({"passage": passage, "package_weights": weights, **found}))
                print(f"{cell.name}: passages {some}", file=sys.stderr)
            finish([cell], self._places)

    def _compare(self, cell: Cell, some: list[int], sources: list[kvbaton.CacheView]) -> list[dict[str, Any]]:
        """One row a prompt: bytes, values, and the steps of the reference's continuation."""
        model = self._decoder(cell.decoder)
        expected = self._references(cell.model, cell.decoder, cell.context, some)
        prompts = [self._prompts[p][: cell.context - CONTINUATION] for p in some]
        limits = json.dumps(Thresholds().__dict__)
        handed, rungs = [], []
        for source, tokens, reference in zip(sources, prompts, expected, strict=True):
            caches = kvbaton.to_mlx(source, model, tokens, measure_memcpy=False).prompt_cache
            arrived = kvbaton.from_mlx(caches, model, tokens=tokens[:-1])
            alone = reference.view(model, tokens[:-1])
            rungs.append(
                (
                    json.loads(_native.verify_bytes(source._native, arrived._native)),
                    json.loads(_native.verify_values(alone._native, arrived._native, limits, cell.decoder)),
                )
            )
            del arrived, alone
            handed.append(caches)
        fed = [[t[-1], *r.continuation[:-1]] for t, r in zip(prompts, expected, strict=True)]
        logits = forced_logits(model, handed, fed)
        rows = []
        for at, reference in enumerate(expected):
            steps = [compare(np.asarray(r), c) for r, c in zip(reference.logits, logits[at], strict=True)]
            rows.append(row(*rungs[at], steps, reference.continuation))
        return rows

    def _references(self, model: str, decoder: str, context: int, some: list[int]) -> list[Recorded]:
        self._load(model)
        where = [self._places.reference(model, decoder, context, p) for p in some]
        before = CONTEXTS[max(0, CONTEXTS.index(context) - 1)]
        shorter = [self._places.reference(model, decoder, before, p) for p in some]
        prompts: Prompts = [self._prompts[p][: context - CONTINUATION] for p in some]
        return references(self._decoder(decoder), prompts, CONTINUATION, where, shorter)

    def _load(self, name: str) -> None:
        """Makes the model's prompts; decoders are loaded when they are needed, and those of one model kept."""
        if self._name == name:
            return
        from mlx_lm.utils import load_tokenizer

        folder = self._places.models[name]
        if not (folder / "config.json").is_file():
            raise kvbaton.errors.ModelError(f"`{folder}` has no model: make it with demo/convert_*.py")
        self._decoders.clear()
        if name not in self._passages:
            kept = self._places.cache / f"passages-{name}.json"
            known = read(kept)
            if known is None:
                known = {"passages": passages(load_tokenizer(folder), max(CONTEXTS) - CONTINUATION, PASSAGES)}
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_text(kept, json.dumps(known))
            self._passages[name] = known["passages"]
        self._prompts = self._passages[name]
        self._name = name

    def _decoder(self, dtype: str) -> Any:
        import mlx.core as mx
        import mlx_lm

        if dtype not in self._decoders:
            model = mlx_lm.load(str(self._places.models[self._name]))[0]
            model.set_dtype(getattr(mx, dtype))
            mx.eval(model.parameters())
            if dtype == "bfloat16":
                widen(model)
            self._decoders[dtype] = model
        return self._decoders[dtype]


def known_rows(cell: Cell, places: Places) -> dict[int, dict[str, Any]]:
    """A cell's rows by passage: those of its result, and those kept since."""
    found = {row["passage"]: row for row in (result(cell) or {"prompts": []})["prompts"]}
    for passage in cell.passages:
        row = None if passage in found else read(places.kept(cell, passage))
        if row is not None:
            found[passage] = row
    return dict(sorted(found.items()))


def finish(chosen: list[Cell], places: Places) -> None:
    """Writes the result of every cell that has new rows."""
    for cell in chosen:
        rows = known_rows(cell, places)
        if len(rows) == len((result(cell) or {"prompts": []})["prompts"]):
            continue
        document = {
            **cell.to_dict(),
            "continuation": CONTINUATION,
            "prompts_asked": cell.prompts,
            "versions": {
                "kvbaton": kvbaton.__version__,
                "machine": platform.machine(),
                "system": platform.system(),
            },
            "prompts": list(rows.values()),
        }
        RESULTS.mkdir(parents=True, exist_ok=True)
        write_text(RESULTS / f"{cell.name}.json", json.dumps(document, indent=1) + "\n")


def whole(cell: Cell) -> bool:
    """Whether all prompts of a cell have run."""
    found = result(cell)
    return found is not None and len(found["prompts"]) == cell.prompts


def row(
    bytes_: dict[str, Any], values: dict[str, Any], steps: list[Step], continuation: list[int]
) -> dict[str, Any]:
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
        # Steps at which the reference, fed its own continuation, would no longer say it: rounding of its own.
        "reference_parts": sum(s.token != t for s, t in zip(steps, continuation, strict=True)),
    }


if __name__ == "__main__":
    sys.exit(main())
