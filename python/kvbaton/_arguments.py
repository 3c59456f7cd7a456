"""Arguments from outside: one that is of no use is refused by name, before anything else is touched."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from .errors import UsageError

_LARGEST_ID = 2**32 - 1
_MOST_THREADS = 1024
LARGEST = 2**63 - 1
"""What a count may be at most."""


def whole(value: Any, name: str, least: int = 0, most: int = LARGEST) -> int:
    """``value`` as an ``int``: Python's, numpy's or MLX's, of ``least`` to ``most``.

    Raises:
        UsageError: it is no whole number, or not one of those.
    """
    try:
        number = operator.index(value)
    except (TypeError, ValueError) as error:
        raise _wrong(name, value, "is no whole number") from error
    if isinstance(value, bool):
        raise _wrong(name, value, "is no whole number")
    if not least <= number <= most:
        raise _wrong(name, number, f"is not from {least} to {most}")
    return number


def maybe_whole(value: Any, name: str) -> int | None:
    """As :func:`whole`, where something was said."""
    return None if value is None else whole(value, name)


def threads(value: Any) -> int:
    """A number of threads, 0 for all cores. Each one is started: tens of thousands would bring a machine down."""
    return whole(value, "threads", most=_MOST_THREADS)


def wholes(values: Any, name: str, most: int = LARGEST, least: int = 0) -> list[int]:
    """A list of whole numbers, from anything that gives them one by one."""
    if isinstance(values, str | bytes | bytearray):
        raise _wrong(name, values, "are no whole numbers")
    try:
        given = list(values)
    except TypeError as error:
        raise _wrong(name, values, "are no whole numbers") from error
    # A long prompt's ids pass in one go; one that is wrong is looked for by itself.
    try:
        found = list(map(operator.index, given))
    except (TypeError, ValueError):
        found = []
    if found and least <= min(found) and max(found) <= most and bool not in map(type, given):
        return found
    return [whole(value, f"{name}[{at}]", least, most) for at, value in enumerate(given)]


def ids(tokens: Iterable[int], name: str = "tokens") -> list[int]:
    """Ids of tokens."""
    return wholes(tokens, name, _LARGEST_ID)


def numbers(tokens: Iterable[int]) -> list[int]:
    """Ids of tokens that are yet to be looked up in a vocabulary, which says more of a wrong one."""
    return wholes(tokens, "tokens", least=-LARGEST)


def seconds(value: Any, name: str) -> float | None:
    """A number of seconds, where something was said.

    Raises:
        UsageError: it is no number.
    """
    if value is None:
        return None
    if isinstance(value, str | bytes | bool):
        raise _wrong(name, value, "is no number of seconds")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _wrong(name, value, "is no number of seconds") from error
    return number


def maybe_callable(value: Any, name: str) -> Any:
    """What can be called, where something was said."""
    if value is not None and not callable(value):
        raise _wrong(name, value, "cannot be called")
    return value


def text(value: Any, name: str) -> str:
    """A ``str`` that can be written down.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(value, str):
        raise _wrong(name, value, "is no text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _wrong(name, value, "has half of a surrogate pair") from error
    return value


def maybe_text(value: Any, name: str) -> str | None:
    """As :func:`text`, where something was said."""
    return None if value is None else text(value, name)


def layout(value: Any) -> str:
    """A preset's name, or a layout's TOML: the text, or the file that holds it.

    Raises:
        UsageError: it is neither, or the file cannot be read.
    """
    named = isinstance(value, str) and value.endswith(".toml") and "\n" not in value
    if not named and not isinstance(value, os.PathLike):
        return text(value, "layout")
    try:
        # With a line break: text of one line would be taken for a name.
        return Path(value).read_text(encoding="utf-8-sig") + "\n"
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"layout `{value}` cannot be read: {why}", fields={"layout": str(value)}) from error


def path(value: Any, name: str) -> str:
    """The path of a file or a folder.

    Raises:
        UsageError: it is none.
    """
    try:
        found = os.fspath(value)
    except TypeError as error:
        raise _wrong(name, value, "is no path") from error
    return text(found, name)


def document(values: Any, name: str) -> str:
    """What each layer keeps, as JSON; numpy's numbers are numbers.

    Raises:
        UsageError: it is no sequence, or holds what JSON has no words for.
    """
    try:
        return json.dumps(list(values), default=operator.index, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _wrong(name, values, "does not say what each layer keeps") from error


def facts(value: Any, name: str) -> str:
    """What is known of a model, as JSON; numpy's numbers are numbers.

    Raises:
        UsageError: it is no mapping, or holds what JSON has no words for.
    """
    try:
        return json.dumps(dict(value), default=operator.index)
    except (TypeError, ValueError) as error:
        raise _wrong(name, value, "does not say what a model is") from error


T = TypeVar("T")


def instance(value: Any, kind: type[T], name: str) -> T:
    """``value``, which must be of a class.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(value, kind):
        raise _wrong(name, value, f"is no {kind.__name__}")
    return value


def _wrong(name: str, value: Any, problem: str) -> UsageError:
    shown = " ".join(repr(value).split())
    shown = shown if len(shown) <= 80 else f"{shown[:79]}…"
    verb = "are" if problem.startswith("are") else "is"
    known = value if isinstance(value, int) else shown
    return UsageError(f"{name} {verb} {shown}, which {problem}", fields={"argument": name, "value": known})
