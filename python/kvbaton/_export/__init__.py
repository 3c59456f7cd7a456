"""Exports an MLX model folder as Core ML packages: prefill, chunks of long prompts, decode steps, chains.

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

from .chain import CHAIN, chain_toml
from .config import ModelConfig, read_config, read_model_spec
from .errors import ExportError
from .function import FUNCTIONS_KEY, FunctionPlan, Kind, Part, plan_functions, split_layers
from .layout import KvGroup, KvOutputs, kv_groups, layout_toml
from .package import require_coremltools, write_package
from .quantize import Quantize, Quantizer, check_scheme
from .weights import Half, Weights

__all__ = ["ExportError", "ExportReport", "KvOutputs", "export", "read_model_spec"]

Progress = Callable[[str, int, int], None]
Digest = Callable[[Path], str]


DECODE_CONTEXT = 4096
"""Rows of a decode package's context where nobody says."""


@dataclass(frozen=True)
class ExportReport:
    """What was written: ``bytes`` counts every file, ``seconds`` the whole export.

    ``cache_outputs`` are the tensors of the cache: outputs of a prefill package, states of a decode package.
    ``packages`` are the file names of a chain's packages, empty where there is one package.
    """

    path: Path
    kind: Kind
    functions: tuple[str, ...]
    buckets: tuple[int, ...]
    contexts: tuple[int, ...]
    chunk: int | None
    kv_outputs: KvOutputs
    cache_outputs: tuple[str, ...]
    packages: tuple[str, ...]
    weights_digest: str
    dequantized: bool
    quantize: Quantize | None
    bytes: int
    seconds: float


def export(
    model: Path,
    out: Path,
    *,
    kind: Kind = "prefill",
    buckets: Sequence[int] = (128, 512),
    context: Sequence[int] = (),
    chunk: int = 512,
    split: int | None = None,
    kv_outputs: KvOutputs = "stacked",
    quantize: Quantize | None = None,
    force: bool = False,
    progress: Progress | None = None,
    digest: Digest | None = None,
) -> ExportReport:
    """Writes ``out``, a package of functions of one kind.

    Of the kind ``prefill``: a function ``prefill_<S>`` for every bucket of S tokens, and for every context of C
    rows a function ``prefill_<chunk>_of_<C>``, of which longer prompts are made. Of the kind ``decode``: a
    function ``decode`` that keeps one context in states, by default of 4096 rows. With ``split``, ``out`` is a
    folder of as many packages, each with some of the layers, and a ``chain.toml`` that says how they follow one
    another.

    ``model`` is a folder that ``mlx_lm.load`` takes; quantised weights are dequantised. ``quantize`` stores
    projections and embeddings in fewer bits (see ``quantize.py``). An existing ``out``
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
    quantizer = check_scheme(quantize)
    contexts = tuple(context)
    if kind == "decode" and not contexts:
        contexts = (min(DECODE_CONTEXT, config.max_positions or DECODE_CONTEXT),)
    plans = plan_functions(config, kind, tuple(buckets), contexts, chunk)
    parts = split_layers(config.layers, 1 if split is None else split)
    if split is not None and kind == "decode":
        raise ExportError("output", "a decode package is not split", split=split)
    rows = max(plan.context or plan.rows for plan in plans)
    groups = kv_groups(kv_outputs, config, rows, parts)
    _check_out(out, force, split is not None)
    _keep_model(model, out)
    require_coremltools()
    weights = Weights(model, config.quantization)
    # Tables of positions and masks are as large as the config says: it is right before they are made.
    weights.check_rows("model.embed_tokens.weight", config.vocab_size)
    weights.check_rows("model.layers.0.input_layernorm.weight", config.hidden_size)
    weights.check_rows("model.layers.0.self_attn.k_proj.weight", config.kv_heads * config.head_dim)
    weights.check_rows("model.layers.0.self_attn.q_proj.weight", config.heads * config.head_dim)
    if config.tied is None:
        config = replace(config, tied="lm_head.weight" not in weights)
    report("digest", 0, 1)
    weights_digest = (digest or _native_digest)(model)
    report("digest", 1, 1)

    build = _Builds(config, weights, plans, quantizer, report)
    metadata = {
        "kvbaton.format": "1",
        "kvbaton.model": json.dumps({**config.spec(), "weights_digest": weights_digest}),
        FUNCTIONS_KEY: json.dumps([plan.json() for plan in plans]),
    }
    if quantize is not None:
        metadata["kvbaton.quantize"] = quantize
    names = tuple(f"part_{index}.mlpackage" for index in range(len(parts))) if split is not None else ()
    with _folder_beside(out) as aside:
        written = Path(aside) / out.name
        if names:
            written.mkdir()
            (written / CHAIN).write_text(chain_toml(names), encoding="utf-8")
        for index, part in enumerate(parts):
            own = [group for group in groups if group.layers[0] in range(part.first, part.end)]
            functions = build.functions(part, own)
            if index == len(parts) - 1:
                _refuse_unknown_tensors(weights, config)
            report("write", index, len(parts))
            where = written / names[index] if names else written
            title = _title(config, kind, plans, part)
            described = {**metadata, **_layouts(kv_outputs, own, kind, plans, part)}
            write_package(functions, plans[0].name, where, described, title)
        size = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
        _put_in_place(written, out, Path(aside), force, split is not None)
    report("write", len(parts), len(parts))
    return ExportReport(
        path=out,
        kind=kind,
        functions=tuple(plan.name for plan in plans),
        buckets=tuple(plan.rows for plan in plans if plan.context is None),
        contexts=tuple(plan.context for plan in plans if plan.context is not None),
        chunk=chunk if kind == "prefill" and context else None,
        kv_outputs=kv_outputs,
        cache_outputs=tuple(name for group in groups for name in (group.key, group.value)),
        packages=names,
        weights_digest=weights_digest,
        dequantized=config.quantization is not None,
        quantize=quantize,
        bytes=size,
        seconds=time.perf_counter() - started,
    )


def _title(config: ModelConfig, kind: Kind, plans: Sequence[FunctionPlan], part: Part) -> str:
    lengths = ", ".join(str(plan.rows) for plan in plans if plan.context is None)
    contexts = ", ".join(str(plan.context) for plan in plans if plan.context is not None)
    title = f"{config.architecture} {kind}" + (f" of {lengths} tokens" if lengths else "")
    title += f", context {contexts}" if contexts else ""
    whole = part.embeds and part.ends
    return title if whole else f"{title}, layers {part.first} to {part.end - 1}"


def _layouts(
    kv_outputs: KvOutputs, groups: list[KvGroup], kind: Kind, plans: Sequence[FunctionPlan], part: Part
) -> dict[str, str]:
    chunks = kind == "prefill" and any(plan.context for plan in plans)
    layouts = {"kvbaton.layout": layout_toml(kv_outputs, groups, kind, part=part, chunks=chunks)}
    if chunks:
        layouts["kvbaton.past"] = layout_toml(kv_outputs, groups, kind, part=part, past=True)
    return layouts


class _Builds:
    """Builds the functions of one part after the other; weights are read once."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        plans: Sequence[FunctionPlan],
        quantizer: Quantizer | None,
        report: Progress,
    ) -> None:
        self.config, self.weights, self.plans, self.report = config, weights, plans, report
        self.quantizer = quantizer
        self.loaded: dict[str, Half] = {}
        self.done = 0

    def take(self, name: str, shape: tuple[int, ...]) -> Half:
        if name not in self.loaded:
            self.loaded[name] = self.weights.take(name, shape)
        return self.loaded[name]

    def functions(self, part: Part, groups: list[KvGroup]) -> dict[str, object]:
        from .program import build_function

        made: dict[str, object] = {}
        for plan in self.plans:
            made[plan.name] = build_function(
                self.config, self.take, plan, part, groups, self.quantizer, self._layer_done
            )
        # The next part needs other weights, but for those of the embedding, which the head may share.
        shared = "model.embed_tokens.weight"
        self.loaded = {name: value for name, value in self.loaded.items() if name == shared}
        if self.quantizer is not None:
            self.quantizer.forget(shared)
        return made

    def _layer_done(self) -> None:
        self.done += 1
        self.report("build", self.done, len(self.plans) * self.config.layers)


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


