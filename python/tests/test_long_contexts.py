"""Long prompts on real models: chunked prefill, decode packages and chains against mlx-lm alone in float32.

The reference tokens are mlx-lm's own (``golden/long_reference.json``, made by ``make_long_reference.py``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kvbaton
import mlx.core as mx
import numpy as np
import pytest
from conftest import ROOT
from kvbaton._export import export
from kvbaton.mlx import make_caches
from make_long_reference import OUT, long_ids

REFERENCE = json.loads(OUT.read_text())
NEAR_TIE = 0.02
"""Difference of two logits below which float16 may choose the other: SmolLM2's are off by 0.005 here."""
GEMMA_NEAR_TIE = 0.1
FLOAT16_NEAR_TIE = 0.1
"""The same for a decode program, which computes every step in float16."""

Packages = Callable[[str], Path]


@pytest.fixture(scope="session")
def packages(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """SmolLM2's packages, each exported when it is first asked for."""
    parent = tmp_path_factory.mktemp("long")
    options: dict[str, dict[str, Any]] = {
        "prefill": {"context": (2048, 8192)},
        "decode": {"kind": "decode", "context": (2048,)},
        "chain": {"context": (2048,), "split": 3},
    }

    def get(what: str) -> Path:
        out = parent / (what if what == "chain" else f"{what}.mlpackage")
        if not out.exists():
            export(model_folder, out, **options[what])
        return out

    return get


Step = Callable[[int], np.ndarray]


def mlx_step(model: Any, caches: Sequence[Any]) -> Step:
    return lambda token: np.array(model(mx.array([[token]]), cache=caches)[0, -1].astype(mx.float32))


def check_tokens(step: Step, token: int, expected: dict[str, Any], near_tie: float) -> None:
    """Goes along the reference's tokens; a choice differs from it in near ties alone, and is the runner-up."""
    for number, wanted in enumerate(expected["tokens"]):
        chosen = int(step(token).argmax())
        if chosen != wanted:
            first, second = expected["top2_logits"][number]
            assert first - second < near_tie, (number, chosen, wanted, first - second)
            assert chosen == expected["top2_ids"][number][1], (number, chosen, wanted)
        token = wanted


def check_handed_over(prefill: kvbaton.Prefill, model: Any, ids: list[int], name: str, tie: float) -> Any:
    result = prefill(ids[:-1])
    handoff = kvbaton.to_mlx(result.cache, model, tokens=ids, measure_memcpy=False)
    assert handoff.remaining_tokens == ids[-1:]
    check_tokens(mlx_step(model, handoff.prompt_cache), ids[-1], REFERENCE[name], tie)
    return result


@pytest.mark.parametrize(
    "length",
    [1000, pytest.param(4097, marks=pytest.mark.slow), pytest.param(7900, marks=pytest.mark.slow)],
)
def test_chunked_prompts_of_smollm2(packages: Packages, smollm2: tuple[Any, Any], length: int) -> None:
    model, tokenizer = smollm2
    prefill = kvbaton.Prefill(packages("prefill"))
    ids = long_ids(tokenizer, length)
    result = check_handed_over(prefill, model, ids, f"smollm2-{length}", NEAR_TIE)
    assert result.report.function == f"prefill_512_of_{2048 if length == 1000 else 8192}"


def test_the_answer_to_a_long_prompt_comes_from_every_chunk(
    packages: Packages, smollm2: tuple[Any, Any]
) -> None:
    """Without the rows of one chunk the answer is another: the check above would see it."""
    model, tokenizer = smollm2
    ids = long_ids(tokenizer, 1000)
    handoff = kvbaton.to_mlx(kvbaton.Prefill(packages("prefill"))(ids[:-1]).cache, model, tokens=ids)
    for cache in handoff.prompt_cache:
        cache.keys[..., 512:999, :] = 0
    with pytest.raises(AssertionError):
        check_tokens(mlx_step(model, handoff.prompt_cache), ids[-1], REFERENCE["smollm2-1000"], NEAR_TIE)


# --- decode packages and chains --------------------------------------------------------------------------

STEPS = 64
START = 60


@pytest.fixture(scope="module")
def alone(smollm2: tuple[Any, Any]) -> dict[str, Any]:
    """mlx-lm's own greedy tokens after the first tokens of the text, in the form of the reference."""
    model, tokenizer = smollm2
    ids = long_ids(tokenizer, START)
    caches = make_caches(model)
    if START > 1:
        mx.eval(model(mx.array([ids[:-1]]), cache=caches))
    step, token = mlx_step(model, caches), ids[-1]
    found: dict[str, Any] = {"ids": ids, "tokens": [], "top2_ids": [], "top2_logits": []}
    for _ in range(STEPS):
        logits = step(token)
        best = np.argsort(-logits, kind="stable")[:2]
        token = int(best[0])
        found["tokens"].append(token)
        found["top2_ids"].append([int(i) for i in best])
        found["top2_logits"].append([float(logits[i]) for i in best])
    return found


def test_64_tokens_of_the_decode_package_alone(packages: Packages, alone: dict[str, Any]) -> None:
    decode = kvbaton.Decode(packages("decode"))
    for token in alone["ids"][:-1]:
        decode.step(token)
    check_tokens(decode.step, alone["ids"][-1], alone, FLOAT16_NEAR_TIE)
    assert decode.tokens_seen == START - 1 + STEPS


def test_64_tokens_after_mlx_prefilled(
    packages: Packages, smollm2: tuple[Any, Any], alone: dict[str, Any]
) -> None:
    model, _ = smollm2
    decode, ids = kvbaton.Decode(packages("decode")), alone["ids"]
    caches = make_caches(model)
    mx.eval(model(mx.array([ids[:-1]]), cache=caches))
    view = kvbaton.from_mlx(caches, model, tokens=ids[:-1])
    inputs = kvbaton.to_coreml(view, decode.layout, decode.capacity)
    decode.receive(inputs.view(ids[:-1], decode.model))
    check_tokens(decode.step, ids[-1], alone, FLOAT16_NEAR_TIE)


def test_64_tokens_after_a_chain_of_three_prefilled(packages: Packages, alone: dict[str, Any]) -> None:
    decode, ids = kvbaton.Decode(packages("decode")), alone["ids"]
    chain = kvbaton.Prefill(packages("chain"))
    assert len(list(packages("chain").glob("*.mlpackage"))) == 3
    decode.receive(chain(ids[:-1]).cache)
    check_tokens(decode.step, ids[-1], alone, FLOAT16_NEAR_TIE)


def test_a_chain_of_three_prefills_a_long_prompt(packages: Packages, smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    chain = kvbaton.Prefill(packages("chain") / "chain.toml")
    check_handed_over(chain, model, long_ids(tokenizer, 1000), "smollm2-1000", NEAR_TIE)


# --- Gemma 3 ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_chunked_prompt_of_gemma3(tmp_path: Path) -> None:
    import mlx_lm

    folder = ROOT / "demo/out/gemma3"
    subprocess.run([sys.executable, ROOT / "demo/convert_gemma3.py", folder], check=True)
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    model.set_dtype(mx.float32)
    export(folder, tmp_path / "p.mlpackage", buckets=(128,), context=(4096,))
    ids = long_ids(tokenizer, 2000)
    prefill = kvbaton.Prefill(tmp_path / "p.mlpackage")
    result = check_handed_over(prefill, model, ids, "gemma3-2000", GEMMA_NEAR_TIE)
    windows = [layer for layer in result.cache.layers if layer.window]
    assert len(windows) == 15
    assert all(layer.positions == range(1999 - 512, 1999) for layer in windows)


# --- memory ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_of_a_long_prefill(packages: Packages, kvbaton_cli: Any) -> None:
    """Package, cache and logits are in memory once; everything else is a quarter of them and 64 MiB."""
    tokens = 7900
    done = kvbaton_cli(
        "bench", "prefill", packages("prefill"), "--tokens", str(tokens), "--repeats", "1", "--json"
    )
    (row,) = done.json()["rows"]
    package = sum(f.stat().st_size for f in packages("prefill").rglob("*") if f.is_file())
    cache, logits = 30 * 2 * 3 * 64 * 2 * tokens, 49152 * 4
    assert row["peak_bytes"] < 1.25 * (package + cache + logits) + (64 << 20), row
    assert sum(chunk["tokens"] for chunk in row["chunks"]) == tokens
