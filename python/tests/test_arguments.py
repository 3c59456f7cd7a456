"""Arguments that are of no use: named in one line, typed, and before anything is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvbaton
import kvbaton.mlx
import mlx.core as mx
import numpy as np
import pytest
from cache_models import prompt
from kvbaton.errors import CapacityError, LayoutError, UsageError
from kvbaton.mlx import make_caches
from kvbaton.testing import FakePrefill

Models = Callable[[str], Any]

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


@pytest.mark.parametrize(
    "name", ["capacity", "pad", "ring_start", "conv_start", "block_rows", "row_stride_bytes"]
)
@pytest.mark.parametrize("wrong", [-1, 2**63, 1.5, "3", True])
def test_sizes_of_core_mls_tensors_are_named(name: str, wrong: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} is "):
        kvbaton.to_coreml(view(), "vllm-nhd", **{name: wrong})


def test_what_no_memory_holds_is_a_matter_of_capacity() -> None:
    with pytest.raises(CapacityError, match="cannot be had"):
        kvbaton.to_coreml(view(), capacity=2**40)
    with pytest.raises(UsageError, match="^block_rows is 0, which is not from 1"):
        kvbaton.to_coreml(view(), "vllm-nhd", block_rows=0)


def test_core_mls_tensors_come_from_a_cache_and_a_layout() -> None:
    for wrong in (None, 5, {"key_cache": ROWS}):
        with pytest.raises(UsageError, match="^cache is .* which is no CacheView"):
            kvbaton.to_coreml(wrong)  # type: ignore[arg-type]
        if wrong is not None:
            with pytest.raises(UsageError, match="^into is .* which is no CoreMLInputs"):
                kvbaton.to_coreml(view(), into=wrong)  # type: ignore[arg-type]
    for text in ('name = "a"\n', "\n"):
        with pytest.raises(LayoutError, match="has no tensors"):
            kvbaton.to_coreml(view(), text)
    with pytest.raises(LayoutError, match="not a layout"):
        kvbaton.to_coreml(view(), "= 1\n")
    made = kvbaton.to_coreml(view().prefix(1), capacity=4)
    del made.arrays["key_cache"]
    with pytest.raises(UsageError, match="the tensors lack `key_cache`"):
        kvbaton.to_coreml(view(), into=made)


def test_tensors_belong_to_as_many_tokens_as_they_have() -> None:
    made = kvbaton.to_coreml(view(), capacity=4)
    for wrong in ([1, 2], [1, 2, 3, 4]):
        with pytest.raises(UsageError, match=f"{len(wrong)} tokens were given, the tensors have 3"):
            made.view(wrong)
    assert made.view([1, 2, 3]).tokens == [1, 2, 3]


def test_a_ladder_has_steps_and_carries_nothing_of_the_layouts() -> None:
    for ladder, message in (
        ([], "the ladder has no step"),
        (5, "ladder are 5, which are no whole numbers"),
        ([-1, 16], r"ladder\[0\] is -1"),
        ([16.5], r"ladder\[0\] is 16.5"),
    ):
        with pytest.raises(UsageError, match=message):
            kvbaton.GrowingCache(view(), ladder=ladder)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`key_cache` is carried, and is a tensor of the layout"):
        kvbaton.GrowingCache(view(), ladder=[16], carried={"key_cache": np.zeros(3)})
    growing = kvbaton.GrowingCache(view(), ladder=np.array([4, 16]))
    for wrong in (None, 1.5, "a", -1):
        for call in (growing.reserve, growing.move):
            with pytest.raises(UsageError, match="is "):
                call(wrong)  # type: ignore[arg-type]
    assert growing.capacity == 4


def test_what_may_differ_is_known_and_facts_are_facts() -> None:
    layer = {"kind": "full", "kv_heads": 2, "key_dim": 64, "value_dim": 64}
    rope = {"kind": "default", "theta": 1e4, "dims": 64, "scaling": {"kind": "default"}}
    model = {"architecture": "a", "vocab_size": 8, "rope": rope, "layers": [layer]}
    kvbaton.check_compatible({**model, "vocab_size": np.int64(8)}, model, allow_different={"weights"})
    with pytest.raises(UsageError, match="`rope` cannot be allowed to differ"):
        kvbaton.check_compatible(model, model, allow_different={"rope"})  # type: ignore[arg-type]
    for wrong in (5, None, "abc", [1], {"x": object()}):
        with pytest.raises(UsageError, match="^a is "):
            kvbaton.check_compatible(wrong, model)  # type: ignore[arg-type]


def handed(models: Models, *, family: str = "llama_wide", **options: Any) -> kvbaton.mlx.Handoff:
    """A hand-off of nine tokens, as ``options`` say."""
    model, tokens = models(family), prompt(10)
    source = make_caches(model)
    mx.eval(model(mx.array([tokens[:-1]]), cache=source))
    view = kvbaton.from_mlx(source, model, tokens=tokens[:-1])
    said = {"cache": view, "model": model, "tokens": tokens, **options}
    return kvbaton.to_mlx(**said, measure_memcpy=False)


@pytest.mark.parametrize("name", ["spare_rows", "threads", "kv_bits"])
@pytest.mark.parametrize("wrong", [1.5, "4", True, 2**63, 2**70])
def test_counts_of_a_hand_off_are_named(models: Models, name: str, wrong: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} is "):
        handed(models, **{name: wrong})


@pytest.mark.parametrize(("bits", "group"), [(0, 64), (1, 64), (7, 64), (9, 64), (8, 0), (8, 16), (8, 48)])
def test_codes_that_do_not_exist_are_refused(models: Models, bits: int, group: int) -> None:
    with pytest.raises(UsageError, match=f"there are no codes of {bits} bits in groups of {group}"):
        handed(models, kv_bits=bits, kv_group_size=group)


def test_spare_rows_that_no_memory_holds_are_refused(models: Models) -> None:
    for spare in (2**34, 2**62):
        with pytest.raises(CapacityError, match=f"caches with {spare} spare rows take "):
            handed(models, spare_rows=spare)


def test_a_hand_off_is_of_a_cache_to_a_model_that_is_loaded(models: Models) -> None:
    for wrong in (None, 5, {}, "demo/out/model"):
        with pytest.raises(UsageError, match="^model is a .*, not a model that mlx-lm has loaded"):
            handed(models, model=wrong)
        with pytest.raises(UsageError, match="^cache is .* which is no CacheView"):
            handed(models, cache=wrong)
    with pytest.raises(UsageError, match="^prompt_cache is a int, not mlx-lm's caches"):
        handed(models, prompt_cache=5)
    for tokens, message in (
        ([t + 0.5 for t in prompt(10)], r"tokens\[0\] is 3.5"),
        ("abc", "tokens are 'abc'"),
    ):
        with pytest.raises(UsageError, match=message):
            handed(models, tokens=tokens)
    with pytest.raises(UsageError, match="caches are a int"):
        kvbaton.from_mlx(5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"tokens_seen is 1.5"):
        kvbaton.from_mlx(make_caches(models("llama")), models("llama"), tokens_seen=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [1025, 2**62])
def test_threads_are_as_many_as_a_machine_can_start(models: Models, tmp_path: Path, wrong: int) -> None:
    cache = view()
    for call in (
        lambda: handed(models, threads=wrong),
        lambda: kvbaton.to_coreml(cache, threads=wrong),
        lambda: kvbaton.Prefill(tmp_path, threads=wrong),
        lambda: kvbaton.Decode(tmp_path, threads=wrong),
    ):
        with pytest.raises(UsageError, match=f"threads is {wrong}, which is not from 0 to 1024"):
            call()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"pad": 1}, "pad=1 is said, and layout `kvbaton-stacked` has no rows that are left-padded"),
        ({"ring_start": 2}, "ring_start=2 is said, .* no rows that are ring-indexed or ring-from"),
        ({"conv_start": 2}, "conv_start=2 is said, .* no rows that are ring-from"),
        ({"block_table": [1, 0]}, r"block_table=\[1, 0\] is said, .* no rows that are paged"),
        ({"sequence": 1}, "sequence=1 is said, .* no axis `batch`"),
    ],
)
def test_what_a_layout_does_not_listen_to_is_not_said_in_vain(said: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        view(**said)
    nothing = {name: 0 for name in said if name != "block_table"}
    np.testing.assert_array_equal(view(**nothing).layers[1].arrays["key"], ROWS[1, :, :3])


def test_an_engines_times_and_what_it_calls_are_looked_at(tmp_path: Path) -> None:
    for kind in (kvbaton.Prefill, kvbaton.Decode):
        for name in ("engine_timeout", "prediction_timeout"):
            with pytest.raises(UsageError, match=f"^{name} is 'a', which is no number of seconds"):
                kind(tmp_path, **{name: "a"})  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="^on_wait is 5, which cannot be called"):
            kind(tmp_path, on_wait=5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="allow_different is 5, which is no set of names"):
        kvbaton.check_compatible({}, {}, allow_different=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("habit", "wrong"),
    [("layers", 1.5), ("kv_heads", 0), ("head_dim", 0), ("row_align_bytes", 2**62), ("chunk_tokens", -1)],
)
def test_a_fakes_habits_are_looked_at(habit: str, wrong: Any) -> None:
    with pytest.raises(UsageError, match=f"^{habit} is {wrong}, which is n"):
        FakePrefill(**{"layers": 2, "kv_heads": 2, "head_dim": 8, habit: wrong})


def test_a_layout_may_be_in_a_file(tmp_path: Path) -> None:
    """As on the command line; what it says is what the text would have said."""
    file = tmp_path / "mine.toml"
    known = kvbaton.to_coreml(view(), "yetter", 8)
    for text in (known.layout, "\ufeff" + known.layout):
        file.write_text(text)
        for given in (file, str(file)):
            made = kvbaton.to_coreml(view(), given, 8)
            assert made.arrays.keys() == known.arrays.keys()
            for name, array in known.arrays.items():
                np.testing.assert_array_equal(made.arrays[name], array)
            grown = kvbaton.GrowingCache(view(), given, ladder=(8,)).inputs
            assert grown.arrays.keys() == known.arrays.keys()
            back = kvbaton.CacheView.from_arrays(known.arrays, given, tokens_seen=3)
            np.testing.assert_array_equal(back.layers[1].arrays["key"], ROWS[1][:, :3])
    with pytest.raises(UsageError, match="none.toml` cannot be read: No such file"):
        kvbaton.to_coreml(view(), tmp_path / "none.toml")
    file.write_bytes(b"\xff\xff")
    with pytest.raises(UsageError, match="cannot be read"):
        view(layout=file)
    file.write_text("name = ")
    with pytest.raises(LayoutError):
        view(layout=file)
