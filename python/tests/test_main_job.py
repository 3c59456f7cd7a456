"""The main job against mlx-lm itself: prefill by the Core ML program, hand-off, decode by mlx-lm in float32.

The reference tokens are mlx-lm's own on the same weights (``golden/smollm2_reference.json``, made by
``make_reference.py``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kvbaton
import mlx.core as mx
import numpy as np
import pytest
from kvbaton.mlx import cache_addresses, copied_bytes, make_caches
from mlx_lm.generate import generate_step

TESTS = Path(__file__).resolve().parent
REFERENCE = json.loads((TESTS / "golden/smollm2_reference.json").read_text())["prompts"]
PROMPTS = {p["name"]: p for p in map(json.loads, (TESTS / "prompts/prompts.jsonl").read_text().splitlines())}
NEAR_TIE = 0.01
MOST_DIFFERING_PROMPTS = 4


class Spy:
    """A model that remembers how many tokens each call had."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls: list[int] = []

    def __call__(self, tokens: Any, cache: Any = None, **rest: Any) -> Any:
        self.calls.append(tokens.shape[1])
        return self.model(tokens, cache=cache, **rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def hand_over(prefill: Any, model: Any, ids: list[int], **options: Any) -> tuple[list[Any], list[int]]:
    """Caches and remaining tokens, as ``kvbaton run`` makes them."""
    if len(ids) == 1:
        return make_caches(model), ids
    handoff = kvbaton.to_mlx(prefill(ids[:-1]).cache, model, tokens=ids, measure_memcpy=False, **options)
    return handoff.prompt_cache, handoff.remaining_tokens


def greedy(model: Any, caches: list[Any], remaining: list[int], count: int) -> list[int]:
    steps = generate_step(mx.array(remaining), model, max_tokens=count, prompt_cache=caches)
    return [int(step[0]) for step in steps]


def forced(model: Any, caches: list[Any], remaining: list[int], reference: list[int]) -> list[int]:
    """The greedy choice of every step along ``reference``'s own tokens."""
    chosen = []
    token = remaining
    for wanted in reference:
        logits = model(mx.array([token]), cache=caches)[0, -1]
        chosen.append(int(mx.argmax(logits)))
        token = [wanted]
    return chosen


def test_all_prompt_lengths_are_there() -> None:
    lengths = {p["token_count"] for p in PROMPTS.values()}
    assert {1, 2, 17, 127, 128, 129, 255, 256, 257, 400, 511, 512, 513} <= lengths
    assert len(PROMPTS) == len(REFERENCE) == 24


def test_tokens_equal_mlx_alone(prefill: Any, smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    spy = Spy(model)
    differing = []
    for expected in REFERENCE:
        ids = list(tokenizer.encode(PROMPTS[expected["name"]]["prompt"]))
        assert len(ids) == expected["prompt_tokens"]
        caches, remaining = hand_over(prefill, model, ids)
        assert len(remaining) == 1
        reference = expected["tokens"]
        chosen = greedy(spy, caches, remaining, len(reference))
        if chosen != reference:
            differing.append(expected["name"])
            caches, remaining = hand_over(prefill, model, ids)
            along = forced(model, caches, remaining, reference)
            for step, (got, wanted) in enumerate(zip(along, reference, strict=True)):
                if got == wanted:
                    continue
                first, second = expected["top2_logits"][step]
                assert got == expected["top2_ids"][step][1], (expected["name"], step, got, wanted)
                assert first - second < NEAR_TIE, (expected["name"], step, first, second)
    assert len(differing) <= MOST_DIFFERING_PROMPTS, differing
    assert set(spy.calls) == {1}, "the decoder's model saw more than one token a call"


def test_the_answer_comes_from_the_handed_over_cache(prefill: Any, smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    ids = list(tokenizer.encode(PROMPTS["gettysburg"]["prompt"]))
    caches, remaining = hand_over(prefill, model, ids)
    honest = greedy(model, caches, remaining, 16)
    caches, remaining = hand_over(prefill, model, ids)
    caches[7].keys = mx.zeros_like(caches[7].keys)
    assert greedy(model, caches, remaining, 16) != honest


def test_every_layer_is_close_to_mlx(prefill: Any, smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    ids = list(tokenizer.encode(PROMPTS["alice-long"]["prompt"]))[:400]
    caches = make_caches(model)
    model(mx.array([ids]), cache=caches)
    mx.eval([c.state for c in caches])
    view = prefill(ids).cache
    whole: list[tuple[np.ndarray, np.ndarray]] = []
    for layer, cache in zip(view.layers, caches, strict=True):
        for part, reference in (("key", cache.keys), ("value", cache.values)):
            ours = layer.arrays[part].astype(np.float32).ravel()
            theirs = np.array(reference[0, :, : len(ids)]).ravel()
            assert cosine(ours, theirs) >= 0.9999, (layer, part)
            whole.append((ours, theirs))
    for start in (0, 1):
        ours, theirs = (np.concatenate([pair[i] for pair in whole[start::2]]) for i in (0, 1))
        assert cosine(ours, theirs) >= 0.99997


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_logits_are_those_after_the_last_token(prefill: Any, smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    for name in ("gettysburg", "france"):
        ids = list(tokenizer.encode(PROMPTS[name]["prompt"]))[:128]
        theirs = np.array(model(mx.array([ids]))[0, -1])
        assert cosine(prefill(ids).logits, theirs) >= 0.99999


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_caches_have_the_decoders_type(prefill: Any, smollm2: tuple[Any, Any], dtype: str) -> None:
    model, _ = smollm2
    handoff = kvbaton.to_mlx(prefill([5, 6, 7, 8]).cache, model, dtype=dtype)
    assert all(str(c.keys.dtype) == f"mlx.core.{dtype}" for c in handoff.prompt_cache)
    assert handoff.report.path == ("fill" if dtype == "float16" else "convert")
    live = sum(c.keys[..., :3, :].nbytes + c.values[..., :3, :].nbytes for c in handoff.prompt_cache)
    assert handoff.report.bytes == live
    assert handoff.report.memcpy_ratio is not None


def test_rows_are_bit_identical(prefill: Any, smollm2: tuple[Any, Any]) -> None:
    model, _ = smollm2
    ids = list(range(100, 171))
    cache = prefill(ids).cache
    handoff = kvbaton.to_mlx(cache, model, dtype="float16")
    for layer, target in zip(cache.layers, handoff.prompt_cache, strict=True):
        assert target.offset == len(ids) - 1
        for part, array in (("key", target.keys), ("value", target.values)):
            ours = np.array(array[0, :, : target.offset])
            assert np.array_equal(ours.view(np.uint16), layer.arrays[part][:, :-1].view(np.uint16))


def first_step_copies(model: Any, caches: list[Any], remaining: list[int]) -> int:
    before = cache_addresses(caches)
    mx.eval(model(mx.array([remaining]), cache=caches), [c.state for c in caches])
    return copied_bytes(before, caches)


def test_the_first_step_writes_in_place(prefill: Any, smollm2: tuple[Any, Any]) -> None:
    model, _ = smollm2
    caches, remaining = hand_over(prefill, model, list(range(10, 266)))
    assert first_step_copies(model, caches, remaining) == 0


def test_without_spare_rows_the_first_step_copies(prefill: Any, smollm2: tuple[Any, Any]) -> None:
    model, _ = smollm2
    caches, remaining = hand_over(prefill, model, list(range(10, 266)), spare_rows=0)
    whole = sum(c.keys.nbytes + c.values.nbytes for c in caches)
    assert first_step_copies(model, caches, remaining) == whole


def test_a_kept_slice_makes_the_first_step_copy(prefill: Any, smollm2: tuple[Any, Any]) -> None:
    model, _ = smollm2
    caches, remaining = hand_over(prefill, model, list(range(10, 266)))
    kept = caches[3].keys[..., :2, :]
    mx.eval(kept)
    assert first_step_copies(model, caches, remaining) == caches[3].keys.nbytes
    assert kept.shape[2] == 2


def test_the_last_row_goes_unless_a_token_is_to_come(prefill: Any, smollm2: tuple[Any, Any]) -> None:
    model, _ = smollm2
    cache = prefill([5, 6, 7]).cache
    assert [c.offset for c in kvbaton.to_mlx(cache, model).prompt_cache] == [2] * 30
    assert kvbaton.to_mlx(cache, model).remaining_tokens == [7]
    handoff = kvbaton.to_mlx(cache, model, tokens=[5, 6, 7, 8])
    assert [c.offset for c in handoff.prompt_cache] == [3] * 30
    assert handoff.remaining_tokens == [8]


@pytest.mark.parametrize("tokens", [[5, 6], [5, 6, 7, 8, 9], [5, 9, 7], []])
def test_tokens_that_are_not_the_caches_are_refused(
    prefill: Any, smollm2: tuple[Any, Any], tokens: list[int]
) -> None:
    cache = prefill([5, 6, 7]).cache
    with pytest.raises(kvbaton.errors.UsageError):
        kvbaton.to_mlx(cache, smollm2[0], tokens=tokens)


def test_the_command_line_says_what_mlx_says_alone(
    kvbaton_cli: Any, package: Path, model_folder: Path, smollm2: tuple[Any, Any], tmp_path: Path
) -> None:
    """The reference tokens of a prompt whose margins are wide, through ``kvbaton run``."""
    expected = next(p for p in REFERENCE if p["name"] == "france")
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPTS["france"]["prompt"])
    flags = ("--ignore-chat-template", "--dtype", "float32", "--max-tokens", "12", "--json")
    where = ("--prefill", package, "--decode", model_folder, "--prompt-file", prompt)
    report = kvbaton_cli("run", *where, *flags).json()
    tokens = report["tokens"]
    assert len(tokens) >= 3
    for step, (got, wanted) in enumerate(zip(tokens, expected["tokens"], strict=False)):
        first, second = expected["top2_logits"][step]
        if got != wanted:
            assert first - second < NEAR_TIE, (step, got, wanted)
            break
    assert report["handoff"]["first_step_copied_bytes"] == 0


@pytest.mark.slow
def test_the_reference_is_what_mlx_answers_today(smollm2: tuple[Any, Any]) -> None:
    from make_reference import answer

    model, tokenizer = smollm2
    for expected in REFERENCE:
        fresh = answer(model, list(tokenizer.encode(PROMPTS[expected["name"]]["prompt"])))
        for step, (got, wanted) in enumerate(zip(fresh["tokens"], expected["tokens"], strict=True)):
            if got != wanted:
                first, second = expected["top2_logits"][step]
                assert first - second < NEAR_TIE, (expected["name"], step)
                break
