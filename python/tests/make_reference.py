#!/usr/bin/env python3
"""Writes ``golden/smollm2_reference.json``: what mlx-lm itself answers to the shipped prompts in fp32.

    python python/tests/make_reference.py [demo/out/model]

For every prompt the greedy tokens and, for each of them, the ids and logits of the two best candidates: where
a faster path picks the runner-up, the margin tells a near tie from a mistake. End-of-text tokens do not stop
the run. Takes some ten minutes with the BLAS bundled on x86-64 Linux, and two with OpenBLAS preloaded
(``LD_PRELOAD``).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import generate_step

TESTS = Path(__file__).resolve().parent
NEW_TOKENS = 32


def in_float32(model: Any) -> None:
    """Widens every floating-point weight; the caches take the weights' dtype."""
    widened = tree_map(
        lambda w: w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w, model.parameters()
    )
    model.update(widened)


def answer(model: Any, ids: list[int]) -> dict[str, Any]:
    """Greedy tokens of mlx-lm's own loop, with the two best candidates of each step."""
    steps: list[mx.array] = []

    def record(_: mx.array, logits: mx.array) -> mx.array:
        steps.append(logits[0])
        return logits

    run = generate_step(mx.array(ids), model, max_tokens=NEW_TOKENS, logits_processors=[record])
    tokens = [int(step[0]) for step in run]
    best_ids, best_logits = [], []
    for token, step in zip(tokens, steps, strict=False):  # the loop computes one step ahead
        logits = np.array(step)
        first, second = (int(i) for i in np.argsort(-logits, kind="stable")[:2])
        if first != token:
            raise AssertionError(f"greedy token {token} is not the best candidate {first}")
        best_ids.append([first, second])
        best_logits.append([round(float(logits[i]), 4) for i in (first, second)])
    return {"tokens": tokens, "top2_ids": best_ids, "top2_logits": best_logits}


def main() -> None:
    parser = argparse.ArgumentParser(description="Regenerate the reference answers.")
    parser.add_argument("model", nargs="?", type=Path, default=TESTS.parent.parent / "demo" / "out" / "model")
    parser.add_argument("--out", type=Path, default=TESTS / "golden" / "smollm2_reference.json")
    arguments = parser.parse_args()
    model, tokenizer = mlx_lm.load(str(arguments.model))[:2]
    in_float32(model)
    lines = []
    for line in (TESTS / "prompts" / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        ids = tokenizer.encode(prompt["prompt"])
        entry = {"name": prompt["name"], "prompt_tokens": len(ids), **answer(model, ids)}
        lines.append(json.dumps(entry, separators=(",", ":")))
        print(f"{prompt['name']}: {tokenizer.decode(entry['tokens'])!r}", file=sys.stderr)
    head = {"model": "SmolLM2-135M-Instruct", "dtype": "float32", "new_tokens": NEW_TOKENS}
    text = json.dumps(head)[:-1] + ', "prompts": [\n' + ",\n".join(lines) + "\n]}\n"
    json.loads(text)
    arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
