"""What is run: one thing varied at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
MODELS = ("smollm2-135m", "gemma3-270m")

# Tokens of the reference's continuation; prompt and continuation together fill the context.
CONTINUATION = 32


@dataclass(frozen=True)
class Cell:
    """One setting: a package's precision, the executor's rounding, the decoder's type and a context."""

    model: str
    context: int
    package: str = "fp16"
    numerics: str = "f16-storage"
    decoder: str = "float32"

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.model}-{self.context}-{self.package}-{self.numerics}-{self.decoder}"

    @property
    def prompts(self) -> int:
        """32 up to 1,024 tokens, fewer where each takes minutes."""
        return 32 if self.context <= 1024 else 8 if self.context == 2048 else 4

    def to_dict(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


def cells() -> Iterator[Cell]:
    """All cells, the cheapest and most telling first: contexts, then what is varied."""
    for context in CONTEXTS:
        for model in MODELS:
            base = Cell(model, context)
            yield base
            for numerics in ("f32", "f16-accumulate"):
                yield replace(base, numerics=numerics)
            for package in ("int8", "int4-block32"):
                yield replace(base, package=package)
            yield replace(base, decoder="bfloat16")
