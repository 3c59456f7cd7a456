"""Whether MLX takes memory over: measured, decided, and refused with the reason."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import kvbaton
import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from cache_models import build
from kvbaton import _native
from kvbaton._host import MlxDecoder
from kvbaton._mlx import adopting
from kvbaton.testing import FakePrefill

# A layer's keys are 2 * 64 * 64 float16: one page, so that every layer starts on one.
SHAPE: dict[str, Any] = {"layers": 3, "kv_heads": 2, "head_dim": 64, "lengths": (64,)}
TOKENS = list(range(1, 11))


class InPlace:
    """Stands in MLX's place: arrays are on the memory that they were made of."""

    __version__ = "0.0"

    from_dlpack = staticmethod(np.asarray)

    @staticmethod
    def eval(*arrays: Any) -> None:
        """Nothing is lazy here."""

    @staticmethod
    def ones(shape: tuple[int, ...], dtype: Any) -> Any:
        return np.ones(shape, dtype)


class Moving(InPlace):
    """As MLX from 0.32.4 on: the first write copies what MLX does not own."""

    class Array(np.ndarray[Any, Any]):
        moved: Any = None

        def __setitem__(self, key: Any, value: Any) -> None:
            self.moved = np.array(self)
            self.moved[key] = value

    @staticmethod
    def from_dlpack(memory: Any) -> Any:
        return memory.view(Moving.Array)


class Unable(InPlace):
    @staticmethod
    def from_dlpack(memory: Any) -> Any:
        raise BufferError("no")


def test_memory_in_place_is_free_and_moved_memory_is_not() -> None:
    free = adopting.measure(InPlace, "metal")
    assert (free.wraps, free.donates, free.free, free.copied_bytes) == (True, True, True, 0)
    moving = adopting.measure(Moving, "metal")
    assert (moving.wraps, moving.donates, moving.free) == (True, False, False)
    assert moving.copied_bytes == 2 * 64 * 64 * 2
    assert "first write" in str(moving.because)
    unable = adopting.measure(Unable, "metal")
    assert (unable.wraps, unable.because) == (False, "BufferError: no")


@pytest.mark.parametrize(
    ("version", "in_place", "free"),
    [
        ("0.31.1", True, True),
        ("0.32.3", True, True),
        ("0.32.4", True, False),
        ("0.33.0.dev1", True, False),
        ("1.0", True, False),
        ("0.32.3", False, False),
        ("0.32.4", False, False),
    ],
)
def test_adopting_needs_the_version_and_the_measurement(version: str, in_place: bool, free: bool) -> None:
    stand_in = type("Mlx", (InPlace if in_place else Moving,), {"__version__": version})
    measured = adopting.measure(stand_in, "metal")
    assert measured.donates == in_place
    assert (measured.free, measured.to_dict()["free"]) == (free, free)
    assert version in measured.sentence
    assert measured.sentence.startswith("copied, not adopted") != free
    assert ("measured by addresses" in measured.sentence) == (free or not in_place)
    if in_place and not free:
        assert "known to copy" in measured.sentence


def test_aligned_memory_starts_on_a_page() -> None:
    for shape in ((1, 2, 64, 64), (3, 5)):
        array = adopting.aligned(shape)
        assert array.ctypes.data % adopting.PAGE_BYTES == 0
        assert array.shape == shape


