"""What is run: one thing varied at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
MODELS = ("smollm2-135m", "gemma3-270m")
DECODERS = ("float32", "bfloat16")

# Tokens of the reference's continuation; prompt and continuation together fill the context.
CONTINUATION = 32

# Passages of text that there are; cells of fewer prompts take every so-manieth.
PASSAGES = 32

# The passages that cells of every context have; those that are added up to 2,048 tokens; and the rest, up to 1,024.
ROUNDS = (range(0, PASSAGES, 8), range(4, PASSAGES, 8), [p for p in range(PASSAGES) if p % 4])

# Contexts whose prompts are cut from one prefill, the longest. A row of a cache depends on the tokens up to it
# alone, and the executor gives it the same bits in a longer prompt, so nothing is changed by that. A window that
# has moved on has lost the rows that a shorter prompt needs.
SPANS = {
    "smollm2-135m": (
        ((128, 256, 512, 1024), (2048,), (4096,), (8192,)),
        ((128, 256, 512, 1024, 2048),),
        ((128, 256, 512, 1024),),
    ),
    "gemma3-270m": (
        ((128, 256, 512), (1024,), (2048,), (4096,), (8192,)),
        ((128, 256, 512), (1024,), (2048,)),
        ((128, 256, 512), (1024,)),
    ),
}


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
    def passages(self) -> range:
        """The passages that its prompts begin: 32 up to 1,024 tokens, fewer where each takes minutes."""
        return range(
            0, PASSAGES, PASSAGES // (32 if self.context <= 1024 else 8 if self.context == 2048 else 4)
        )

    @property
    def prompts(self) -> int:
        """How many prompts it has."""
        return len(self.passages)

    def to_dict(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


# The base, and what differs from it, one thing at a time.
SETTINGS: tuple[dict[str, str], ...] = (
    {},
    {"numerics": "f32"},
    {"numerics": "f16-accumulate"},
    {"package": "int8"},
    {"package": "int4-block32"},
    {"decoder": "bfloat16"},
)


def cells() -> Iterator[Cell]:
    """All cells, the cheapest first: contexts, then what is varied."""
    for context in CONTEXTS:
        for model in MODELS:
            for setting in SETTINGS:
                yield Cell(model, context, **setting)


@dataclass(frozen=True)
class Prefills:
    """Prompts that are prefilled once, and the cells that take them or their beginnings."""

    cells: tuple[Cell, ...]
    passages: tuple[int, ...]

    @property
    def longest(self) -> Cell:
        """The cell whose prompts they are."""
        return max(self.cells, key=lambda cell: cell.context)


def prefills() -> Iterator[Prefills]:
    """Every prompt of every cell, each once, in an order that may be stopped anywhere.

    First come the passages that every context has: in all cells up to 1,024 tokens, then in the base cells
    beyond, then in the others. The base cells' other passages follow, and those of the others are last.
    """
    work = []
    for model, rounds in SPANS.items():
        for at, spans in enumerate(rounds):
            for span in spans:
                late = max(span) == max(CONTEXTS)
                settings: dict[tuple[str, ...], list[Cell]] = {}
                for cell in (Cell(model, context, **s) for s in SETTINGS for context in span):
                    # Both decoders share a prefill, but not where a reference costs as much as all before it.
                    key = (cell.package, cell.numerics, cell.decoder if late else "")
                    settings.setdefault(key, []).append(cell)
                for order, found in enumerate(settings.values()):
                    base, long = order == 0, max(span) > 1024
                    turn = (3 if base else 4) if at else (1 if base else 2) if long else 0
                    key_of_work = (turn, max(span), order) if turn < 2 else (turn, late, order, max(span))
                    work.append((key_of_work, Prefills(tuple(found), tuple(ROUNDS[at]))))
    yield from (some for _, some in sorted(work, key=lambda w: w[0]))
