"""Which slot holds which token, from a layout's rules."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _native
from ..errors import LayoutError

Spec = Mapping[str, Any]

MOVING = frozenset({"right", "ring-indexed", "ring-from"})
"""Placements in which rows may change their slots when tokens are added."""


@dataclass(frozen=True)
class Rules:
    """A layout's text, and what it says of rows."""

    text: str
    parsed: dict[str, Any]

    @classmethod
    def read(cls, layout: str) -> Rules:
        """A preset's name or TOML text."""
        text = layout if "\n" in layout else _native.layout_toml(layout)
        try:
            parsed = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise LayoutError(f"not a layout: {error}") from error
        if not parsed.get("tensor"):
            raise LayoutError(f"layout `{parsed.get('name', '')}` has no tensors to fill")
        return cls(text, parsed)

    def placements(self) -> set[str]:
        """All placements that rules use."""
        found = {self.parsed.get("placement", "left")}
        for rule in (self.parsed, *self.parsed["tensor"]):
            found |= {rule[key] for key in ("placement", "sliding_placement") if key in rule}
        return found

    def batches(self) -> bool:
        """Whether tensors hold several sequences."""
        return any("batch" in rule["axes"] for rule in self.parsed["tensor"])

    def single_row_blocks(self) -> bool:
        """Whether a paged cache's blocks are single rows."""
        return any("block" in rule["axes"] and "row" not in rule["axes"] for rule in self.parsed["tensor"])

    def of_layer(self, index: int, spec: Spec) -> tuple[dict[str, Any], str] | None:
        """The rule of a layer's keys, and the placement of its rows."""
        for rule in self.parsed["tensor"]:
            if rule["holds"] not in ("key", "key-and-value") or rule.get("role", "elements") != "elements":
                continue
            layers = rule.get("layers", "all")
            if layers in ("all", spec["kind"]) or (isinstance(layers, list) and index in layers):
                return rule, self._placement(rule, spec["kind"] == "sliding")
        return None

    def _placement(self, rule: Mapping[str, Any], sliding: bool) -> str:
        order = [(rule, "placement"), (self.parsed, "placement")]
        if sliding:
            order = [(rule, "sliding_placement"), (rule, "placement"), (self.parsed, "sliding_placement")]
            order.append((self.parsed, "placement"))
        return next((str(of[key]) for of, key in order if key in of), "left")


def holds_layer(name: str, template: str, layer: int) -> bool:
    """Whether a tensor of this name may hold a layer, by its rule's template: ``{layer}`` is its number."""
    pieces = re.split(r"(\{[^}]*\})", template.replace("{layer}", str(layer)))
    pattern = "".join(_placeholder(p) if p.startswith("{") else re.escape(p) for p in pieces)
    return re.fullmatch(pattern, name) is not None


def _placeholder(text: str) -> str:
    choices = text[1:-1].split("|")
    return f"({'|'.join(map(re.escape, choices))})" if len(choices) > 1 else r"\d+"


def moving_layers(rules: Rules, layers: Sequence[Spec], seen: int) -> list[int]:
    """Layers whose old rows are not where they were once ``seen`` tokens are there."""
    moved = []
    for index, spec in enumerate(layers):
        found = rules.of_layer(index, spec) if spec["kind"] in ("full", "sliding") else None
        if found is None or found[1] not in MOVING:
            continue
        window = spec.get("window")
        still = found[1] == "ring-indexed" and (window is None or seen <= window["size"])
        if not still:
            moved.append(index)
    return moved


def row_slots(rule: Mapping[str, Any], shape: Sequence[int]) -> int | None:
    """Slots along the row axis, where it is a dimension of its own."""
    words: list[str] = []
    depth = 0
    for word in rule["axes"].replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            words.append("")
        depth += {"(": 1, ")": -1}.get(word, 0)
        if depth == 0 and word != ")":
            words.append(word)
    return shape[words.index("row")] if "row" in words and "block" not in rule["axes"] else None


def positions(placement: str, slots: int, seen: int, spec: Spec, live: Mapping[str, Any]) -> npt.NDArray[Any]:
    """The position in every slot, −1 where there is none."""
    found = np.full(slots, -1, np.int64)
    window = spec.get("window")
    keep = window["keep"] if window else 0
    held = min(seen, slots)
    newest = np.arange(seen - held, seen)
    if placement == "left":
        found[:held] = np.arange(held)
    elif placement == "left-padded":
        pad = live.get("pad") or 0
        found[pad : pad + seen] = np.arange(seen)
    elif placement == "right":
        found[slots - held :] = newest
    elif placement == "ring":
        found[newest % max(slots, 1)] = newest
    elif placement == "ring-from":
        found[((live.get("ring_start") or 0) + np.arange(held)) % max(slots, 1)] = newest
    elif placement == "ring-indexed":
        found[:held] = np.concatenate([np.arange(keep), newest[keep:]]) if seen > slots else newest
    return found


def mask(found: npt.NDArray[Any], seen: int, spec: Spec, away: float) -> npt.NDArray[np.float16]:
    """The additive mask of the next token over the slots: 0 where it reads, ``away`` elsewhere."""
    window = spec.get("window")
    read = found >= 0
    if window is not None:
        read &= (found > seen - (window["size"] - window["keep"])) | (found < window["keep"])
    return np.where(read, 0.0, away).astype(np.float16)[None, None, None, :]
