"""Hands a KV cache from Core ML prefill to MLX decode: any layout, either direction, at memory speed.

    prefill = kvbaton.Prefill("smollm2.mlpackage")
    result = prefill(tokens)
    handoff = kvbaton.to_mlx(result.cache, model)
    for step in mlx_lm.stream_generate(
        model, tokenizer, handoff.remaining_tokens, prompt_cache=handoff.prompt_cache
    ): …

Importing this package needs numpy alone; mlx-lm and coremltools are imported when they are used.
"""

from __future__ import annotations

from . import errors
from ._native import __version__, weights_digest
from .cache import CacheView, Finding, LayerView, Scan
from .compatible import check_compatible
from .coreml import CoreMLInputs, GrowingCache, to_coreml
from .decode import Decode
from .errors import KvbatonError
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
