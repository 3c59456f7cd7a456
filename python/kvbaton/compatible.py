"""Whether a cache of one model serves another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from . import _arguments as arguments
from . import _native
from .cache import CacheView
from .errors import IncompatibleError, UsageError

__all__ = ["check_compatible"]

Facts = CacheView | Mapping[str, Any]


def check_compatible(a: Facts, b: Facts, *, allow_different: Collection[Literal["weights"]] = ()) -> None:
    """Raises unless a cache of ``a`` serves a decoder of ``b``.

    Both are cache views, or what a package says of its model (:attr:`kvbaton.Prefill.model`). Layers, heads,
    head_dim, windows, rope, vocabulary and the digests of the weights must be equal; what is unknown is equal to
    nothing. ``allow_different={"weights"}`` accepts other or unknown weights, and nothing else.

    Raises:
        IncompatibleError: the first difference, with both values; ``fields`` has all of them.
    """
    if not isinstance(allow_different, Collection):
        raise UsageError(f"allow_different is {allow_different!r}, which is no set of names")
    allowed = {allow_different} if isinstance(allow_different, str) else set(allow_different)
    if allowed - {"weights"}:
        raise UsageError(
            f"`{min(allowed - {'weights'}, key=str)}` cannot be allowed to differ",
            hint='allow_different={"weights"} is all there is',
        )
    _native.check_compatible(_facts(a, "a"), _facts(b, "b"), not allowed)


def _facts(of: Facts, name: str) -> str:
    facts = of.model if isinstance(of, CacheView) else of
    if facts is None and not isinstance(of, CacheView):
        raise UsageError(f"{name} is None: neither a cache nor what is known of a model")
    if facts is None:
        raise IncompatibleError("the cache's model is not known", hint="make the view with model=")
    return arguments.facts(facts, name)
