"""What an MLX model folder's ``config.json`` says, read the way mlx-lm reads it.

The prefill package hands its cache to mlx-lm, so a setting that mlx-lm ignores is ignored here too as long as
it cannot change a value, and refused by name when it can. Rules follow mlx-lm 0.32: ``models/llama.py``
(which also serves ``mistral``), ``qwen2.py``, ``qwen3.py``, ``gemma3_text.py`` and ``rope_utils.py``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ExportError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")

JsonObject = dict[str, Any]

# A cache is described layer by layer: a number that no model has would fill the memory with descriptions.
_MOST = {"num_hidden_layers": 4096}
_LARGEST_FLOAT = sys.float_info.max


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of half-split pairs: lane ``i`` turns with lane ``i + dims / 2``.

    ``scaling`` is the description that goes into the package: ``{"kind": "default"}``, ``{"kind": "linear",
    "factor": f}`` or ``{"kind": "llama3", …}``.
    """

    theta: float
    dims: int
    scaling: JsonObject


@dataclass(frozen=True)
class Windows:
    """Layers that attend to a window: all but every ``pattern``-th, each to ``size`` tokens, with a rope of
    their own."""

    size: int
    pattern: int
    rope: Rope

    def has(self, layer: int) -> bool:
        """Whether a layer has a window."""
        return (layer + 1) % self.pattern != 0


@dataclass(frozen=True)
class Gemma:
    """What the Gemma family does otherwise: norms after attention and MLP too, gains stored as the gain minus
    one, a scaled embedding, GELU and a query scale of its own."""

    embedding_scale: float
    query_scale: float


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one supported decoder.

    ``tied`` is ``None`` where only the weights tell.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norm: bool
    tied: bool | None
    max_positions: int | None
    quantization: JsonObject | None
    windows: Windows | None = None
    gemma: Gemma | None = None

    def has_window(self, layer: int) -> bool:
        """Whether a layer attends to a window alone."""
        return self.windows is not None and self.windows.has(layer)

    def spec(self) -> JsonObject:
        """The content of ``kvbaton.model``, without the weights' digest."""
        heads = {"kv_heads": self.kv_heads, "key_dim": self.head_dim, "value_dim": self.head_dim}
        full, sliding, kind = {"kind": "full", **heads}, {}, "half-split"
        if self.windows is not None:
            sliding = {"kind": "sliding", **heads, "window": {"size": self.windows.size, "keep": 0}}
            kind += f", theta {self.windows.rope.theta:g} in windows"
        return {
            "architecture": self.architecture,
            "vocab_size": self.vocab_size,
            "dtype": "float16",
            "rope": {
                "kind": kind,
                "theta": self.rope.theta,
                "dims": self.rope.dims,
                "scaling": dict(self.rope.scaling),
            },
            "layers": [dict(sliding if self.has_window(i) else full) for i in range(self.layers)],
        }


def read_model_spec(folder: Path) -> JsonObject:
    """Reads the ``kvbaton.model`` description (without ``weights_digest``) of an MLX model folder.

    Raises:
        ExportError: the folder has no readable config, or holds a model whose cache is not described yet.
    """
    return read_config(folder).spec()


