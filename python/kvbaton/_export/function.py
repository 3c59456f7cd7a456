"""What one function of a package computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from .config import ModelConfig
from .errors import ExportError

Kind = Literal["prefill", "decode"]

FUNCTIONS_KEY = "kvbaton.functions"
"""The metadata key under which a package says what its functions are."""


@dataclass(frozen=True)
class Part:
    """Layers ``first..end`` of a model: the first part begins with the embeddings, the last ends with the head."""

    first: int
    end: int
    layers: int

    @property
    def embeds(self) -> bool:
        """Whether it takes token ids, and not the hidden states of the part before."""
        return self.first == 0

    @property
    def ends(self) -> bool:
        """Whether it gives logits, and not hidden states."""
        return self.end == self.layers


@dataclass(frozen=True)
class FunctionPlan:
    """One function: ``rows`` tokens at once, after a past of up to ``context`` rows where there is one."""

    kind: Kind
    rows: int
    context: int | None = None

    @property
    def name(self) -> str:
        """Its name in the package."""
        if self.kind == "decode":
            return "decode"
        return f"prefill_{self.rows}" + (f"_of_{self.context}" if self.context else "")

    def json(self) -> dict[str, Any]:
        """Its entry under :data:`FUNCTIONS_KEY`."""
        entry = {"name": self.name, "kind": self.kind, "tokens": self.rows}
        return entry if self.context is None else {**entry, "context": self.context}


def plan_functions(
    config: ModelConfig,
    kind: Kind,
    buckets: tuple[int, ...],
    contexts: tuple[int, ...],
    chunk: int,
) -> tuple[FunctionPlan, ...]:
    """The functions of a package: a prefill for every bucket, a chunk for every context; or one decode step.

    Raises:
        ExportError: an unknown kind, lengths that no prompt has, contexts beyond what the model was made for
            (``buckets``).
    """
    if kind not in get_args(Kind):
        raise ExportError(
            "output", f"unknown kind {kind!r}, wanted one of {', '.join(get_args(Kind))}", kind=kind
        )
    for size in contexts:
        _check_length(config, "context", size)
    if kind == "decode":
        if len(contexts) != 1:
            raise ExportError(
                "buckets",
                f"a decode package has one context, {len(contexts)} were given",
                contexts=list(contexts),
            )
        return (FunctionPlan("decode", 1, contexts[0]),)
    sizes = tuple(sorted(set(buckets)))
    if not sizes and not contexts:
        raise ExportError("buckets", "no bucket given: a package needs at least one length", buckets=[])
    for size in sizes:
        _check_length(config, "bucket", size)
    if contexts:
        _check_length(config, "chunk", chunk)
        if chunk > min(contexts):
            raise ExportError(
                "buckets",
                f"a chunk of {chunk} tokens is longer than the context of {min(contexts)}",
                chunk=chunk,
                context=min(contexts),
            )
    chunks = [FunctionPlan("prefill", chunk, context) for context in sorted(set(contexts))]
    return (*(FunctionPlan("prefill", size) for size in sizes), *chunks)


def _check_length(config: ModelConfig, what: str, size: int) -> None:
    if size < 1:
        raise ExportError("buckets", f"a {what} of {size} tokens cannot hold a prompt", **{what: size})
    if config.max_positions is not None and size > config.max_positions:
        raise ExportError(
            "buckets",
            f"a {what} of {size} tokens is longer than max_position_embeddings {config.max_positions}",
            **{what: size, "max_position_embeddings": config.max_positions},
        )


def split_layers(layers: int, parts: int) -> tuple[Part, ...]:
    """``parts`` runs of layers, as even as they can be.

    Raises:
        ExportError: more parts than layers, or none (``output``).
    """
    if not 1 <= parts <= layers:
        raise ExportError(
            "output", f"{layers} layers cannot be split into {parts} parts", layers=layers, split=parts
        )
    edges = [round(index * layers / parts) for index in range(parts + 1)]
    return tuple(Part(first, end, layers) for first, end in zip(edges, edges[1:], strict=False))
