"""Chunks, decode steps and chains of every exported architecture, on tiny random models, against mlx-lm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kvbaton
import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from kvbaton._export import export
from kvbaton.errors import CapacityError, UsageError
from kvbaton.mlx import make_caches
from mlx_lm.utils import load_model

CONTEXT, CHUNK = 64, 16
PROMPT = [(7 * i * i + 3 * i + 11) % tiny_models.VOCAB for i in range(CONTEXT)]
# One row of a second chunk, a window's edge, a chunk that is not full, and the whole context.
LENGTHS = (17, 33, 50, CONTEXT)
NEAR_TIE = 0.005
"""Of the largest logit: these models' float16 logits are off by a quarter of a percent of it."""
QUANTISED_NEAR_TIE = 0.015
"""The package of a quantised folder holds its dequantised weights rounded to float16, the decoder does not."""

Made = Callable[..., Any]


class Family:
    """A model in float32 and the packages made from it, each when it is first asked for."""

    def __init__(self, name: str, parent: Path) -> None:
        self.name, self.parent = name, parent
        self.folder = tiny_models.build(name, parent)
        self.model = load_model(self.folder)[0]
        self.model.set_dtype(mx.float32)
        self.opened: dict[str, Any] = {}

    @property
    def near_tie(self) -> float:
        return QUANTISED_NEAR_TIE if self.name.endswith("4bit") else NEAR_TIE

    def package(self, what: str, **options: Any) -> Path:
        out = self.parent / (what if "split" in options else f"{what}.mlpackage")
        if not out.exists():
            export(self.folder, out, **options)
        return out

    def prefill(self, kv_outputs: Any = "stacked", buckets: Sequence[int] = (8,)) -> kvbaton.Prefill:
        what = f"prefill-{kv_outputs}-{len(buckets)}"
        options = {"buckets": buckets, "context": (32, CONTEXT), "chunk": CHUNK, "kv_outputs": kv_outputs}
        return self._open(what, kvbaton.Prefill, options)

    def decode(self) -> kvbaton.Decode:
        return self._open("decode", kvbaton.Decode, {"kind": "decode", "context": (2 * CONTEXT,)})

    def chain(self, parts: int) -> kvbaton.Prefill:
        options = {"buckets": (8,), "context": (CONTEXT,), "chunk": CHUNK, "split": parts}
        return self._open(f"chain-{parts}", kvbaton.Prefill, options)

    def _open(self, what: str, kind: Any, options: dict[str, Any]) -> Any:
        if what not in self.opened:
            self.opened[what] = kind(self.package(what, **options))
        return self.opened[what]

    def alone(self, tokens: Sequence[int]) -> tuple[list[Any], np.ndarray]:
        """mlx-lm's own caches and logits after ``tokens``."""
        caches = make_caches(self.model)
        logits = np.array(self.model(mx.array([list(tokens)]), cache=caches)[0, -1])
        return caches, logits


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Made:
    made: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in made:
            made[name] = Family(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def check_rows(view: kvbaton.CacheView, caches: Sequence[Any], seen: int) -> None:
    for index, (layer, cache) in enumerate(zip(view.layers, caches, strict=True)):
        first = max(0, seen - (layer.window or seen))
        assert layer.positions == range(first, seen), index
        for part, reference in (("key", cache.keys), ("value", cache.values)):
            rows = reference[0] if reference.shape[2] >= seen else cache._temporal_order(reference)[0]
            theirs = np.array(rows[:, : cache.offset][:, -(seen - first) :].astype(mx.float32))
            assert cosine(layer.arrays[part], theirs) >= 0.9999, (index, part)


def check_result(family: Family, prefill: kvbaton.Prefill, length: int) -> Any:
    caches, logits = family.alone(PROMPT[:length])
    result = prefill(PROMPT[:length])
    assert result.cache.tokens_seen == length
    check_rows(result.cache, caches, length)
    assert cosine(result.logits, logits) >= 0.9999
    return result


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_chunks_leave_the_cache_of_the_whole_prompt(family: Made, name: str, length: int) -> None:
    result = check_result(family(name), family(name).prefill(), length)
    assert result.report.function == f"prefill_{CHUNK}_of_{32 if length <= 32 else CONTEXT}"
    assert result.report.tokens == length


@pytest.mark.parametrize("name", ["llama_tied", "gemma3"])
@pytest.mark.parametrize("kv_outputs", ["grouped", "per-layer"])
def test_chunks_of_other_outputs(family: Made, name: str, kv_outputs: Any) -> None:
    check_result(family(name), family(name).prefill(kv_outputs), 50)


@pytest.mark.parametrize("name", ["llama_tied", "gemma3"])
def test_a_chain_begins_with_the_longest_function_that_needs_no_past(family: Made, name: str) -> None:
    prefill = family(name).prefill(buckets=(8, 24))
    for length in (24, 25, 40, 41):
        check_result(family(name), prefill, length)
    assert prefill(PROMPT[:24]).report.function == "prefill_24"


@pytest.mark.parametrize("name", ["llama_tied", "gemma3"])
def test_the_longest_prompt_is_the_context(family: Made, name: str) -> None:
    prefill = family(name).prefill()
    with pytest.raises(kvbaton.KvbatonError, match="65 tokens are to be prefilled.*largest context holds 64"):
        prefill([*PROMPT, 1])
    assert prefill(PROMPT).cache.tokens_seen == CONTEXT


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_chunked_prompts_decode_as_mlx_does(family: Made, name: str) -> None:
    made = family(name)
    caches, expected = made.alone(PROMPT[:50])
    handoff = kvbaton.to_mlx(made.prefill()(PROMPT[:50]).cache, made.model, measure_memcpy=False)
    token = handoff.remaining_tokens
    for step in range(32):
        got = np.array(made.model(mx.array([token]), cache=handoff.prompt_cache)[0, -1])
        token = [check_choice(made, got, expected, step)]
        expected = np.array(made.model(mx.array([token]), cache=caches)[0, -1])


def check_choice(family: Family, got: np.ndarray, expected: np.ndarray, step: int) -> int:
    """mlx-lm's choice, from which ours differs in near ties alone."""
    wanted, chosen = int(expected.argmax()), int(got.argmax())
    margin = (expected[wanted] - expected[chosen]) / np.abs(expected).max()
    assert chosen == wanted or margin < family.near_tie, (step, chosen, wanted, margin)
    return wanted


# --- decode steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_decode_steps_alone_are_mlx_s(family: Made, name: str) -> None:
    made, decode = family(name), family(name).decode()
    decode.clear()
    caches, token = make_caches(made.model), PROMPT[0]
    for step in range(2 * CONTEXT):
        expected = np.array(made.model(mx.array([[token]]), cache=caches)[0, -1])
        got = decode.step(token)
        assert cosine(got, expected) >= 0.9999, step
        token = check_choice(made, got, expected, step)
    assert decode.tokens_seen == 2 * CONTEXT
    check_rows(decode.cache, caches, 2 * CONTEXT)
    with pytest.raises(CapacityError, match="129 tokens do not fit .* context of 128"):
        decode.step(token)


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
@pytest.mark.parametrize("source", ["chunks", "mlx"])
def test_a_decode_package_goes_on_where_a_prefill_ends(family: Made, name: str, source: str) -> None:
    made, decode = family(name), family(name).decode()
    tokens = PROMPT[:41]
    caches, _ = made.alone(tokens[:-1])
    if source == "chunks":
        view = made.prefill()(tokens[:-1]).cache
    else:
        own, _ = made.alone(tokens[:-1])
        view = kvbaton.from_mlx(own, made.model, tokens=tokens[:-1])
        inputs = kvbaton.to_coreml(view, decode.layout, decode.capacity)
        view = inputs.view(tokens[:-1], view.model)
    report = decode.receive(view)
    assert report.rows == decode.tokens_seen == 40
    token = tokens[-1]
    for step in range(64):
        expected = np.array(made.model(mx.array([[token]]), cache=caches)[0, -1])
        token = check_choice(made, decode.step(token), expected, step)


def test_a_refused_cache_leaves_a_decoder_that_has_seen_nothing(family: Made) -> None:
    decode = family("llama_tied").decode()
    decode.step(5)
    with pytest.raises(kvbaton.KvbatonError, match="head_dim"):
        decode.receive(family("qwen3").prefill()(PROMPT[:20]).cache)
    assert decode.tokens_seen == 0


def test_a_decoder_needs_a_token(family: Made) -> None:
    with pytest.raises(UsageError, match="starts from a token"):
        next(family("llama_tied").decode().generate([], 3))
    with pytest.raises(UsageError, match="token 512 .* vocabulary of 512"):
        family("llama_tied").decode().step(512)


def test_a_kept_view_of_the_states_stays_as_it_was(family: Made) -> None:
    decode = family("gemma3").decode()
    decode.receive(family("gemma3").prefill()(PROMPT[:20]).cache)
    view = decode.cache
    before = [layer.arrays["key"].copy() for layer in view.layers]
    for token in PROMPT[:30]:
        decode.step(token)
    for layer, array in zip(view.layers, before, strict=True):
        np.testing.assert_array_equal(layer.arrays["key"], array)


# --- chains ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_a_chain_leaves_what_one_package_leaves(family: Made, name: str, parts: int) -> None:
    made = family(name)
    for length in (7, 50):
        whole = check_result(made, made.prefill(), length)
        split = check_result(made, made.chain(parts), length)
        np.testing.assert_array_equal(whole.logits, split.logits)
        for ours, theirs in zip(whole.cache.layers, split.cache.layers, strict=True):
            for part in ("key", "value"):
                np.testing.assert_array_equal(ours.arrays[part], theirs.arrays[part])


# --- what packages say of their functions ----------------------------------------------------------------


def entry(**fields: Any) -> dict[str, Any]:
    return {"name": f"prefill_{CHUNK}_of_{CONTEXT}", "kind": "prefill", "tokens": CHUNK, **fields}


@pytest.mark.parametrize(
    ("key", "value", "fragment"),
    [
        ("kvbaton.functions", "[", "`kvbaton.functions` .* cannot be used: EOF"),
        ("kvbaton.functions", "{}", "cannot be used: invalid type: map"),
        ("kvbaton.functions", "[]", "no function of .* prefills"),
        ("kvbaton.functions", [entry(name="prefill_9")], "the program has no function `prefill_9`"),
        ("kvbaton.functions", [entry(kind="encode")], "unknown variant `encode`"),
        ("kvbaton.functions", [entry(tokens=0)], "takes 0 tokens"),
        ("kvbaton.functions", [entry(tokens=-1)], "cannot be used: invalid value"),
        (
            "kvbaton.functions",
            [entry(context=CHUNK - 1)],
            f"takes {CHUNK} tokens in a context of {CHUNK - 1}",
        ),
        ("kvbaton.functions", [entry(rows=3)], "unknown field `rows`"),
        ("kvbaton.functions", [entry(tokens=1 << 60)], f"{1 << 60} tokens, and has {CHUNK} in the program"),
        (
            "kvbaton.functions",
            [entry(context=1 << 60)],
            f"a past of {1 << 60} rows, and has no input of as many",
        ),
        ("kvbaton.past", None, "metadata key `kvbaton.past` is missing"),
        ("kvbaton.past", 'name = "x"', "it has no tensors"),
    ],
)
def test_functions_that_are_not_as_declared_are_refused(
    family: Made, tmp_path: Path, key: str, value: Any, fragment: str
) -> None:
    family("llama_tied").prefill()
    package = rewritten(family("llama_tied").parent / "prefill-stacked-1.mlpackage", tmp_path, key, value)
    with pytest.raises(kvbaton.KvbatonError, match=fragment):
        kvbaton.Prefill(package)


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        ([{"name": "decode", "kind": "decode", "tokens": 2, "context": 128}], "decodes a token at a time"),
        ([{"name": "decode", "kind": "decode", "tokens": 1}], "decodes a token at a time"),
        (
            [{"name": "decode", "kind": "decode", "tokens": 1, "context": 129}],
            "a context of 129 rows, and has no state of as many",
        ),
    ],
)
def test_decode_functions_that_are_not_as_declared_are_refused(
    family: Made, tmp_path: Path, value: Any, fragment: str
) -> None:
    family("llama_tied").decode()
    package = family("llama_tied").parent / "decode.mlpackage"
    with pytest.raises(kvbaton.KvbatonError, match=fragment):
        kvbaton.Decode(rewritten(package, tmp_path, "kvbaton.functions", value))


def rewritten(package: Path, parent: Path, key: str, value: Any) -> Path:
    """A copy of a package with another value, or none, under a metadata key."""
    from coremltools.proto import Model_pb2

    copy = parent / "changed.mlpackage"
    shutil.copytree(package, copy)
    file = copy / "Data/com.apple.CoreML/model.mlmodel"
    model = Model_pb2.Model.FromString(file.read_bytes())
    metadata = model.description.metadata.userDefined
    if value is None:
        del metadata[key]
    else:
        metadata[key] = value if isinstance(value, str) else json.dumps(value)
    file.write_bytes(model.SerializeToString())
    return copy
