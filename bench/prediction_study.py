#!/usr/bin/env python3
"""How well ``kvbaton plan`` predicts: models by prompt lengths by routes, predicted against measured.

    python bench/prediction_study.py MODEL=PREFILL,DECODE … [--context 128,…] [--out FILE.json] [--markdown]

For each model, ``kvbaton calibrate`` measures lengths that are not asked about later; then every cell (model,
prompt length, route) is predicted by ``plan`` and measured by ``bench run``, three runs of it. A cell whose own
runs spread by more than ``--spread`` is measured again, at most twice, and listed apart if it still does.
Results are kept after every cell: a second call goes on where the first stopped. MODEL is a folder, or
``random:NAME`` for random weights of a built-in shape, which are made next to the results; PREFILL and DECODE are
its packages. Without DECODE, routes that decode with Core ML are unavailable.

The load of the machine before each cell is kept beside it: figures of a busy machine are no figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CALIBRATED = "48,192,384,768,1536"
CONTEXTS = "128,256,512,1024,2048"
ROUTES = ("coreml-mlx", "mlx", "coreml", "mlx-coreml")
GOOD = 0.25
"""Error of a prediction that is still good."""

Json = dict[str, Any]


def kvbaton(*arguments: object) -> Json:
    """Runs the command line and reads its document."""
    command = [sys.executable, "-m", "kvbaton", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    document: Json = json.loads(done.stdout or "{}")
    if done.returncode:
        raise RuntimeError(document.get("error", {}).get("message") or done.stderr)
    return document


class Study:
    """The results so far, in a file."""

    def __init__(self, file: Path, dtype: str, spread: float) -> None:
        self.file, self.dtype, self.spread = file, dtype, spread
        self.cells: dict[str, Json] = {}
        if file.exists():
            self.cells = json.loads(file.read_text())["cells"]

    def keep(self) -> None:
        """Writes the results, aside and renamed."""
        aside = self.file.with_suffix(".part")
        aside.write_text(json.dumps({"dtype": self.dtype, "cells": self.cells}, indent=1))
        aside.replace(self.file)

    def machine(self, name: str, model: Path, packages: list[str], lengths: str) -> Path:
        """What calibration found out with a model, once."""
        file = self.file.with_name(f"{self.file.stem}-{name}.toml")
        if not file.exists():
            common = ("--decode", model, "--dtype", self.dtype, *packages)
            kvbaton("calibrate", *common, "--lengths", lengths, "--repeats", 3, "--out", file)
        return file

    def cell(
        self, name: str, model: Path, packages: list[str], machine: Path, context: int, route: str
    ) -> None:
        """Predicts and measures one cell, unless that was done."""
        key = f"{name} {context} {route}"
        if key in self.cells and self.cells[key].get("spread", 1.0) <= self.spread:
            return
        common = ("--dtype", self.dtype, *packages)
        plan = kvbaton(
            *("plan", "--model", model, *common, "--machine", machine, "--context", context),
            *("--max-tokens", 1),
        )
        estimate = next(r for r in plan["routes"] if r["name"] == route)
        if not estimate["available"] or estimate["time_to_first_token_seconds"] is None:
            self.cells[key] = {"unavailable": estimate.get("unavailable")}
            self.keep()
            return
        for _ in range(3):
            load = os.getloadavg()[0]
            # What `run` does by default: streamed, into memory that the process has not used.
            run = kvbaton(
                *("bench", "run", "--decode", model, *common, "--route", route, "--context", context),
                *("--mode", "streamed-cold", "--max-tokens", 1, "--repeats", 3),
            )
            (row,) = run["rows"]
            timing = row["time_to_first_token_seconds"]
            spread = timing["max"] / timing["min"] - 1
            predicted = estimate["time_to_first_token_seconds"]
            self.cells[key] = {
                "model": name,
                "context": context,
                "route": route,
                "predicted_seconds": predicted,
                "measured_seconds": timing["median"],
                "error": predicted / timing["median"] - 1,
                "spread": spread,
                "load_before": load,
                "basis": estimate["basis"],
                "pick": plan["pick"] == route,
            }
            self.keep()
            if spread <= self.spread:
                break


def random_model(name: str, parent: Path) -> Path:
    """A folder with random float16 weights of Qwen3-0.6B's shape."""
    if name != "qwen3-0.6b":
        raise SystemExit(f"no random weights for `{name}`: qwen3-0.6b is the one")
    folder = parent / "random-qwen3-0.6b"
    if (folder / "model.safetensors").exists():
        return folder
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.qwen3 import Model, ModelArgs

    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }
    mx.random.seed(0)
    arguments = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}
    model = Model(ModelArgs(**arguments))
    model.set_dtype(mx.float16)
    weights = {
        key: mx.ones_like(value) if value.ndim == 1 else mx.random.normal(value.shape, mx.float16) * 0.02
        for key, value in tree_flatten(model.parameters())
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    aside = folder / "model.part.safetensors"
    mx.save_safetensors(str(aside), weights, metadata={"format": "mlx"})
    aside.replace(folder / "model.safetensors")
    return folder


def report(study: Study, markdown: bool) -> None:
    """The table, and the share of good predictions."""
    done = [c for c in study.cells.values() if "error" in c]
    quiet = [c for c in done if c["spread"] <= study.spread]
    good = [c for c in quiet if abs(c["error"]) <= GOOD]
    bar = " | " if markdown else "  "
    head = ["model", "tokens", "route", "predicted", "measured", "error", "spread", "pick"]
    if markdown:
        print(f"| {bar.join(head)} |\n|{'---|' * len(head)}")
    else:
        print(bar.join(f"{h:>12}" for h in head))
    for cell in sorted(done, key=lambda c: (c["model"], c["context"], c["route"])):
        seconds = [f"{cell[f'{k}_seconds']:.3f} s" for k in ("predicted", "measured")]
        apart = "" if cell["spread"] <= study.spread else " (apart)"
        row = [
            cell["model"],
            str(cell["context"]),
            cell["route"],
            *seconds,
            f"{100 * cell['error']:+.0f} %",
            f"{100 * cell['spread']:.0f} %{apart}",
            "<--" if cell["pick"] else "",
        ]
        print(f"| {bar.join(row)} |" if markdown else bar.join(f"{c:>12}" for c in row))
    apart_count, missing = len(done) - len(quiet), len(study.cells) - len(done)
    if quiet:
        errors = [abs(c["error"]) for c in quiet]
        print(
            f"\n{len(good)} of {len(quiet)} cells within {100 * GOOD:.0f} % "
            f"({100 * len(good) / len(quiet):.0f} %), median error {100 * statistics.median(errors):.0f} %; "
            f"{apart_count} apart; {missing} unavailable"
        )


def main() -> None:
    """Goes on with the study and prints what there is."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL=PREFILL,DECODE")
    parser.add_argument("--context", default=CONTEXTS)
    parser.add_argument("--calibrate", default=CALIBRATED, help="lengths of the calibration")
    parser.add_argument("--routes", default=",".join(ROUTES))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--spread", type=float, default=0.15)
    parser.add_argument("--out", type=Path, default=Path("prediction.json"))
    parser.add_argument("--hours", type=float, default=24.0, help="stop after so long")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    study = Study(args.out, args.dtype, args.spread)
    until = time.monotonic() + 3600 * args.hours
    for pair in args.models:
        where, _, packages = pair.partition("=")
        prefill, _, decode = packages.partition(",")
        flags = ["--prefill", prefill, *(["--decode-package", decode] if decode else [])]
        model = random_model(where[7:], args.out.parent) if where.startswith("random:") else Path(where)
        name = where.removeprefix("random:").rstrip("/").rpartition("/")[2]
        machine = study.machine(name, model, flags, args.calibrate)
        for context in map(int, args.context.split(",")):
            for route in args.routes.split(","):
                if time.monotonic() < until:
                    study.cell(name, model, flags, machine, context, route)
    report(study, args.markdown)


if __name__ == "__main__":
    main()
