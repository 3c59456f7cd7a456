"""mlx-lm's caches: filled from a view, read into one, ready to decode.

* Caches start from ``model.make_cache()``: a model may have fewer caches than layers, or several in one.
* Arrays belong to MLX, one allocation each, with spare rows: then the first decode step writes in place.
  A full buffer is concatenated to a larger one, a slice of a larger array is copied.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _arguments as arguments
from . import _native
from ._mlx import adopting
from ._mlx.decoder import check_ids, check_loaded, describe, dtype_name, dtype_of, make_caches
from ._mlx.filling import check_model, empty, fill, remaining
from ._mlx.reading import from_mlx
from ._mlx.rows import Prefilling, Rows
from .cache import CacheView
from .errors import UnavailableError, UsageError
from .prefill import Prefill
from .report import HandoffReport, PrefillReport

__all__ = [
    "Handoff",
    "cache_addresses",
    "check_ids",
    "copied_bytes",
    "describe",
    "dtype_name",
    "dtype_of",
    "from_mlx",
    "make_caches",
    "prefill_to_mlx",
    "to_mlx",
]


@dataclass(frozen=True)
class Handoff:
    """Caches for ``mlx_lm.generate(prompt_cache=…)``, the tokens that remain to be run, and what it cost.

    ``cached_tokens`` are in the caches. With no token remaining, the first new one is sampled from
    ``logits``, which are the source's; otherwise ``logits`` is ``None``. ``quantized_layers`` counts the
    caches that were made quantised. ``prefill`` is what the prefill cost
    that :func:`prefill_to_mlx` ran.
    """

    prompt_cache: list[Any]
    remaining_tokens: list[int]
    report: HandoffReport
    cached_tokens: int = 0
    logits: npt.NDArray[np.float32] | None = None
    quantized_layers: int = 0
    prefill: PrefillReport | None = None


def to_mlx(
    cache: CacheView,
    model: Any,
    tokens: Sequence[int] | None = None,
    dtype: Any | None = None,
    spare_rows: int = 256,
    *,
    prompt_cache: Sequence[Any] | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    threads: int = 0,
    measure_memcpy: bool = True,
    adopt: bool = False,
) -> Handoff:
    """Hands ``cache`` over to mlx-lm caches of ``model``.

    A decoder needs one token to run. With ``tokens`` one longer than the cache, that token is the last of
    them and every row goes over; otherwise the last row is dropped and its token remains. A recurrent state
    cannot drop a token: there the cache's ``logits`` must be known, every row goes over and no token remains.
    ``tokens`` may be left out where the view knows them.

    ``dtype`` is the element type of keys, values and convolution states, by default that in which the model
    writes them: a cache of another type would promote every step. ``spare_rows`` are the free rows that each
    cache has at least; with none, the first step copies every layer.

    ``prompt_cache`` are the caches to fill instead of fresh ones of the model: of any class of mlx-lm, empty,
    or holding a shorter past of the same tokens, to which only the missing rows are added. ``kv_bits`` and
    ``kv_group_size`` quantise as mlx-lm's options do: full attention alone. ``measure_memcpy`` times a memcpy
    of as many bytes afterwards, for the report.

    With ``adopt`` MLX may take the producer's memory over instead of copying its rows, where that is free: where an
    array on foreign memory was measured to stay there, and to be written in place. Then the report's ``path`` is
    ``adopt`` and ``because`` says how that is known; ``cache`` cannot be read any more, and the engine that made
    it refuses the next prefill until the caches are gone. Otherwise rows are copied, and ``because`` says why.

    No cache is touched before everything has been checked and copied.

    Raises:
        IncompatibleError: the cache is not this model's: layers, heads, head_dim, rope or vocabulary differ;
            or rows are missing that the caches want.
        CapacityError: caches hold fewer rows than the source has.
        UsageError: ``tokens`` do not fit the cache or the vocabulary, or none are known.
    """
    start = time.perf_counter()
    _require_mlx()
    arguments.instance(cache, CacheView, "cache")
    spare_rows, threads = _counts(model, spare_rows, threads)
    rest = remaining(cache, tokens)
    check_ids(model, rest.tokens, first=rest.rows)
    decoder = describe(model)
    check_model(cache.model, decoder)
    refused = None
    if adopt and prompt_cache is None and kv_bits is None:
        adopted = adopting.adopt(cache, decoder, model, rest.rows, dtype)
        if isinstance(adopted, adopting.Adopted):
            adopted.report.seconds = adopted.report.exposed_seconds = time.perf_counter() - start
            return Handoff(adopted.caches, rest.tokens, adopted.report, rest.rows, None, 0)
        refused = f"copied, not adopted: {adopted}"
    filled = fill(
        Rows(cache),
        decoder,
        model,
        rest.rows,
        prompt_cache=prompt_cache,
        dtype=dtype,
        spare_rows=spare_rows,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        threads=threads,
    )
    report = filled.report
    report.seconds = report.exposed_seconds = time.perf_counter() - start
    if measure_memcpy:
        _compare_with_memcpy(report, threads)
    report.because = refused
    logits = None if rest.tokens else cache.logits
    return Handoff(filled.caches, rest.tokens, report, rest.rows, logits, filled.quantized_layers)


def prefill_to_mlx(
    prefill: Prefill,
    tokens: Sequence[int],
    model: Any,
    dtype: Any | None = None,
    spare_rows: int = 256,
    *,
    prompt_cache: Sequence[Any] | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    threads: int = 0,
    measure_memcpy: bool = True,
) -> Handoff:
    """Prefills all of ``tokens`` but the last, which remains, and hands rows over while the prefill runs.

    The caches' arrays are allocated first and their pages touched beside the prefill; an engine that works in
    chunks has each copied as soon as it is final. ``report.exposed_seconds`` is what is left after the last.
    The other parameters are those of :func:`to_mlx`; ``prompt_cache`` must be empty.

    A failure leaves no caches: they get their arrays when every row is there.

    Raises:
        IncompatibleError: the package is not this model's.
        UsageError: there are no tokens, one is not in the vocabulary, or ``prompt_cache`` holds some already.
    """
    _require_mlx()
    arguments.instance(prefill, Prefill, "prefill")
    spare_rows, threads = _counts(model, spare_rows, threads)
    ids = arguments.numbers(tokens)
    if not ids:
        raise UsageError("no tokens: a decoder needs one to run")
    check_ids(model, ids)
    decoder = describe(model)
    check_model(prefill.model, decoder)
    if len(ids) == 1:
        none = empty(decoder, model, prompt_cache, kv_bits, kv_group_size)
        return Handoff(none.caches, ids, none.report, quantized_layers=none.quantized_layers)
    source = Prefilling(prefill, ids[:-1])
    filled = fill(
        source,
        decoder,
        model,
        source.tokens_seen,
        prompt_cache=prompt_cache,
        dtype=dtype,
        spare_rows=spare_rows,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        threads=threads,
    )
    if measure_memcpy:
        # Pieces were copied on one thread, all but the last.
        _compare_with_memcpy(filled.report, threads if filled.report.streamed is None else 1)
    return Handoff(
        filled.caches,
        ids[-1:],
        filled.report,
        source.tokens_seen,
        quantized_layers=filled.quantized_layers,
        prefill=source.report,
    )


def _counts(model: Any, spare_rows: int, threads: int) -> tuple[int, int]:
    """``spare_rows`` and ``threads``, beside a model that can be asked what it keeps."""
    check_loaded(model)
    spare_rows = arguments.whole(spare_rows, "spare_rows", least=-arguments.LARGEST)
    return spare_rows, arguments.threads(threads)


def _require_mlx() -> None:
    try:
        import mlx_lm  # noqa: F401
    except ImportError as error:
        raise UnavailableError(f"mlx-lm is needed: {error}", hint="pip install 'kvbaton[mlx]'") from error


def _compare_with_memcpy(report: HandoffReport, threads: int) -> None:
    """Right after the fill, into memory in the same state as the fill's was, outside every reported time."""
    if report.bytes == 0:
        return
    start = time.perf_counter()
    moved = round(report.gigabytes_per_second * 1e9 * report.copy_seconds)
    cold = report.touched_share is not None and report.touched_share < 0.5
    memcpy = _native.memcpy_seconds(moved, threads, cold)
    report.memcpy_ratio = memcpy / report.copy_seconds
    if report.memcpy_ratio > 1.05:
        report.note = (
            "faster than the memcpy beside it, which moved as many bytes on the same threads into memory that "
            "was as touched, and streamed no stores; its source was another buffer"
        )
    report.yardstick_seconds = time.perf_counter() - start


def _attention(caches: Sequence[Any]) -> list[Any]:
    """Arrays of all caches that grow, members of lists among them."""
    arrays: list[Any] = []
    for cache in caches:
        if type(cache).__name__ == "CacheList":
            arrays += _attention(cache.caches)
            continue
        for pair in (getattr(cache, "keys", None), getattr(cache, "values", None)):
            if pair is not None:
                arrays += pair if isinstance(pair, list | tuple) else [pair]
    return arrays


def cache_addresses(caches: Sequence[Any]) -> list[tuple[int, int]]:
    """(address, bytes) of every key and value array, to be compared after a step."""
    return [(_native.address(a), a.nbytes) for a in _attention(caches)]


def copied_bytes(before: list[tuple[int, int]], caches: Sequence[Any]) -> int:
    """Bytes of the arrays that a step moved instead of writing in place."""
    after = cache_addresses(caches)
    return sum(size for (old, size), (new, _) in zip(before, after, strict=True) if old != new)
