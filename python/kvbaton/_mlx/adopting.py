"""Whether MLX takes memory over that it does not own.

Where it does (Metal), caches can lie in the surfaces that the Neural Engine wrote, without a copy.
It is free only when two things hold, and both differ by version and back end: an array on foreign memory must
*be* on that memory, and a write to it must happen in place. MLX 0.32.3 and earlier write in place, later versions
copy the whole capacity at the first step. Both must say yes: what is known of the version, and addresses, which
are measured. A version alone proves nothing, and a small array that happened to stay proves little about a version
that is known to copy.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _native
from ..cache import CacheView
from ..errors import KvbatonError, UnavailableError
from ..report import HandoffReport
from .decoder import Decoder, make_caches
from .slots import flatten

COPIES_FROM = (0, 32, 4)
"""The first MLX that copies foreign memory at the first write, as its source says."""

PAGE_BYTES = 16_384
"""A page of Apple silicon: where memory must start that Metal is to take over."""


@dataclass(frozen=True)
class Adoption:
    """What was measured.

    ``wraps`` when an array was on the memory it was given, ``donates`` when a write then happened there, and
    ``copied_bytes`` those that the write moved. ``how`` is the route, ``because`` what spoke against it.
    """

    mlx: str
    backend: str
    wraps: bool
    donates: bool
    copied_bytes: int
    how: str
    because: str | None

    @property
    def known(self) -> bool:
        """Whether this version is known to write foreign memory in place."""
        return _version(self.mlx) < COPIES_FROM

    @property
    def free(self) -> bool:
        """Whether adopting copies nothing, neither now nor at the first step."""
        return self.wraps and self.donates and self.known

    @property
    def sentence(self) -> str:
        """What was decided, and how it is known."""
        who = f"MLX {self.mlx} on {self.backend}"
        first = ".".join(map(str, COPIES_FROM))
        if not (self.wraps and self.donates):
            return f"copied, not adopted: {who}: {self.because}, as measured by addresses"
        if not self.known:
            return (
                f"copied, not adopted: {who}: a small array stayed in place when measured, but versions from "
                f"{first} on are known to copy at the first write"
            )
        return f"{who} takes memory over and writes it in place, as measured by addresses and known before {first}"

    def to_dict(self) -> dict[str, Any]:
        """All of it, for reports."""
        return {**asdict(self), "known": self.known, "free": self.free}


def _version(text: str) -> tuple[int, ...]:
    """The numbers of a version; what is no number ends them."""
    parts = []
    for part in text.split("."):
        digits = "".join(itertools.takewhile(str.isdigit, part))
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def aligned(shape: tuple[int, ...], dtype: Any = np.float16) -> npt.NDArray[Any]:
    """A zeroed array that starts on a page and whose memory ends with one."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    whole = np.zeros(-(-size // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES, np.uint8)
    lead = -whole.ctypes.data % PAGE_BYTES
    array: npt.NDArray[Any] = whole[lead : lead + size].view(dtype).reshape(shape)
    return array


@functools.cache
def probe() -> Adoption:
    """Measures it, once a process.

    Raises:
        UnavailableError: MLX is not installed.
    """
    try:
        import mlx.core as mx
    except ImportError as error:
        raise UnavailableError(f"mlx is needed: {error}", hint="pip install 'kvbaton[mlx]'") from error
    backend = "metal" if mx.metal.is_available() else "cpu"
    return measure(mx, backend)


