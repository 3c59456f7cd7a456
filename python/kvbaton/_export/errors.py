"""The one exception of the exporter: a kind for programs, a sentence for people."""

from __future__ import annotations

from typing import Any


class ExportError(ValueError):
    """Says why a model cannot be exported.

    ``kind`` is one of ``architecture``, ``config``, ``weights``, ``overflow``, ``buckets``, ``output`` and
    ``dependency``. ``fields`` holds the values the message names (JSON types only).
    """

    def __init__(self, kind: str, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.fields: dict[str, Any] = fields