def read_config(folder: Path) -> ModelConfig:
    """Reads and checks ``config.json``.

    Raises:
        ExportError: a missing or malformed entry (``config``), or a model outside the supported ones
            (``architecture``); the message names the field and its value.
    """
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExportError(
            "config", f"cannot read {path}: {error.strerror or error}", path=str(path)
        ) from error
    except (ValueError, RecursionError) as error:
        raise ExportError("config", f"{path} is not valid JSON: {error}", path=str(path)) from error
    if not isinstance(raw, dict):
        raise ExportError("config", f"{path} holds {type(raw).__name__}, not an object", path=str(path))
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Turns the parsed ``config.json`` into a :class:`ModelConfig`; raises as :func:`read_config` does."""
    model_type = raw.get("model_type")
    if model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise _unsupported(raw, "model_type", f"known architectures are {known}")
    if raw.get("model_file") is not None:
        raise _unsupported(raw, "model_file", "models with their own code are not exported")
    if model_type == "gemma3_text":
        return _gemma3(raw)
    _refuse_other_attention(raw)

    hidden = _size(raw, "hidden_size")
    heads = _size(raw, "num_attention_heads")
    llama = model_type in ("llama", "mistral")
    kv_heads = _size(raw, "num_key_value_heads", heads if llama else None)
    _check_groups(heads, kv_heads)
    layers = _size(raw, "num_hidden_layers")
    _refuse_sliding_layers(raw, layers)
    head_dim = _head_dim(raw, hidden, heads)
    # Without an entry mlx-lm ties llama and qwen2; qwen3 has to say.
    tied = _flag(raw, "tie_word_embeddings", None if model_type == "qwen3" else True)
    bias = llama and _flag(raw, "attention_bias", False)
    return ModelConfig(
        architecture=model_type,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(raw, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_positive(raw, "rms_norm_eps"),
        rope=_rope(raw, model_type, head_dim),
        qkv_bias=bias or model_type == "qwen2",
        output_bias=bias,
        mlp_bias=llama and _flag(raw, "mlp_bias", False),
        head_norm=model_type == "qwen3",
        tied=tied,
        max_positions=_size(raw, "max_position_embeddings", 0) or None,
        quantization=_quantization(raw),
    )


def _gemma3(raw: Mapping[str, Any]) -> ModelConfig:
    """Gemma 3's text model. mlx-lm alternates by ``sliding_window_pattern`` and reads no ``layer_types``."""
    for field in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(field):
            raise _unsupported(raw, field, "mlx-lm does not compute it")
    if raw.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        raise _unsupported(raw, "hidden_activation", "only gelu_pytorch_tanh is exported")
    heads = _size(raw, "num_attention_heads", 4)
    kv_heads = _size(raw, "num_key_value_heads", 1)
    _check_groups(heads, kv_heads)
    layers = _size(raw, "num_hidden_layers", 26)
    hidden = _size(raw, "hidden_size", 1152)
    head_dim = _even(_size(raw, "head_dim", 256))
    windows = Windows(
        size=_size(raw, "sliding_window", 512),
        pattern=_size(raw, "sliding_window_pattern", 6),
        rope=Rope(_positive(raw, "rope_local_base_freq", 10000.0), head_dim, {"kind": "default"}),
    )
    kinds = raw.get("layer_types")
    pattern = ["sliding_attention" if windows.has(i) else "full_attention" for i in range(layers)]
    if kinds is not None and kinds != pattern:
        raise _unsupported(
            raw, "layer_types", f"mlx-lm has full attention in every layer of {windows.pattern} alone"
        )
    return ModelConfig(
        architecture="gemma3_text",
        vocab_size=_size(raw, "vocab_size", 262144),
        hidden_size=hidden,
        intermediate_size=_size(raw, "intermediate_size", 6912),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
        rope=Rope(_positive(raw, "rope_theta", 1e6), head_dim, _scaling(raw.get("rope_scaling"))),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        head_norm=True,
        tied=None,
        max_positions=_size(raw, "max_position_embeddings", 32768),
        quantization=_quantization(raw),
        windows=windows,
        gemma=Gemma(
            # mlx-lm rounds the scale to bfloat16.
            embedding_scale=_bfloat16(hidden**0.5),
            query_scale=_positive(raw, "query_pre_attn_scalar", 256.0) ** -0.5,
        ),
    )


def _bfloat16(value: float) -> float:
    """The nearest bfloat16, ties to even."""
    bits = int(np.float32(value).view(np.uint32))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.uint32(rounded).view(np.float32))


def _check_groups(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ExportError(
            "config",
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}",
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
        )


def _even(head_dim: int) -> int:
    if head_dim % 2:
        raise ExportError(
            "config", f"head_dim {head_dim} is odd, so it has no rotary pairs", head_dim=head_dim
        )
    return head_dim


def _unsupported(raw: Mapping[str, Any], field: str, why: str) -> ExportError:
    value = raw.get(field)
    return ExportError(
        "architecture",
        f"cannot export a model with {field} = {json.dumps(value)}: {why}",
        field=field,
        value=value,
    )


def _missing(field: str) -> ExportError:
    return ExportError("config", f"config.json has no {field}", field=field)


def _wrong(field: str, value: Any, wanted: str) -> ExportError:
    return ExportError(
        "config", f"config.json has {field} = {json.dumps(value)}, wanted {wanted}", field=field, value=value
    )


