"""What is run: one thing varied at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
MODELS = ("smollm2-135m", "gemma3-270m")
DECODERS = ("float32", "bfloat16")

# Tokens of the reference's continuation; prompt and continuation together fill the context.
CONTINUATION = 32

# Passages of text that there are; cells of fewer prompts take every so-manieth.
PASSAGES = 32

# Contexts whose prompts are cut from one prefill, the longest. A row of a cache depends on the tokens up to it
# alone, and the executor gives it the same bits in a longer prompt, so nothing is changed by that. A window that
# has moved on has lost the rows that a shorter prompt needs.
SPANS = {
    "smollm2-135m": ((128, 256, 512, 1024), (2048,), (2048, 4096, 8192)),
    "gemma3-270m": ((128, 256, 512), (1024,), (2048,), (4096,), (8192,)),
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


def cells() -> Iterator[Cell]:
    """All cells, the cheapest first: contexts, then what is varied."""
    for context in CONTEXTS:
        for model in MODELS:
            base = Cell(model, context)
            yield base
            for numerics in ("f32", "f16-accumulate"):
                yield replace(base, numerics=numerics)
            for package in ("int8", "int4-block32"):
                yield replace(base, package=package)
            yield replace(base, decoder="bfloat16")


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
    """Every cell's prompts, each once, in the order of their cost; of equal ones the base cells' first."""
    every = list(cells())
    work = []
    for model, spans in SPANS.items():
        for span in spans:
            inside = [c for c in every if c.model == model and c.context in span]
            longest = next(c for c in inside if c.context == max(span))
            taken = set(longest.passages)
            # A passage that a longer span holds is not prefilled for a shorter one.
            for other in spans:
                if other != span and set(span) <= set(other):
                    taken -= set(Cell(model, max(other)).passages)
            settings: dict[tuple[str, str], list[Cell]] = {}
            for cell in inside:
                settings.setdefault((cell.package, cell.numerics), []).append(cell)
            work += [Prefills(tuple(found), tuple(sorted(taken))) for found in settings.values()]
    settings_in_order = [(c.package, c.numerics) for c in every]

    def cost(some: Prefills) -> tuple[int, int]:
        cell = some.longest
        return cell.context, settings_in_order.index((cell.package, cell.numerics))

    yield from sorted(work, key=cost)
