"""Exceptions of kvbaton: one base, a subclass for each kind of failure."""

from __future__ import annotations

import json
from typing import Any, ClassVar

__all__ = [
    "CapacityError",
    "EmptyPromptError",
    "IncompatibleError",
    "InternalError",
    "InterruptedRunError",
    "KvbatonError",
    "LayoutError",
    "LeaseError",
    "ModelError",
    "OverflowInCacheError",
    "PackageError",
    "ProgramError",
    "PromptTooLongError",
    "StorageError",
    "UnavailableError",
    "UsageError",
]


class KvbatonError(Exception):
    """A failure said in one line.

    ``kind`` is its stable name, the same as in the command line's JSON; ``hint`` says what to do about it;
    ``fields`` holds the values that the message names.
    """

    default_kind: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        hint: str | None = None,
        fields: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind or self.default_kind
        self.hint = hint
        self.fields: dict[str, Any] = dict(fields or {})


class UsageError(KvbatonError, ValueError):
    """The request itself is wrong."""

    default_kind = "usage"


class EmptyPromptError(KvbatonError, ValueError):
    """The prompt has no tokens."""

    default_kind = "empty_prompt"


class PromptTooLongError(KvbatonError, ValueError):
    """The prompt does not fit the package."""

    default_kind = "prompt_too_long"


class IncompatibleError(KvbatonError, ValueError):
    """Model, package or cache do not belong together."""

    default_kind = "incompatible"


class PackageError(KvbatonError, ValueError):
    """A Core ML package cannot be read."""

    default_kind = "package"


class ProgramError(KvbatonError, ValueError):
    """A Core ML program cannot be run."""

    default_kind = "program"


class ModelError(KvbatonError, ValueError):
    """A model folder cannot be read."""

    default_kind = "model"


class LayoutError(KvbatonError, ValueError):
    """A layout cannot be read, or does not fit the tensors."""

    default_kind = "layout"


class CapacityError(KvbatonError, ValueError):
    """More rows than the target holds."""

    default_kind = "capacity"


class OverflowInCacheError(KvbatonError, ValueError):
    """Values that the target's type cannot hold."""

    default_kind = "overflow"


class LeaseError(KvbatonError, RuntimeError):
    """A buffer is in use."""

    default_kind = "lease"


class StorageError(KvbatonError, OSError):
    """Reading or writing a file failed."""

    default_kind = "io"


class UnavailableError(KvbatonError, ImportError):
    """Something that this installation lacks."""

    default_kind = "unavailable"


class InterruptedRunError(KvbatonError):
    """Stopped from outside."""

    default_kind = "interrupted"


class InternalError(KvbatonError, RuntimeError):
    """kvbaton itself failed."""

    default_kind = "internal"


_BY_KIND: dict[str, type[KvbatonError]] = {cls.default_kind: cls for cls in KvbatonError.__subclasses__()}


def make(kind: str, message: str, hint: str | None, fields: str) -> KvbatonError:
    """The exception for an error of the native module; ``fields`` is JSON."""
    cls = _BY_KIND.get(kind, KvbatonError)
    return cls(message, kind=kind, hint=hint, fields=json.loads(fields))