def _check_out(out: Path, force: bool, folder: bool) -> None:
    if not folder and out.suffix != ".mlpackage":
        raise ExportError("output", f"{out} does not end in .mlpackage", path=str(out))
    if folder and out.suffix == ".mlpackage":
        raise ExportError(
            "output", f"{out} ends in .mlpackage, a split model is a folder of packages", path=str(out)
        )
    if not out.parent.is_dir():
        raise ExportError("output", f"the folder {out.parent} does not exist", path=str(out.parent))
    if not os.path.lexists(out):
        return
    if not force:
        raise ExportError("output", f"{out} exists, and replacing it was not asked for", path=str(out))
    if folder and not (out / CHAIN).is_file():
        raise ExportError("output", f"{out} exists and holds no {CHAIN}: it is not replaced", path=str(out))


def _keep_model(model: Path, out: Path) -> None:
    """What is replaced is removed, with all that it holds."""
    whole, place = model.resolve(), out.resolve()
    if place == whole or place in whole.parents:
        raise ExportError("output", f"{out} holds the model {model}: it is not replaced", path=str(out))


def _folder_beside(out: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.")
    except OSError as error:
        why = error.strerror or error
        raise ExportError(
            "output", f"the folder {out.parent} cannot be written to: {why}", path=str(out.parent)
        ) from error


def _put_in_place(written: Path, out: Path, aside: Path, force: bool, folder: bool) -> None:
    """Renames the finished package to ``out``; an old one leaves first and comes back if the rename fails."""
    if not os.path.lexists(out):
        os.rename(written, out)
        return
    _check_out(out, force, folder)  # it may have appeared meanwhile
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
