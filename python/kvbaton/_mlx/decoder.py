"""What a loaded mlx-lm model keeps, asked of the model itself.

A step over one token into empty caches is built and never evaluated: MLX is lazy, and the arrays that appear
in the caches have their shapes and types already. So every architecture that mlx-lm runs is described, not
only those whose configuration is understood.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import IncompatibleError, UsageError
from .slots import Slot, Spec, flatten, spec_of

_ROPE_WORDS = ("rope", "rotary", "partial")


@dataclass(frozen=True)
class Kept:
    """What one slot of a decoder keeps, and the types in which the decoder writes it."""

    spec: Spec
    dtypes: dict[str, Any]


@dataclass(frozen=True)
class Decoder:
    """A decoder's slots, and its model's description in the form of ``kvbaton.model``."""

    kept: list[Kept]
    slots: list[Slot]
    model: dict[str, Any]


_known: dict[tuple[int, str], Decoder] = {}


def check_loaded(model: Any) -> None:
    """Refuses what is no model that mlx-lm has loaded: a path, above all.

    Raises:
        UsageError: it is not.
    """
    from mlx.nn import Module

    if not isinstance(model, Module):
        raise UsageError(
            f"model is a {type(model).__name__}, not a model that mlx-lm has loaded",
            hint="model, tokenizer = mlx_lm.load(…)",
            fields={"type": type(model).__name__},
        )


def describe(model: Any) -> Decoder:
    """Describes ``model``; the answer is kept as long as the model lives and its weights keep their type."""
    check_loaded(model)
    key = (id(model), str(dtype_of(model)))
    if key not in _known:
        _known[key] = _describe(model)
        weakref.finalize(model, _known.pop, key, None)
    return _known[key]


def make_caches(model: Any) -> list[Any]:
    """Empty caches, as mlx-lm makes them for ``model``."""
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def _describe(model: Any) -> Decoder:
    import mlx.core as mx

    caches = make_caches(model)
    try:
        model(mx.array([[0]]), cache=caches)
    except Exception as error:
        raise IncompatibleError(
            f"what the decoder keeps cannot be told: a step of it fails: {' '.join(str(error).split())}"
        ) from error
    kept, slots = [], flatten(caches)
    for slot in slots:
        spec = spec_of(slot)
        if spec is None:
            raise IncompatibleError(
                f"what the decoder keeps in {slot.place} cannot be told: a step leaves it empty",
                fields={"place": slot.place, "class": slot.kind},
            )
        kept.append(Kept(spec, _dtypes(slot)))
    return Decoder(kept, slots, _model_spec(model, [k.spec for k in kept]))


def _dtypes(slot: Slot) -> dict[str, Any]:
    if slot.recurrent:
        parts = {"conv": slot.conv, "state": slot.state}
        return {part: slot.cache.cache[at].dtype for part, at in parts.items() if at is not None}
    return {"key": slot.cache.keys.dtype, "value": slot.cache.values.dtype}


def _model_spec(model: Any, layers: list[Spec]) -> dict[str, Any]:
    """The model as its configuration says; where that is not understood, its rope is compared as written."""
    from .._export.config import parse_config
    from .._export.errors import ExportError

    args = getattr(model, "args", None) or getattr(model, "config", None)
    fields = {k: v for k, v in vars(args).items() if v is not None} if args else {}
    try:
        return {**parse_config(fields).spec(), "layers": with_shared(model, layers)}
    except ExportError:
        pass
    fields = {**fields, **_plain(fields.get("text_config"))}
    written = {k: v for k, v in sorted(fields.items()) if any(word in k for word in _ROPE_WORDS)}
    vocabulary = fields.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise IncompatibleError(
            "the decoder's vocabulary cannot be told: its configuration has no vocab_size"
        )
    theta = fields.get("rope_theta")
    return {
        "architecture": str(fields.get("model_type", type(model).__name__)),
        "vocab_size": vocabulary,
        "rope": {
            "kind": f"as configured: {json.dumps(written, sort_keys=True, default=str)}",
            "theta": float(theta) if isinstance(theta, int | float) else 0.0,
            "dims": 0,
            "scaling": {"kind": "default"},
        },
        "layers": with_shared(model, layers),
    }


def _plain(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    found = config if isinstance(config, dict) else vars(config)
    return {k: v for k, v in found.items() if v is not None}


def with_shared(model: Any, layers: list[Spec]) -> list[Spec]:
    """``layers`` with an entry for every layer that reads another's cache, where the model says which."""
    shared = _shared(model)
    if shared is None or len(shared) <= len(layers):
        return layers
    return layers + [{"kind": "shared", "with": shared[at]} for at in range(len(layers), len(shared))]


def _shared(model: Any) -> list[int] | None:
    for _, module in model.named_modules():
        for name in ("layer_idx_to_cache_idx", "previous_kvs"):
            found = module.get(name) if isinstance(module, dict) else None
            if isinstance(found, list) and all(isinstance(i, int) for i in found):
                return found
    return None


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


def check_ids(model: Any, tokens: Sequence[int], first: int = 0) -> None:
    """Refuses tokens that are not in the model's vocabulary: MLX reads whatever is in memory there.

    ``first`` is the position of the first of them.

    Raises:
        UsageError: one is not.
    """
    try:
        vocabulary = int(describe(model).model["vocab_size"])
    except IncompatibleError:  # What needs the description says so itself.
        return
    for at, token in enumerate(tokens, first):
        if not 0 <= token < vocabulary:
            raise UsageError(
                f"token {token} at position {at} is not in the vocabulary of {vocabulary}",
                fields={"token": token, "position": at, "vocab_size": vocabulary},
            )


def dtype_name(model: Any) -> str:
    """The name of :func:`dtype_of`, as layouts have it."""
    return str(dtype_of(model)).rpartition(".")[2]
