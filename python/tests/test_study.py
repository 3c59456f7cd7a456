"""The study's own machinery: what its shortcuts must leave as it is."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cache_models
import cells
import kvbaton
import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from batches import Recorded, forced_logits, greedy, references
from bfloat16 import wide_attention, widen
from kvbaton import _native
from kvbaton._export import export
from kvbaton._verify.ladder import prefill_mlx
from mlx import nn
from texts import passages
from token_agreement import RESULTS

Models = Callable[[str], Any]


def half_models(family: str, seed: int = 7) -> tuple[Any, Any]:
    """A bfloat16 model with MLX's own products, and the same with wide ones."""
    plain, wide = (cache_models.build(family, mx.bfloat16, seed) for _ in range(2))
    widen(wide)
    return plain, wide


def logits(model: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    with wide_attention():
        return np.array(model(mx.array([tokens])).astype(mx.float32))[0]


def test_a_wide_product_is_the_product_rounded_once() -> None:
    rng = np.random.default_rng(3)
    x = mx.array(rng.standard_normal((5, 96)).astype(np.float32)).astype(mx.bfloat16)
    layer = nn.Linear(96, 40)
    layer.set_dtype(mx.bfloat16)
    exact = np.array(x.astype(mx.float32)).astype(np.float64) @ np.array(
        layer.weight.astype(mx.float32)
    ).astype(np.float64).T + np.array(layer.bias.astype(mx.float32))
    own = np.array(layer(x).astype(mx.float32))
    model = nn.Sequential(layer)
    widen(model)
    assert model.parameters()["layers"][0]["weight"].dtype == mx.bfloat16
    assert set(model.parameters()["layers"][0]) == {"weight", "bias"}
    wide = np.array(model(x).astype(mx.float32))
    # Half a unit in the last of eight bits, and what float32 sums may move across it.
    assert np.all(np.abs(wide - exact) <= np.abs(exact) * 2.0**-8 + 1e-5)
    # MLX rounds the product before it adds the bias.
    assert np.all(np.abs(own - wide) <= np.abs(exact).max() * 2.0**-7)


@pytest.mark.parametrize("family", ["llama", "llama_wide", "gemma3"])
def test_wide_bfloat16_is_as_near_to_mlx_s_own_as_that_is_to_float32(family: str) -> None:
    tokens = cache_models.prompt(40)
    plain, wide = half_models(family)
    own = np.array(plain(mx.array([tokens])).astype(mx.float32))[0]
    exact = copy.deepcopy(plain)
    exact.set_dtype(mx.float32)
    mx.eval(exact.parameters())
    truth = np.array(exact(mx.array([tokens])))[0]
    ours = logits(wide, tokens)

    def rms(difference: np.ndarray[Any, Any]) -> float:
        return float(np.sqrt(np.mean(difference.astype(np.float64) ** 2)))

    own_error, our_error = rms(own - truth), rms(ours - truth)
    assert own_error > 0
    assert our_error < 1.25 * own_error, (our_error, own_error)
    assert our_error > 0.25 * own_error, "nothing was rounded"
    assert rms(ours - own) < 1.5 * own_error


@pytest.mark.slow
def test_wide_bfloat16_of_a_real_model(model_folder: Path) -> None:
    """SmolLM2: the distributions are as near to MLX's own as its own are to float32's."""
    import mlx_lm
    from kvbaton._verify.distributions import compare

    tokens = None
    found = {}
    for name, dtype in (("exact", mx.float32), ("own", mx.bfloat16), ("wide", mx.bfloat16)):
        model, tokenizer = mlx_lm.load(str(model_folder))[:2]
        model.set_dtype(dtype)
        tokens = tokens or passages(tokenizer, 48, 2)[1]
        if name == "wide":
            widen(model)
            found[name] = logits(model, tokens)
        else:
            found[name] = np.array(model(mx.array([tokens])).astype(mx.float32))[0]

    def divergence(a: str, b: str) -> float:
        return float(np.mean([compare(x, y).kl for x, y in zip(found[a], found[b], strict=True)]))

    own, ours, between = divergence("exact", "own"), divergence("exact", "wide"), divergence("own", "wide")
    print(f"from float32: MLX's own {own:.2e} nats, wide {ours:.2e}; between them {between:.2e}")
    assert ours < 1.5 * own
    assert between < 2 * own


@pytest.mark.parametrize("numerics", ["f32", "f16-storage", "f16-accumulate"])
def test_rows_have_the_same_bits_in_a_longer_prompt(tmp_path: Path, numerics: Any) -> None:
    """Prompts of several contexts are cut from one prefill, which may take another function."""
    folder = tiny_models.build("llama_tied", tmp_path)
    export(folder, tmp_path / "tiny.mlpackage", buckets=(8, 32), context=(64,), chunk=16)
    producer = kvbaton.Prefill(tmp_path / "tiny.mlpackage", numerics=numerics)
    tokens = [(5 * i * i + i + 3) % tiny_models.VOCAB for i in range(50)]
    for longer, shorter in ((30, 7), (30, 20), (50, 30), (50, 32), (50, 40)):
        cut, own = producer(tokens[:longer]).cache.prefix(shorter), producer(tokens[:shorter]).cache
        found = json.loads(_native.verify_bytes(own._native, cut._native))
        assert found["status"] == "pass", (longer, shorter, found["note"])


def test_every_prompt_of_every_cell_is_prefilled_once() -> None:
    wanted = Counter((cell.name, p) for cell in cells.cells() for p in cell.passages)
    planned = Counter(
        (cell.name, p)
        for work in cells.prefills()
        for cell in work.cells
        for p in work.passages
        if p in cell.passages
    )
    assert planned == wanted
    assert set(wanted.values()) == {1}
    # One package and one rounding a prefill; only contexts and the decoder's type differ.
    for work in cells.prefills():
        assert len({(c.model, c.package, c.numerics) for c in work.cells}) == 1
    # Wherever a run stops, no cell has been left out for another's last prompts.
    work = list(cells.prefills())
    cheap = {c.name for c in cells.cells() if c.context <= 1024}
    seen: set[str] = set()
    for some in work:
        if set(some.passages) != {0, 8, 16, 24}:
            break
        seen |= {c.name for c in some.cells}
        assert seen <= cheap or seen >= cheap
    assert seen == {c.name for c in cells.cells()}


def test_a_cache_of_float32_is_off_by_its_rounding_alone(models: Models, tmp_path: Path) -> None:
    from nearer import distances, sentence

    model = models("llama")
    tokens = cache_models.prompt(30)
    here, none = [tmp_path / "30-0"], [tmp_path / "none"]
    exact = references(model, [tokens], 3, here, none)[0]
    source = kvbaton.from_mlx(exact.caches(), model, tokens=tokens[:-1])
    found = distances(source, exact, exact)
    assert found["own_prefill"] == 0
    # Of eight bits, half a unit at most, less in the mean.
    assert 2.0**-11 < found["handed_over"] < 2.0**-8
    assert "0.00 to 0.00 %" in sentence("llama", [found])


def test_a_result_that_is_half_written_counts_as_missing(tmp_path: Path) -> None:
    from token_agreement import read

    whole = tmp_path / "cell.json"
    whole.write_text(json.dumps({"prompts": [1, 2, 3]}))
    assert read(whole) == {"prompts": [1, 2, 3]}
    whole.write_text(whole.read_text()[:-4])
    assert read(whole) is None
    assert read(tmp_path / "none.json") is None


@pytest.mark.parametrize("decoder", ["float32", "bfloat16"])
def test_clean_hand_offs_are_within_what_is_usual(decoder: str) -> None:
    """Of the study's prompts, on an fp16 package: the thresholds fail very few, whatever the decoder's type."""
    from render import failed_rungs

    base = [cell for cell in cells.cells() if cell.name.endswith(f"-fp16-f16-storage-{decoder}")]
    found = [json.loads((RESULTS / f"{cell.name}.json").read_text()) for cell in base]
    prompts = [failed_rungs(p, decoder) for result in found for p in result["prompts"]]
    assert len(prompts) == 2 * (4 * 32 + 8 + 2 * 4)
    assert sum(bool(rungs) for rungs in prompts) < 0.02 * len(prompts)
    # They are no open door: a package of int8 weights fails the values of every prompt of a float32 decoder.
    coarse = [cell for cell in cells.cells() if "-int8-" in cell.name]
    assert all(
        "values" in failed_rungs(p, cell.decoder)
        for cell in coarse
        for p in json.loads((RESULTS / f"{cell.name}.json").read_text())["prompts"]
    )


class Words:
    """A tokenizer whose tokens are words."""

    bos_token_id = None

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def test_a_shorter_passage_begins_a_longer_one() -> None:
    short, long = passages(Words(), 96, 8), passages(Words(), 4000, 8)
    assert [p[:96] for p in long] == short
    assert {len(p) for p in long} == {4000}
    assert len({tuple(p) for p in short}) == 8


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_reference_goes_on_from_a_shorter_one(models: Models, tmp_path: Path, family: str) -> None:
    """It is kept, found again, and the same as one that started from nothing, but for rounding."""
    model = models(family)
    prompts = [[(7 * i + n) % cache_models.VOCAB for i in range(40)] for n in range(3)]
    short = [tmp_path / f"16-{n}" for n in range(3)]
    references(model, [p[:16] for p in prompts], 6, short, [tmp_path / "none"] * 3)
    long, scratch = ([tmp_path / f"{name}-{n}" for n in range(3)] for name in ("40", "scratch"))
    went_on = references(model, prompts, 6, long, short)
    anew = references(model, prompts, 6, scratch, [tmp_path / "none"] * 3)
    for n, (a, b) in enumerate(zip(went_on, anew, strict=True)):
        assert a.continuation == b.continuation
        assert a.logits.shape == (6, cache_models.VOCAB)
        np.testing.assert_allclose(a.logits, b.logits, atol=2e-5)
        # What it was fed is what it says.
        assert [int(i) for i in np.argmax(a.logits, axis=-1)] == a.continuation
        limits = json.dumps(kvbaton.Thresholds().__dict__)
        views = [r.view(model, prompts[n][:-1]) for r in (a, b)]
        rung = json.loads(_native.verify_values(views[0]._native, views[1]._native, limits, "float32"))
        assert rung["max_row_error"] < 1e-5
    again = Recorded.open(long[0])
    assert again is not None
    assert again.continuation == went_on[0].continuation


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_side_by_side_is_as_one_by_one(models: Models, family: str) -> None:
    model = models(family)
    prompts = [[(7 * i + n) % cache_models.VOCAB for i in range(20)] for n in range(3)]
    caches = [prefill_mlx(model, p[:-1]) for p in prompts]
    said = greedy(model, caches, [p[-1] for p in prompts], 5)
    fed = [[p[-1], *s[:-1]] for p, s in zip(prompts, said, strict=True)]
    together = forced_logits(model, caches, fed)
    for n, tokens in enumerate(prompts):
        alone = prefill_mlx(model, tokens[:-1])
        for step, token in enumerate(fed[n]):
            row = np.array(model(mx.array([[token]]), cache=alone)[0, -1])
            np.testing.assert_allclose(together[n, step], row, atol=2e-5)
            assert int(row.argmax()) == said[n][step]
