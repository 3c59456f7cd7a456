"""Arguments that are of no use: named in one line, typed, and before anything is touched."""

from __future__ import annotations

from typing import Any

import kvbaton
import mlx.core as mx
import numpy as np
import pytest
from kvbaton.errors import LayoutError, UsageError
from kvbaton.testing import FakePrefill

ROWS = np.random.default_rng(0).standard_normal((2, 2, 4, 64)).astype(np.float16)


def engine() -> FakePrefill:
    return FakePrefill(layers=2, kv_heads=2, head_dim=8, lengths=(8,))


def view(keys: Any = ROWS, **said: Any) -> kvbaton.CacheView:
    arrays = {"key_cache": keys, "value_cache": ROWS}
    return kvbaton.CacheView.from_arrays(
        arrays, said.pop("layout", "kvbaton-stacked"), **{"tokens_seen": 3, **said}
    )


WRONG_TOKENS = [
    ([7, -1], "tokens[1] is -1, which is not from 0 to 4294967295"),
    ([7, 2**32], "tokens[1] is 4294967296, which is not from 0 to 4294967295"),
    ([7, 2**70], f"tokens[1] is {2**70}, which is not from 0 to 4294967295"),
    ([1.5], "tokens[0] is 1.5, which is no whole number"),
    (np.array([1.0, 2.0]), "tokens[0] is np.float64(1.0), which is no whole number"),
    ([True], "tokens[0] is True, which is no whole number"),
    (["5"], "tokens[0] is '5', which is no whole number"),
    ([None], "tokens[0] is None, which is no whole number"),
    ([[1]], "tokens[0] is [1], which is no whole number"),
    ("123", "tokens are '123', which are no whole numbers"),
    (b"123", "tokens are b'123', which are no whole numbers"),
    (5, "tokens are 5, which are no whole numbers"),
]


@pytest.mark.parametrize(("tokens", "message"), WRONG_TOKENS, ids=[m for _, m in WRONG_TOKENS])
def test_ids_are_whole_numbers_of_32_bits(tokens: Any, message: str) -> None:
    runs = engine()
    for call in (runs, runs.activations, lambda wrong: view(tokens=wrong, tokens_seen=None)):
        with pytest.raises(UsageError) as caught:
            call(tokens)
        assert str(caught.value) == message
        assert caught.value.kind == "usage"
        assert "value" in caught.value.fields
    assert runs([1]).cache.tokens == [1]


@pytest.mark.parametrize(
    "tokens", [np.array([3, 1], np.uint8), mx.array([3, 1]), (t for t in (3, 1)), [mx.array(3), np.int64(1)]]
)
def test_ids_come_from_anything_that_counts(tokens: Any) -> None:
    assert engine()(tokens).cache.tokens == [3, 1]


def test_counts_may_be_numpys() -> None:
    assert view(tokens_seen=np.int64(3), live=np.uint8(2)).layers[0].positions == range(1, 3)
    layer = {"kind": "full", "kv_heads": np.int64(2), "key_dim": 64, "value_dim": np.int32(64)}
    assert view(cache=[layer, layer]).layers[1].arrays["key"].shape == (2, 3, 64)
    pages = {"kv_cache_0": np.arange(3 * 2 * 4 * 2 * 8).astype(np.float16).reshape(3, 2, 4, 2, 8)}
    paged = kvbaton.CacheView.from_arrays(
        pages,
        "vllm-nhd",
        tokens_seen=6,
        block_table=np.array([2, 0]),
        cache=[{**layer, "key_dim": 8, "value_dim": 8}],
    )
    rows = np.concatenate([pages["kv_cache_0"][2, 0], pages["kv_cache_0"][0, 0]])[:6]
    np.testing.assert_array_equal(paged.layers[0].arrays["key"], rows.swapaxes(0, 1))


@pytest.mark.parametrize("name", ["tokens_seen", "live", "pad", "ring_start", "conv_start", "sequence"])
@pytest.mark.parametrize("wrong", [-1, 2**63, 2**70, 1.5, "3", True, float("nan")])
def test_counts_of_a_view_are_named(name: str, wrong: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} is ") as caught:
        view(**{name: wrong})
    assert caught.value.fields["argument"] == name


@pytest.mark.parametrize("wrong", [1.0, 2.5, "1", None, 2**64, 2**70, True])
def test_counts_of_operations_are_named(wrong: Any) -> None:
    cache = view()
    calls = {
        "tokens": [cache.trim, cache.prefix, engine().prepare],
        "bits": [cache.quantize],
        "group_size": [lambda n: cache.quantize(8, n)],
        "limit": [lambda n: cache.scan(limit=n)],
    }
    for name, functions in calls.items():
        for function in functions:
            with pytest.raises(UsageError, match=f"^{name} is "):
                function(wrong)


def test_what_is_no_text_no_path_and_no_mapping_is_named() -> None:
    for wrong in (5, None, {"name": "x"}, b"kvbaton-stacked", "\ud800"):
        with pytest.raises(UsageError, match="^layout is "):
            view(layout=wrong)
    with pytest.raises(UsageError, match="^on_overflow is 5, which is no text"):
        view().cast("float32", 5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="^model is 5, which is no path"):
        view(model=5)
    with pytest.raises(UsageError, match="^package is 5, which is no path"):
        kvbaton.Prefill(5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="^cache is 5, which does not say what each layer keeps"):
        view(cache=5)
    with pytest.raises(UsageError, match="^dtypes are a list, not types by name"):
        view(dtypes=["float16"])
    with pytest.raises(UsageError, match="^arrays are a list, not arrays by name"):
        kvbaton.CacheView.from_arrays([], "kvbaton-stacked", tokens_seen=3)  # type: ignore[arg-type]


def test_a_mask_is_not_ignored() -> None:
    with pytest.raises(UsageError, match="array `key_cache` is masked"):
        view(np.ma.masked_array(ROWS, mask=ROWS > 0))


def test_elements_are_what_they_are_said_to_be() -> None:
    said = {"key_cache": "float16"}
    for wrong in (
        ROWS.astype(">f2"),
        np.zeros(ROWS.shape, "V2"),
        np.zeros(ROWS.shape, "S2"),
        np.zeros(ROWS.shape, [("a", "i1"), ("b", "i1")]),
        mx.array(ROWS).astype(mx.bfloat16),
    ):
        with pytest.raises(
            LayoutError, match="`key_cache`: declared float16, its elements are of the buffer format"
        ):
            view(wrong, dtypes=said)
    with pytest.raises(LayoutError, match="declared bfloat16, its elements are of the buffer format `e`"):
        view(ROWS, dtypes={"key_cache": "bfloat16"})
    for bits in (np.uint16, np.int16):
        found = view(ROWS.view(bits), dtypes=said).layers[1].arrays["key"]
        np.testing.assert_array_equal(found, ROWS[1, :, :3])


def test_an_array_without_dimensions_is_refused() -> None:
    with pytest.raises(LayoutError, match="array `key_cache`: it lends no memory with a shape"):
        view(np.array(3, np.float16))
