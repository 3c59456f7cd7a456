#!/usr/bin/env python3
"""Writes ``golden/long_reference.json``: what mlx-lm itself answers to long prompts in fp32.

    scripts/with-openblas.sh python python/tests/make_long_reference.py

The prompts are the first tokens of one long text (:func:`text`). For each of them the greedy tokens and, for
each of those, the ids and logits of the two best candidates, as in ``make_reference.py``. Takes some minutes
over OpenBLAS and hours without.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx_lm
from make_reference import NEW_TOKENS, TESTS, answer, in_float32

ROOT = TESTS.parent.parent
LENGTHS = {"smollm2": (1000, 4097, 7900), "gemma3": (2000,)}
FOLDERS = {"smollm2": ROOT / "demo/out/model", "gemma3": ROOT / "demo/out/gemma3"}
OUT = TESTS / "golden/long_reference.json"


def text() -> str:
    """The shipped prompts, the Apache licence, and the prompts again from the last to the first."""
    lines = (TESTS / "prompts/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    licence = (ROOT / "LICENSE-APACHE").read_text(encoding="utf-8")
    return "\n\n".join([*prompts, licence, *reversed(prompts)])


def long_ids(tokenizer: Any, length: int) -> list[int]:
    """The first ``length`` tokens of the text."""
    ids = list(tokenizer.encode(text()))
    if len(ids) < length:
        raise AssertionError(f"the text has {len(ids)} tokens, {length} are wanted")
    return ids[:length]


def main(names: list[str]) -> None:
    known = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name in names or list(LENGTHS):
        model, tokenizer = mlx_lm.load(str(FOLDERS[name]))[:2]
        in_float32(model)
        for length in LENGTHS[name]:
            start = time.perf_counter()
            known[f"{name}-{length}"] = answer(model, long_ids(tokenizer, length))
            print(f"{name}, {length} tokens: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    head = json.dumps({"dtype": "float32", "new_tokens": NEW_TOKENS})[:-1]
    lines = [f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in known.items() if "-" in k]
    OUT.write_text(head + ",\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
