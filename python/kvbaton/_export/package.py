"""From functions to a ``.mlpackage`` folder."""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from .errors import ExportError


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences coremltools: its log lines, warnings and progress bars say nothing a user can act on."""
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Raises a Ctrl-C of the block at its end, for code that would swallow it.

    Only Python's own handler in the main thread is replaced: elsewhere the interrupt does not raise in this
    block.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    seen = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if seen:
        raise KeyboardInterrupt


def require_coremltools() -> None:
    """Imports coremltools, quietly.

    Raises:
        ExportError: it is not installed (``dependency``).
    """
    # While it is imported it logs about parts that only matter for running models, and it tries optional
    # packages with bare excepts, which would lose a Ctrl-C.
    try:
        with quiet(), interrupts_held():
            import coremltools  # noqa: F401
    except ImportError as error:
        raise ExportError(
            "dependency", f"export needs coremltools: {error}", module=error.name or "coremltools"
        ) from error


def write_package(
    functions: Mapping[str, object],
    default: str,
    out: Path,
    metadata: Mapping[str, str],
    description: str,
) -> None:
    """Lowers ``functions`` into one new package at ``out``; constants of one weight id share their bytes."""
    from coremltools import PassPipeline
    from coremltools.converters.mil.converter import ConverterRegistry, mil_convert_to_proto
    from coremltools.converters.mil.mil import Program
    from coremltools.models.utils import save_spec

    from .program import OPSET

    program = Program()
    for name, function in functions.items():
        program.add_function(name, function)
    program.default_function_name = default
    program.export_as_multifunction = True
    with quiet(), tempfile.TemporaryDirectory(dir=out.parent) as weights:
        # No optimisation passes: the builder emits the program that is wanted, op for op.
        proto, _ = mil_convert_to_proto(
            program,
            "milinternal",
            "mlprogram",
            ConverterRegistry,
            main_pipeline=PassPipeline.EMPTY,
            specification_version=OPSET,
            weights_dir=weights,
        )
        proto.description.metadata.shortDescription = description
        proto.description.metadata.userDefined.update(metadata)
        save_spec(proto, str(out), weights_dir=weights)
    _share_alike(out)


def _share_alike(folder: Path) -> None:
    """Gives all parts the folder's own permissions; coremltools leaves some readable by the owner alone."""
    mode = folder.stat().st_mode & 0o777
    for part in folder.rglob("*"):
        part.chmod(mode if part.is_dir() else mode & 0o666)
