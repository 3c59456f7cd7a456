"""Rows that move while the prefill runs: the caches they leave, and what is left when the prefill fails."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvbaton
import mlx.core as mx
import numpy as np
import pytest
from conftest import Run
from export_helpers import TinyModel
from kvbaton._export import export
from kvbaton.mlx import cache_addresses, copied_bytes, make_caches
from kvbaton.testing import FakePrefill
from mlx_lm.utils import load_model

SHAPE = {"layers": 3, "kv_heads": 2, "head_dim": 16}
PROMPT = [(5 * i * i + i + 3) % 96 for i in range(60)]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Any:
    return load_model(tiny_model("llama_tied"))[0]


def arrays(caches: Sequence[Any], rows: int) -> list[np.ndarray]:
    return [np.array(a[:, :, :rows].astype(mx.float32)) for c in caches for a in (c.keys, c.values)]


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("chunk", [0, 1, 7, 20, 64])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_streamed_caches_are_those_of_a_whole_prefill(
    model: Any, chunk: int, by_layer: bool, dtype: Any
) -> None:
    whole = FakePrefill(**SHAPE, lengths=(64,))
    result = whole(PROMPT[:-1])
    plain = kvbaton.to_mlx(result.cache, model, PROMPT, dtype)
    engine = FakePrefill(**SHAPE, lengths=(64,), chunk_tokens=chunk, by_layer=by_layer)
    streamed = kvbaton.prefill_to_mlx(engine, PROMPT, model, dtype)
    rows = len(PROMPT) - 1
    assert streamed.remaining_tokens == plain.remaining_tokens == PROMPT[-1:]
    assert [c.offset for c in streamed.prompt_cache] == [rows] * 3
    for got, want in zip(arrays(streamed.prompt_cache, rows), arrays(plain.prompt_cache, rows), strict=True):
        assert np.array_equal(got, want)
    for cache in streamed.prompt_cache:
        assert cache.keys.dtype == dtype
        assert not np.array(cache.keys[:, :, rows:].astype(mx.float32)).any(), "free rows are zero"
    report = streamed.report
    assert report.bytes == plain.report.bytes
    pieces = -(-rows // chunk) * (3 if by_layer else 1) if chunk else 1
    assert (report.streamed or {"pieces": 1})["pieces"] == pieces
    assert report.exposed_seconds <= report.seconds or report.streamed is not None
    assert streamed.prefill is not None
    assert streamed.prefill.tokens == rows


def test_the_first_step_copies_nothing(model: Any) -> None:
    engine = FakePrefill(**SHAPE, lengths=(64,), chunk_tokens=8)
    caches = kvbaton.prefill_to_mlx(engine, PROMPT, model).prompt_cache
    before = cache_addresses(caches)
    mx.eval(model(mx.array([PROMPT[-1:]]), cache=caches))
    assert copied_bytes(before, caches) == 0


def test_a_producer_killed_anywhere_leaves_no_cache(model: Any) -> None:
    """A hundred times: the caches that were given stay empty, MLX's memory is given back, the cause is told."""
    rng = random.Random(7)
    gc.collect()
    before = mx.get_active_memory()
    for _ in range(100):
        chunk, by_layer = rng.randint(1, 20), rng.random() < 0.5
        pieces = -(-(len(PROMPT) - 1) // chunk) * (3 if by_layer else 1)
        at, panics = rng.randrange(pieces), rng.random() < 0.2
        engine = FakePrefill(
            **SHAPE,
            lengths=(64,),
            chunk_tokens=chunk,
            by_layer=by_layer,
            fails_after_pieces=at,
            panics=panics,
        )
        caches = make_caches(model)
        kind = kvbaton.errors.InternalError if panics else kvbaton.errors.ProgramError
        with pytest.raises(kind, match=f"failed after {at} pieces"):
            kvbaton.prefill_to_mlx(engine, PROMPT, model, prompt_cache=caches)
        assert all(c.keys is None and c.values is None and c.offset == 0 for c in caches)
    gc.collect()
    assert mx.get_active_memory() == before


def test_an_interrupt_is_raised_and_leaves_no_cache(model: Any) -> None:
    engine = FakePrefill(**SHAPE, lengths=(64,), chunk_tokens=1, token_seconds=0.05)
    caches = make_caches(model)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    # A shell starts background jobs with SIGINT ignored; the test is about Python's own handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            kvbaton.prefill_to_mlx(engine, PROMPT, model, prompt_cache=caches)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert all(c.keys is None for c in caches)


def test_caches_that_hold_a_past_are_refused(model: Any) -> None:
    caches = make_caches(model)
    mx.eval(model(mx.array([[1, 2]]), cache=caches))
    engine = FakePrefill(**SHAPE, lengths=(64,), chunk_tokens=8)
    with pytest.raises(kvbaton.errors.UsageError, match="seen 2 tokens"):
        kvbaton.prefill_to_mlx(engine, PROMPT, model, prompt_cache=caches)
    assert all(c.offset == 2 for c in caches)


def test_another_models_engine_is_refused_before_it_runs(model: Any) -> None:
    engine = FakePrefill(layers=3, kv_heads=2, head_dim=32, lengths=(64,), fails_at=(0,))
    with pytest.raises(kvbaton.errors.IncompatibleError, match="32"):
        kvbaton.prefill_to_mlx(engine, PROMPT, model)


def test_a_prompt_of_one_token_runs_no_prefill(model: Any) -> None:
    engine = FakePrefill(**SHAPE, lengths=(64,), fails_at=(0,))
    handoff = kvbaton.prefill_to_mlx(engine, [9], model)
    assert (handoff.remaining_tokens, handoff.prefill, handoff.report.bytes) == ([9], None, 0)
    with pytest.raises(kvbaton.errors.UsageError, match="no tokens"):
        kvbaton.prefill_to_mlx(engine, [], model)
    for wrong in (-1, 10**9):
        with pytest.raises(kvbaton.errors.UsageError, match=f"token {wrong} at position 0 is not in the"):
            kvbaton.prefill_to_mlx(engine, [wrong], model)


def test_run_answers_the_same_with_and_without_streaming(
    kvbaton_cli: Run, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = tiny_model("llama_tied")
    export(folder, tmp_path / "tiny.mlpackage", buckets=(64,))
    file = tmp_path / "ids"
    file.write_text(json.dumps(PROMPT))
    command = ("run", "--prefill", tmp_path / "tiny.mlpackage", "--decode", folder, "--prompt-tokens", file)
    more = ("--max-tokens", "8", "--dtype", "float32", "--json")
    streamed = kvbaton_cli(*command, *more).json()
    plain = kvbaton_cli(*command, *more, "--no-stream").json()
    assert streamed["tokens"] == plain["tokens"]
    assert streamed["handoff"]["touched_share"] == 1.0
    assert streamed["handoff"]["bytes"] == plain["handoff"]["bytes"]
    assert streamed["handoff"]["first_step_copied_bytes"] == 0


@pytest.mark.slow
def test_a_long_prompt_exposes_one_chunk_at_most(
    kvbaton_cli: Run, model_folder: Path, tmp_path: Path
) -> None:
    """SmolLM2, 4,096 rows in chunks of 512, into new memory, in one run."""
    package = tmp_path / "chunks.mlpackage"
    made = kvbaton_cli("export", model_folder, package, "--context", "4608", "--chunk", "512")
    assert made.code == 0, made.stderr
    document = kvbaton_cli(
        *("bench", "run", "--prefill", package, "--decode", model_folder, "--dtype", "float32"),
        *("--context", "4097", "--mode", "streamed-cold,after-cold", "--max-tokens", "8", "--repeats", "3"),
        "--json",
    ).json()
    streamed, after = document["rows"]
    assert (streamed["streamed"], after["streamed"], streamed["pieces"]) == (True, False, 8)
    exposed = streamed["exposed_seconds"]["median"]
    assert exposed <= 0.2 * after["exposed_seconds"]["median"]
    assert exposed <= streamed["longest_copy_seconds"]["max"] + 1e-3
    assert streamed["exposed_share"] <= 0.01
    assert streamed["same_tokens"]
    assert after["same_tokens"]
