"""Hands a KV cache from Core ML prefill to MLX decode: any layout, either direction, at memory speed.

    prefill = kvbaton.Prefill("smollm2.mlpackage")
    result = prefill(tokens)
    handoff = kvbaton.to_mlx(result.cache, model)
    for step in mlx_lm.stream_generate(
        model, tokenizer, handoff.remaining_tokens, prompt_cache=handoff.prompt_cache
    ): …

Importing this package imports nothing else; numpy, mlx-lm and coremltools are imported when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from . import errors
from ._native import __version__, weights_digest
from .errors import KvbatonError

if TYPE_CHECKING:
    from .cache import CacheView, Finding, LayerView, Scan
    from .compatible import check_compatible
    from .coreml import CoreMLInputs, GrowingCache, to_coreml
    from .decode import Decode
    from .mlx import Handoff, from_mlx, prefill_to_mlx, to_mlx
    from .prefill import Prefill, PrefillResult
    from .report import Activations, HandoffReport, PrefillReport
    from .verification import Thresholds, VerifyReport, verify

__all__ = [
    "Activations",
    "CacheView",
    "CoreMLInputs",
    "Decode",
    "Finding",
    "GrowingCache",
    "Handoff",
    "HandoffReport",
    "KvbatonError",
    "LayerView",
    "Prefill",
    "PrefillReport",
    "PrefillResult",
    "Scan",
    "Thresholds",
    "VerifyReport",
    "__version__",
    "check_compatible",
    "errors",
    "from_mlx",
    "prefill_to_mlx",
    "to_coreml",
    "to_mlx",
    "verify",
    "weights_digest",
]

_HOME = {
    "cache": ("CacheView", "Finding", "LayerView", "Scan"),
    "compatible": ("check_compatible",),
    "coreml": ("CoreMLInputs", "GrowingCache", "to_coreml"),
    "decode": ("Decode",),
    "mlx": ("Handoff", "from_mlx", "prefill_to_mlx", "to_mlx"),
    "prefill": ("Prefill", "PrefillResult"),
    "report": ("Activations", "HandoffReport", "PrefillReport"),
    "verification": ("Thresholds", "VerifyReport", "verify"),
}
"""Modules and what they give to this one. The command line starts here, too, and most commands need no numpy."""


def __getattr__(name: str) -> object:
    """Imports what is asked for the first time."""
    if name in _HOME:
        return importlib.import_module(f".{name}", __name__)
    for module, names in _HOME.items():
        if name in names:
            value: object = getattr(importlib.import_module(f".{module}", __name__), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Everything public."""
    return __all__
