"""mlx-lm's caches: filled from a view, ready to decode.

The rules of construction, checked against mlx-lm 0.32 and 0.31:

* caches start from ``model.make_cache()`` (a model may have fewer caches than layers);
* arrays belong to MLX, one allocation a layer, with spare rows: then the first decode step writes in place.
  A full buffer is concatenated to a larger one, a slice of a larger array is copied;
* the attributes are set, not ``state``, whose arity changed between versions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _native
from ._reserve import reserve
from .cache import CacheView
from .errors import IncompatibleError, UnavailableError, UsageError
from .report import HandoffReport

if TYPE_CHECKING:
    import mlx.core as mx

__all__ = ["Handoff", "cache_addresses", "copied_bytes", "to_mlx"]

_STEP = 256  # rows by which mlx-lm's KVCache grows


@dataclass(frozen=True)
class Handoff:
    """Caches for ``mlx_lm.generate(prompt_cache=…)``, the tokens that remain to be run, and what it cost."""

    prompt_cache: list[Any]
    remaining_tokens: list[int]
    report: HandoffReport


def to_mlx(
    cache: CacheView,
    model: Any,
    tokens: Sequence[int] | None = None,
    dtype: Any | None = None,
    spare_rows: int = 256,
    *,
    threads: int = 0,
    measure_memcpy: bool = True,
) -> Handoff:
    """Hands ``cache`` over to fresh mlx-lm caches of ``model``.

    A decoder needs one token to run. With ``tokens`` one longer than the cache, that token is the last of
    them and every row goes over; otherwise the last row is dropped and its token remains. ``tokens`` may be
    left out where the view knows them.

    ``dtype`` is the caches' element type, the model's own by default: a cache of another type would promote
    every step. ``spare_rows`` are the free rows that each cache has at least; with none, the first step
    copies every layer. ``measure_memcpy`` times a memcpy of as many bytes afterwards, for the report.

    Raises:
        IncompatibleError: the cache is not this model's: layers, heads, head_dim, rope or vocabulary differ.
        UsageError: ``tokens`` do not fit the cache, or none are known.
    """
    start = time.perf_counter()
    mx = _import_mlx()
    rows, remaining = _rows_and_remaining(cache, tokens)
    spec = check_model(cache, model)
    caches = make_caches(model)
    layers = cache_layers(spec, caches)
    element = dtype_of(model) if dtype is None else _mx_dtype(mx, dtype)

    allocated, allocation = _allocate(spec, layers, rows, spare_rows, element)
    targets = [
        (f"{name}_{layer}", array, str(element).rpartition(".")[2])
        for layer, pair in allocated.items()
        for name, array in zip(("keys", "values"), pair, strict=True)
    ]
    live = json.dumps({"tokens_seen": rows})
    report = HandoffReport.from_json(
        cache._native.fill(targets, "mlx-lm", live, "error", threads, fresh=True)
    )
    report.allocation = allocation
    del targets
    for layer, target in layers.items():
        target.keys, target.values = allocated.pop(layer)
        target.offset = rows
        if hasattr(target, "_idx"):
            target._idx = min(rows, target.max_size)
    report.seconds = report.exposed_seconds = time.perf_counter() - start
    if measure_memcpy:
        _compare_with_memcpy(report, threads)
    return Handoff(caches, remaining, report)


def _rows_and_remaining(cache: CacheView, tokens: Sequence[int] | None) -> tuple[int, list[int]]:
    seen, known = cache.tokens_seen, cache.tokens
    if tokens is None:
        if known is None:
            raise UsageError("the ids of the cache's tokens are not known", hint="give tokens=")
        tokens = known
    ids = [int(t) for t in tokens]
    if len(ids) not in (seen, seen + 1):
        raise UsageError(
            f"the cache has seen {seen} tokens, {len(ids)} were given",
            hint="give the cache's own tokens, or those and one more",
            fields={"tokens_seen": seen, "tokens": len(ids)},
        )
    if known is not None and ids[:seen] != known:
        at = next(i for i, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b)
        raise UsageError(
            f"token {at} is {ids[at]}, the cache was made from {known[at]}",
            fields={"position": at, "token": ids[at], "cache_token": known[at]},
        )
    if not ids:
        raise UsageError("no tokens: a decoder needs one to run")
    return len(ids) - 1, ids[-1:]


def _import_mlx() -> Any:
    try:
        import mlx.core as mx
        import mlx_lm  # noqa: F401
    except ImportError as error:
        raise UnavailableError(f"mlx-lm is needed: {error}", hint="pip install 'kvbaton[mlx]'") from error
    return mx


def make_caches(model: Any) -> list[Any]:
    """Empty caches, as mlx-lm makes them for ``model``."""
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def model_spec(model: Any) -> dict[str, Any]:
    """What a loaded model says of itself, in the form of ``kvbaton.model``."""
    from ._export.config import parse_config
    from ._export.errors import ExportError

    args = getattr(model, "args", None)
    try:
        return parse_config({k: v for k, v in vars(args).items() if v is not None} if args else {}).spec()
    except ExportError as error:
        raise IncompatibleError(
            f"the decoder's rope and vocabulary cannot be told: {error}", fields=error.fields
        ) from error


def check_model(cache: CacheView, model: Any) -> list[dict[str, Any]]:
    """What each layer keeps, after the cache's model was found to be the decoder's."""
    source = cache.model
    decoder = model_spec(model)
    if source is None:
        # Only geometry is known of bare arrays; the fill checks heads and lanes against the arrays it gets.
        source = {**decoder, "layers": json.loads(cache._native.cache)}
    _native.check_compatible(json.dumps(source), json.dumps(decoder), False)
    return list(source["layers"])


def cache_layers(spec: list[dict[str, Any]], caches: list[Any]) -> dict[int, Any]:
    """The cache object of every layer that keeps one."""
    owners = [layer for layer, kept in enumerate(spec) if kept["kind"] != "shared"]
    if len(owners) != len(caches):
        raise IncompatibleError(
            f"the cache has {len(owners)} layers that keep rows, the decoder has {len(caches)} caches",
            fields={"layers": len(owners), "caches": len(caches)},
        )
    layers = dict(zip(owners, caches, strict=True))
    for layer, target in layers.items():
        wanted = {"full": "KVCache", "sliding": "RotatingKVCache"}.get(spec[layer]["kind"])
        if type(target).__name__ != wanted:
            raise IncompatibleError(
                f"layer {layer} keeps {spec[layer]['kind']} rows, the decoder has a {type(target).__name__}",
                fields={"layer": layer, "kind": spec[layer]["kind"], "cache": type(target).__name__},
            )
    return layers


def _allocate(
    spec: list[dict[str, Any]], layers: dict[int, Any], rows: int, spare_rows: int, element: Any
) -> tuple[dict[int, tuple[mx.array, mx.array]], str]:
    """Keys and values of every layer, (1, kv_heads, capacity, head_dim), owned by MLX, and how they came."""
    if spare_rows < 0:
        raise UsageError(f"spare_rows={spare_rows} is negative", fields={"spare_rows": spare_rows})
    shapes = []
    for layer, target in layers.items():
        kept = spec[layer]
        if kept["kind"] == "sliding":
            capacity = target.max_size  # more would be silently wrong: the front would be dropped
        elif spare_rows == 0:
            capacity = rows
        else:
            capacity = -(-(rows + spare_rows) // _STEP) * _STEP
        shapes += [(1, kept["kv_heads"], capacity, kept[dim]) for dim in ("key_dim", "value_dim")]
    arrays, allocation = reserve(shapes, element)
    return dict(zip(layers, zip(arrays[::2], arrays[1::2], strict=True), strict=True)), allocation


def dtype_of(model: Any) -> Any:
    """The type of the model's activations: that of its embedding, or of its scales when quantised."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    floats = (mx.float16, mx.bfloat16, mx.float32)
    parameters = [(n, p) for n, p in tree_flatten(model.parameters()) if p.dtype in floats]
    embeddings = [p for n, p in parameters if "embed_tokens" in n]
    chosen = embeddings or [p for _, p in parameters]
    if not chosen:
        raise IncompatibleError("the decoder has no floating-point weights to take the cache's type from")
    return chosen[0].dtype