@pytest.mark.skipif(mx.metal.is_available(), reason="this MLX may adopt")
def test_mlx_without_metal_copies_and_the_rows_are_filled() -> None:
    measured = adopting.probe()
    assert (measured.backend, measured.wraps, measured.free) == ("cpu", False, False)
    cache = FakePrefill(**SHAPE)(TOKENS).cache
    handoff = kvbaton.to_mlx(cache, build("llama_wide", mx.float16), adopt=True)
    assert handoff.report.path == "fill"
    assert "copied, not adopted: MLX" in str(handoff.report.because)
    assert cache.tokens == TOKENS, "the view is still there"


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MLX that was measured to adopt for free."""
    measured = adopting.measure(InPlace, "metal")
    monkeypatch.setattr(adopting, "probe", lambda: measured)


@pytest.mark.usefixtures("free")
def test_arrays_that_were_copied_are_not_called_adopted() -> None:
    if mx.metal.is_available():
        pytest.skip("this MLX may adopt")
    handoff = kvbaton.to_mlx(FakePrefill(**SHAPE)(TOKENS).cache, build("llama_wide", mx.float16), adopt=True)
    assert handoff.report.path == "fill"
    assert "MLX copied 6 of 6 arrays" in str(handoff.report.because)


@pytest.mark.usefixtures("free")
def test_adopted_caches_hold_the_rows_and_the_view_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakePrefill(**SHAPE)
    model = build("llama_wide", mx.float16)
    filled = kvbaton.to_mlx(engine(TOKENS).cache, model)
    gc.collect()
    cache = engine(TOKENS).cache
    loaned: dict[int, int] = {}
    lend, address = _native.view_lend, _native.address

    def remember(*arguments: Any) -> Any:
        loans = lend(*arguments)
        loaned.update(enumerate(loan.address for loan in loans))
        return loans

    # This MLX copies; what is tested is everything around that, so its arrays are said to be where they should.
    order = iter(range(6))
    monkeypatch.setattr(_native, "view_lend", remember)
    monkeypatch.setattr(_native, "address", lambda a: loaned[next(order)] if loaned else address(a))
    handoff = kvbaton.to_mlx(cache, model, adopt=True)
    report = handoff.report
    assert (report.path, report.bytes, report.copies, report.rows) == ("adopt", 0, 0, 9)
    assert "took all 6 arrays over" in str(report.because)
    assert handoff.remaining_tokens == TOKENS[-1:]
    for own, other in zip(handoff.prompt_cache, filled.prompt_cache, strict=True):
        assert own.offset == other.offset == 9
        for mine, theirs in ((own.keys, other.keys), (own.values, other.values)):
            assert mine.shape == (1, 2, 64, 64)
            assert np.array_equal(np.array(mine)[:, :, :9], np.array(theirs)[:, :, :9])
    with pytest.raises(kvbaton.errors.UsageError, match="given to MLX"):
        _ = cache.tokens
    monkeypatch.undo()
    gc.collect()
    # This MLX copied and let go at once; whether its work is done is not known before the barrier, which a prefill
    # waits for.
    with pytest.raises(kvbaton.errors.LeaseError, match="barrier"):
        engine._native.prefill(TOKENS)
    assert engine(TOKENS).cache.tokens == TOKENS


def test_the_barrier_waits_for_mlx_lm_s_own_stream_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.generate import generation_stream

    waited: list[Any] = []
    told: list[str] = []

    class Engine:
        def settle(self) -> None:
            told.append("settled")

    engine: Any = Engine()
    monkeypatch.setattr(mx, "synchronize", lambda stream=None: waited.append(stream))
    monkeypatch.setattr(adopting, "_adopted", False)
    adopting.settle(engine)
    assert (waited, told) == ([], []), "nothing was ever taken over"
    monkeypatch.setattr(adopting, "_adopted", True)
    adopting.settle(engine)
    assert (waited, told) == ([None, generation_stream], ["settled"])


@pytest.mark.usefixtures("free")
def test_the_command_line_s_decoder_adopts_or_says_why_not(tmp_path: Path) -> None:
    decoder = MlxDecoder(tiny_models.build("llama_tied", tmp_path), "float16")
    adoption = json.loads(decoder.adoption())
    assert adoption["free"]
    assert "takes memory over" in adoption["because"]
    # 256 rows of 16 float16 lanes in two heads: a page.
    engine = FakePrefill(layers=3, kv_heads=2, head_dim=16, lengths=(256,))
    report = json.loads(decoder.adopt(engine(TOKENS[:-1]).cache._native, TOKENS))
    if not mx.metal.is_available():
        assert (report["path"], report["rows"]) == ("fill", 9)
        assert "copied, not adopted: MLX copied 6 of 6 arrays" in report["because"]
    *_, summary = decoder.generate(TOKENS[-1:], 2, 0.0)
    assert len(json.loads(str(summary))["tokens"]) == 2


@pytest.mark.skipif(mx.metal.is_available(), reason="this MLX may adopt")
def test_a_run_says_which_path_it_took_and_how_it_knows(
    kvbaton_cli: Any, package: Path, model_folder: Path
) -> None:
    arguments = (
        "run",
        "--prefill",
        package,
        "--decode",
        model_folder,
        "--prompt",
        "Once",
        "--max-tokens",
        "2",
    )
    for flags in ((), ("--no-stream",)):
        done = kvbaton_cli(*arguments, *flags, "--json")
        assert done.code == 0, done.stderr
        handoff = done.json()["handoff"]
        assert handoff["path"] in ("fill", "convert")
        assert handoff["because"].startswith(f"copied, not adopted: MLX {mx.__version__} on cpu: ")
        assert "as measured by addresses" in handoff["because"]
    assert "\npath: copied, not adopted: MLX" in kvbaton_cli(*arguments).stderr


@pytest.mark.usefixtures("free")
def test_what_speaks_against_adopting_is_said() -> None:
    def note(cache: kvbaton.CacheView, model: Any, **options: Any) -> str:
        return str(kvbaton.to_mlx(cache, model, adopt=True, **options).report.because)

    half = build("llama_wide", mx.float16)
    engine = FakePrefill(**SHAPE, ignores_backings=True)
    assert "the decoder writes float32" in note(engine(TOKENS).cache, build("llama_wide"))
    assert "are to be" in note(engine(TOKENS).cache, half, dtype=mx.float32)
    shared = engine(TOKENS).cache
    other = shared.prefix(5)
    assert "held by another view too" in note(shared, half)
    del other
    full = [*range(60), 1, 2, 3, 4]
    assert "have 64 rows, 64 and one more are needed" in note(engine(full).cache, half, tokens=[*full, 5])
    padded = FakePrefill(**SHAPE, row_align_bytes=256)
    assert "are not packed float16" in note(padded(TOKENS).cache, half)
    small = FakePrefill(layers=3, kv_heads=2, head_dim=64, lengths=(16,))
    assert "bytes into a page" in note(small(TOKENS).cache, half)
    arrays = {n: np.zeros((3, 2, 64, 64), np.float16) for n in ("key_cache", "value_cache")}
    view = kvbaton.CacheView.from_arrays(arrays, "kvbaton-stacked", tokens=TOKENS)
    assert "not an engine's own" in note(view, half)
