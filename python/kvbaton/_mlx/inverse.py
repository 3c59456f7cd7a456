"""Whether Core ML writes its outputs into memory that MLX owns.

From MLX 0.32.4 on, foreign memory is copied at the first write, so the way without a copy would be the inverse of
adopting: output backings in arrays that MLX allocated. Nobody has measured that Core ML uses them. Until this probe
says so on the machine at hand, rows are copied; nothing else in kvbaton relies on it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from .. import _native
from ..errors import UnavailableError
from .adopting import PAGE_BYTES


@dataclass(frozen=True)
class Inverse:
    """What was measured.

    ``engine`` is ``coreml``, or ``fake`` where there is none. ``used`` when it returned the very array that it was
    offered, ``seen`` when MLX then sees the values, ``stayed`` when MLX's array is still where it was.
    ``bytes_into_page`` is where in a page it starts. What no address shows is a copy inside the runtime.
    """

    engine: str
    mlx: str
    backend: str
    used: bool
    seen: bool
    stayed: bool
    bytes_into_page: int

    @property
    def works(self) -> bool:
        """Whether the output was written where MLX has its array."""
        return self.used and self.seen and self.stayed

    def to_dict(self) -> dict[str, Any]:
        """All of it, for reports."""
        return {**asdict(self), "works": self.works}


def probe() -> Inverse:
    """Measures it.

    Raises:
        UnavailableError: MLX is not installed.
    """
    try:
        import mlx.core as core
    except ImportError as error:
        raise UnavailableError(f"mlx is needed: {error}", hint="pip install 'kvbaton[mlx]'") from error
    mx: Any = core
    # A page of MLX's own: smaller arrays share one.
    array = mx.zeros((PAGE_BYTES // 2,), dtype=mx.float16)
    mx.eval(array)
    address = _native.address(array)
    found = json.loads(_native.write_into(("output", array, "float16")))
    written = array[: found["elements"]] == found["value"]
    rest = array[found["elements"] :] == 0
    seen = bool(mx.all(written)) and bool(mx.all(rest))
    return Inverse(
        engine=found["engine"],
        mlx=str(mx.__version__),
        backend="metal" if mx.metal.is_available() else "cpu",
        used=found["used"],
        seen=seen,
        stayed=_native.address(array) == address,
        bytes_into_page=address % PAGE_BYTES,
    )
