"""The file that says how the packages of a split model follow one another."""

from __future__ import annotations

from collections.abc import Sequence

CHAIN = "chain.toml"


def chain_toml(packages: Sequence[str]) -> str:
    """The chain of packages that state themselves, in their order."""
    lines = ["# Packages of one model, in the order in which a prompt passes them.", "format = 1"]
    for package in packages:
        lines += ["", "[[stage]]", f'package = "{package}"']
    return "\n".join(lines) + "\n"