def measure(mx: Any, backend: str) -> Adoption:
    """The measurement itself, with ``mx`` in MLX's place."""
    memory = aligned((1, 2, 64, 64))
    address = memory.ctypes.data
    result = functools.partial(Adoption, str(mx.__version__), backend)
    how = "mlx.core.from_dlpack"
    try:
        array = mx.from_dlpack(memory)
        mx.eval(array)
        wraps = _native.address(array) == address
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        return result(False, False, 0, how, f"{type(error).__name__}: {error}")
    if not wraps:
        return result(False, False, 0, how, "the array is on other memory: MLX copied")
    # What a decode step does to a cache: one row, in place if MLX may.
    array[..., 3:4, :] = mx.ones((1, 2, 1, 64), dtype=array.dtype)
    mx.eval(array)
    in_place = _native.address(array) == address and bool((memory[..., 3, :] == 1).all())
    copied = 0 if in_place else memory.nbytes
    because = None if in_place else "the first write moved the array to MLX's own memory"
    return result(True, in_place, copied, how, because)


_adopted = False


def settle(engine: _native.NativePrefill) -> None:
    """Waits for MLX's work on memory that it took over, and tells ``engine``, which may then write there again.

    The engine itself refuses to as long as MLX has the memory, and until this was said.
    """
    if not _adopted:
        return
    import mlx.core as mx

    mx.synchronize()
    # mlx-lm decodes on a stream of its own.
    stream = getattr(sys.modules.get("mlx_lm.generate"), "generation_stream", None)
    if stream is not None:
        mx.synchronize(stream)
    engine.settle()


@dataclass(frozen=True)
class Adopted:
    """Caches that lie in their producer's memory."""

    caches: list[Any]
    report: HandoffReport


def adopt(cache: CacheView, decoder: Decoder, model: Any, rows: int, dtype: Any | None) -> Adopted | str:
    """Caches of ``model`` on the memory of ``cache``, which is given away; or why not, and then nothing changed.

    Every array's address is compared with the memory's: what MLX copied is not called adopted.
    """
    global _adopted
    because = _against(cache, decoder, dtype)
    if because is not None:
        return because
    import mlx.core as mx

    caches = make_caches(model)
    slots = flatten(caches, decoder.slots)
    wanted = [(layer, part) for layer in range(len(slots)) for part in ("key", "value")]
    try:
        loans = _native.view_lend(cache._native, wanted, rows)
        _adopted = True
        arrays = [mx.from_dlpack(np.asarray(loan)) for loan in loans]
        mx.eval(arrays)
    except (KvbatonError, AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        return str(error)
    on_memory = [_native.address(a) == loan.address for a, loan in zip(arrays, loans, strict=True)]
    if not all(on_memory):
        return f"MLX copied {on_memory.count(False)} of {len(arrays)} arrays instead of taking them over"
    cache._give_away()
    for slot, keys, values in zip(slots, arrays[::2], arrays[1::2], strict=True):
        slot.cache.keys, slot.cache.values, slot.cache.offset = keys, values, rows
    report = HandoffReport.empty(0.0)
    report.path, report.rows = "adopt", rows
    report.because = (
        f"MLX {probe().mlx} took all {len(arrays)} arrays over: their addresses are the producer's, and a write "
        "to memory like it happened in place"
    )
    return Adopted(caches, report)


def _against(cache: CacheView, decoder: Decoder, dtype: Any | None) -> str | None:
    """What speaks against adopting before anything is tried."""
    if not cache.adoptable:
        return "the memory is not an engine's own"
    measured = probe()
    if not measured.free:
        return measured.sentence.removeprefix("copied, not adopted: ")
    if dtype is not None and str(dtype).rpartition(".")[2] != "float16":
        return f"the caches are to be {dtype}, the memory is float16"
    classes = {slot.kind for slot in decoder.slots}
    if classes != {"KVCache"}:
        return f"the decoder has caches of {', '.join(sorted(classes))}"
    own: Sequence[str] = sorted(
        {str(t).rpartition(".")[2] for kept in decoder.kept for t in kept.dtypes.values()}
    )
    if own != ["float16"]:
        return f"the decoder writes {', '.join(own)}, the memory is float16"
    if len(json.loads(cache._native.cache)) != len(decoder.slots):
        return "the decoder has another number of caches than the cache has layers"
    return None