def _mx_dtype(mx: Any, dtype: Any) -> Any:
    name = str(dtype).rpartition(".")[2]
    if name not in ("float16", "bfloat16", "float32"):
        raise UsageError(
            f"a cache cannot have elements of type {name}",
            hint="float16, bfloat16 or float32",
            fields={"dtype": name},
        )
    return getattr(mx, name)


def _compare_with_memcpy(report: HandoffReport, threads: int) -> None:
    """Right after the fill, into memory in the same state as the fill's was, outside every reported time."""
    if report.bytes == 0:
        return
    start = time.perf_counter()
    moved = round(report.gigabytes_per_second * 1e9 * report.copy_seconds)
    cold = report.touched_share is not None and report.touched_share < 0.5
    memcpy = _native.NativeView.memcpy_seconds(moved, threads, cold, report.huge_pages)
    report.memcpy_ratio = memcpy / report.copy_seconds
    if report.memcpy_ratio > 1.05:
        report.note = (
            "faster than one memcpy of as many bytes on the same threads into memory in the same state: "
            "the rows were still in the processor's cache"
        )
    report.yardstick_seconds = time.perf_counter() - start


def cache_addresses(caches: Sequence[Any]) -> list[tuple[int, int]]:
    """(address, bytes) of every key and value array, to be compared after a step."""
    arrays = [
        a for c in caches for a in (getattr(c, "keys", None), getattr(c, "values", None)) if a is not None
    ]
    return [(_native.address(a), a.nbytes) for a in arrays]


def copied_bytes(before: list[tuple[int, int]], caches: Sequence[Any]) -> int:
    """Bytes of the arrays that a step moved instead of writing in place."""
    after = cache_addresses(caches)
    return sum(size for (old, size), (new, _) in zip(before, after, strict=True) if old != new)
