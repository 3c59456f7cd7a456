"""Exports an MLX model folder as a Core ML prefill package.

Importing this package is cheap: coremltools is imported when an export begins.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .config import ModelConfig, read_config, read_model_spec
from .errors import ExportError
from .layout import KvGroup, KvOutputs, kv_groups, layout_toml
from .package import require_coremltools, write_package
from .weights import Half, Weights

__all__ = ["ExportError", "ExportReport", "KvOutputs", "export", "read_model_spec"]

Progress = Callable[[str, int, int], None]
Digest = Callable[[Path], str]


@dataclass(frozen=True)
class ExportReport:
    """What was written: ``bytes`` counts every file of the package, ``seconds`` the whole export."""

    path: Path
    functions: tuple[str, ...]
    buckets: tuple[int, ...]
    kv_outputs: KvOutputs
    cache_outputs: tuple[str, ...]
    weights_digest: str
    dequantized: bool
    bytes: int
    seconds: float


def export(
    model: Path,
    out: Path,
    *,
    buckets: Sequence[int] = (128, 512),
    kv_outputs: KvOutputs = "stacked",
    force: bool = False,
    progress: Progress | None = None,
    digest: Digest | None = None,
) -> ExportReport:
    """Writes ``out``, a package with one function ``prefill_<S>`` for every bucket of S tokens.

    ``model`` is a folder that ``mlx_lm.load`` takes; quantised weights are dequantised. An existing ``out``
    is replaced only with ``force``; a failure or an interrupt leaves what was there. ``progress(stage, done,
    total)`` is called between steps. ``digest(folder)`` gives the text stored as ``weights_digest``; by
    default the native module computes it.

    Raises:
        ExportError: see its kinds.
    """
    started = time.perf_counter()
    report = progress or (lambda stage, done, total: None)
    model, out = Path(model), Path(out)
    config = read_config(model)
    sizes = _checked_buckets(buckets, config)
    groups = kv_groups(kv_outputs, config, sizes[-1])
    _check_out(out, force)
    require_coremltools()
    weights = Weights(model, config.quantization)
    if config.tied is None:
        config = replace(config, tied="lm_head.weight" not in weights)
    report("digest", 0, 1)
    weights_digest = (digest or _native_digest)(model)
    report("digest", 1, 1)

    functions = _build(config, weights, sizes, groups, report)
    names = tuple(functions)
    metadata = {
        "kvbaton.format": "1",
        "kvbaton.model": json.dumps({**config.spec(), "weights_digest": weights_digest}),
        "kvbaton.layout": layout_toml(kv_outputs, groups),
    }
    lengths = ", ".join(map(str, sizes))
    report("write", 0, 1)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as aside:
        written = Path(aside) / out.name
        write_package(
            functions, names[0], written, metadata, f"{config.architecture} prefill of {lengths} tokens"
        )
        size = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
        _put_in_place(written, out, Path(aside), force)
    report("write", 1, 1)
    return ExportReport(
        path=out,
        functions=names,
        buckets=sizes,
        kv_outputs=kv_outputs,
        cache_outputs=tuple(name for group in groups for name in (group.key, group.value)),
        weights_digest=weights_digest,
        dequantized=config.quantization is not None,
        bytes=size,
        seconds=time.perf_counter() - started,
    )


def _build(
    config: ModelConfig, weights: Weights, sizes: tuple[int, ...], groups: list[KvGroup], report: Progress
) -> dict[str, object]:
    from .program import build_function

    loaded: dict[str, Half] = {}

    def take(name: str, shape: tuple[int, ...]) -> Half:
        if name not in loaded:
            loaded[name] = weights.take(name, shape)
        return loaded[name]

    total = len(sizes) * config.layers
    done = 0

    def layer_done() -> None:
        nonlocal done
        done += 1
        report("build", done, total)

    functions = {}
    for rows in sizes:
        functions[f"prefill_{rows}"] = build_function(config, take, rows, groups, layer_done)
    _refuse_unknown_tensors(weights, config)
    return functions


def _refuse_unknown_tensors(weights: Weights, config: ModelConfig) -> None:
    """A tensor that the program has no place for means another network than the one exported."""
    for name in weights.unused():
        if "rotary_emb.inv_freq" in name or (config.tied and name.startswith("lm_head.")):
            continue  # mlx-lm drops these, too
        raise ExportError(
            "weights",
            f"the model has a tensor {name} that {config.architecture} does not use",
            tensor=name,
        )


def _checked_buckets(buckets: Sequence[int], config: ModelConfig) -> tuple[int, ...]:
    sizes = tuple(sorted(set(buckets)))
    if not sizes:
        raise ExportError("buckets", "no bucket given: a package needs at least one length", buckets=[])
    for size in sizes:
        if size < 1:
            raise ExportError("buckets", f"a bucket of {size} tokens cannot hold a prompt", bucket=size)
        if config.max_positions is not None and size > config.max_positions:
            raise ExportError(
                "buckets",
                f"a bucket of {size} tokens is longer than max_position_embeddings {config.max_positions}",
                bucket=size,
                max_position_embeddings=config.max_positions,
            )
    return sizes


def _check_out(out: Path, force: bool) -> None:
    if out.suffix != ".mlpackage":
        raise ExportError("output", f"{out} does not end in .mlpackage", path=str(out))
    if not out.parent.is_dir():
        raise ExportError("output", f"the folder {out.parent} does not exist", path=str(out.parent))
    if os.path.lexists(out) and not force:
        raise ExportError("output", f"{out} exists, and replacing it was not asked for", path=str(out))


def _put_in_place(written: Path, out: Path, aside: Path, force: bool) -> None:
    """Renames the finished package to ``out``; an old one leaves first and comes back if the rename fails."""
    if not os.path.lexists(out):
        os.rename(written, out)
        return
    _check_out(out, force)  # it may have appeared meanwhile
    old = aside / "replaced"
    os.rename(out, old)
    try:
        os.rename(written, out)
    except BaseException:
        os.rename(old, out)
        raise


def _native_digest(folder: Path) -> str:
    from kvbaton._native import weights_digest

    return weights_digest(folder)