def _size(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = raw.get(field)
    if value is None:
        if default is None:
            raise _missing(field)
        return default
    most = _MOST.get(field, 2**31 - 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _wrong(field, value, f"a positive integer up to {most}")
    return value


def _positive(raw: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = raw.get(field)
    if value is None:
        if default is None:
            raise _missing(field)
        return default
    # Compared as it is: an integer may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST_FLOAT:
        raise _wrong(field, value, "a positive number")
    return float(value)


def _flag(raw: Mapping[str, Any], field: str, default: bool | None) -> bool:
    value = raw.get(field)
    if value is None:
        if default is None:
            raise _missing(field)
        return default
    if not isinstance(value, bool):
        raise _wrong(field, value, "true or false")
    return value


def _refuse_other_attention(raw: Mapping[str, Any]) -> None:
    """Settings that would make the cache or the activations differ from what the program computes."""
    if raw.get("hidden_act") not in (None, "silu", "swish"):
        raise _unsupported(raw, "hidden_act", "only silu is exported")
    if raw.get("rope_traditional"):
        raise _unsupported(raw, "rope_traditional", "only half-split rotary pairs are exported")
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise _unsupported(raw, "partial_rotary_factor", "only rotation of the whole head is exported")
    if raw.get("use_sliding_window"):
        raise _unsupported(raw, "use_sliding_window", "only full attention is exported")


def _refuse_sliding_layers(raw: Mapping[str, Any], layers: int) -> None:
    """Refuses a layer that is not full attention.

    A bare ``sliding_window`` (Mistral) passes: mlx-lm gives such a model full attention in every layer.
    """
    kinds = raw.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise _wrong("layer_types", kinds, f"one entry for each of {layers} layers")
    for index, kind in enumerate(kinds):
        if kind != "full_attention":
            raise ExportError(
                "architecture",
                f"cannot export a model with layer_types[{index}] = {json.dumps(kind)}: "
                "only full attention is exported",
                field="layer_types",
                value=kind,
                layer=index,
            )


def _head_dim(raw: Mapping[str, Any], hidden: int, heads: int) -> int:
    # mlx-lm asks qwen3 for it, and computes qwen2's whatever the config says.
    model_type = raw["model_type"]
    if model_type == "qwen3" or (model_type != "qwen2" and raw.get("head_dim") is not None):
        head_dim = _size(raw, "head_dim")
    else:
        head_dim, rest = divmod(hidden, heads)
        if rest:
            raise ExportError(
                "config",
                f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is absent",
                hidden_size=hidden,
                num_attention_heads=heads,
            )
    return _even(head_dim)


def _rope(raw: Mapping[str, Any], model_type: str, head_dim: int) -> Rope:
    theta = raw.get("rope_theta")
    scaling = raw.get("rope_scaling")
    nested = raw.get("rope_parameters")
    if nested:
        if not isinstance(nested, Mapping):
            raise _wrong("rope_parameters", nested, "an object")
        if model_type == "qwen3":
            theta = nested.get("rope_theta") if theta is None else theta
            scaling = nested if scaling is None else scaling
        elif nested.get("rope_theta") != theta or _scaling(nested) != _scaling(scaling):
            # mlx-lm's llama and qwen2 do not read rope_parameters: it would decode with other angles.
            raise _unsupported(
                raw, "rope_parameters", "mlx-lm reads rope_theta and rope_scaling, which do not say the same"
            )
    defaults = {"llama": 10000.0, "mistral": 10000.0, "qwen2": 1000000.0}
    given = {} if theta is None else {"rope_theta": theta}
    return Rope(
        theta=_positive(given, "rope_theta", defaults.get(model_type)),
        dims=head_dim,
        scaling=_scaling(scaling),
    )


def _scaling(scaling: Any) -> JsonObject:
    """Normalises ``rope_scaling``; defaults are those of mlx-lm's ``Llama3RoPE``."""
    if not scaling:
        return {"kind": "default"}
    if not isinstance(scaling, Mapping):
        raise _wrong("rope_scaling", scaling, "an object")
    kind = scaling.get("type") or scaling.get("rope_type", "default")
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise _unsupported(scaling, "partial_rotary_factor", "only rotation of the whole head is exported")
    if kind == "default":
        return {"kind": "default"}
    if kind == "linear":
        return {"kind": "linear", "factor": _positive(scaling, "factor")}
    if kind == "llama3":
        return {
            "kind": "llama3",
            "factor": _positive(scaling, "factor"),
            "low_freq_factor": _positive(scaling, "low_freq_factor", 1.0),
            "high_freq_factor": _positive(scaling, "high_freq_factor", 4.0),
            "original_max_position_embeddings": _size(scaling, "original_max_position_embeddings", 8192),
        }
    raise ExportError(
        "architecture",
        f"cannot export a model with rope_scaling type = {json.dumps(kind)}: "
        "known types are default, linear, llama3",
        field="rope_scaling",
        value=kind,
    )


def _quantization(raw: Mapping[str, Any]) -> JsonObject | None:
    """The ``quantization`` entry that mlx-lm writes; every other scheme is refused."""
    entry = raw.get("quantization")
    if entry is None:
        if raw.get("quantization_config"):
            raise _unsupported(raw, "quantization_config", "only MLX affine quantisation is read")
        return None
    if not isinstance(entry, dict):
        raise _wrong("quantization", entry, "an object")
    for place, part in [("quantization", entry)] + [
        (f"quantization.{name}", part) for name, part in entry.items() if isinstance(part, dict)
    ]:
        mode = part.get("mode", "affine")
        if mode != "affine":
            raise ExportError(
                "architecture",
                f"cannot export a model with {place}.mode = {json.dumps(mode)}: only affine is read",
                field=f"{place}.mode",
                value=mode,
            )
    return entry
