"""Packages of other exporters, from ``foreign``: run, compared with numpy, handed to MLX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kvbaton
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import tiny_models
from conftest import Run
from export_helpers import TinyModel
from kvbaton.mlx import make_caches
from safetensors.numpy import load_file

FOREIGN = Path(__file__).parent / "foreign"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
CONFIG = tiny_models.CONFIGS["llama_tied"]

ANEMLL = """
name = "anemll"
placement = "left"

[inputs]
tokens = "input_ids"
positions = "position_ids"
position = "current_pos"
mask = "causal_mask"

[[tensor]]
name = "model_model_kv_cache_0"
holds = "key-and-value"
axes = "(part layer) kv_head row head_dim"
dtype = "float16"
"""

COREML_LLM = """
name = "coreml-llm"
placement = "left"

[inputs]
tokens = "input_ids"
last_index = "last_index"

[outputs]
logits = "logits"

[[tensor]]
name = "{K|V}_full_out"
holds = "key-and-value"
axes = "layer kv_head row head_dim"
padded_head_dim = 512
dtype = "float16"
"""

TORCH_OUTPUTS = """
name = "torch-outputs"
placement = "left"

[inputs]
tokens = "input_ids"

[[tensor]]
name = "{key|value}_cache"
holds = "key-and-value"
axes = "layer kv_head row head_dim"
dtype = "float16"
"""

TORCH_STATES = """
name = "torch-states"
placement = "left"

[inputs]
tokens = "inputIds"
mask = "causalMask"

[[tensor]]
name = "{key|value}Cache"
holds = "key-and-value"
axes = "layer batch kv_head row head_dim"
dtype = "float16"
"""

LAYOUTS = {
    "anemll": ANEMLL,
    "coreml_llm": COREML_LLM,
    "torch_outputs": TORCH_OUTPUTS,
    "torch_states": TORCH_STATES,
}


def reference(folder: Path, ids: list[int]) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Logits of the last token, and keys and values (kv_heads, rows, head_dim) a layer, in float64."""
    weights: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        weights.update({name: w.astype(np.float64) for name, w in load_file(file).items()})
    heads, kv = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    dim = CONFIG["hidden_size"] // heads
    n = len(ids)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weights[name]

    inverse = 1.0 / CONFIG["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    angles = np.arange(n)[:, None] * np.concatenate([inverse, inverse])

    def rotate(x: np.ndarray) -> np.ndarray:
        low, high = np.split(x, 2, axis=-1)
        return x * np.cos(angles) + np.concatenate([-high, low], -1) * np.sin(angles)

    def split(x: np.ndarray, count: int) -> np.ndarray:
        return x.reshape(n, count, dim).transpose(1, 0, 2)

    x = weights["model.embed_tokens.weight"][ids]
    keys, values = [], []
    for layer in range(CONFIG["num_hidden_layers"]):
        path = f"model.layers.{layer}."
        h = norm(x, path + "input_layernorm.weight")
        q, k, v = (h @ weights[f"{path}self_attn.{p}_proj.weight"].T for p in "qkv")
        q, k, v = rotate(split(q, heads)), rotate(split(k, kv)), split(v, kv)
        keys.append(k)
        values.append(v)
        k, v = (np.repeat(a, heads // kv, axis=0) for a in (k, v))
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(dim) + np.triu(np.full((n, n), -np.inf), 1)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        a = (p / p.sum(-1, keepdims=True)) @ v
        x = x + a.transpose(1, 0, 2).reshape(n, -1) @ weights[path + "self_attn.o_proj.weight"].T
        h = norm(x, path + "post_attention_layernorm.weight")
        gate, up = (h @ weights[f"{path}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[path + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight")[-1] @ weights["model.embed_tokens.weight"].T, keys, values


def close(ours: np.ndarray, theirs: np.ndarray, error: float = 5e-3) -> bool:
    """Within fp16's errors of a tiny model, of the largest value."""
    ours = ours.astype(np.float64)
    return bool(np.abs(ours - theirs).max() < error * np.abs(theirs).max())


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel) -> Path:
    return tiny_model("llama_tied")


@pytest.mark.parametrize("name", LAYOUTS)
def test_caches_and_logits_are_numpys(folder: Path, name: str) -> None:
    prefill = kvbaton.Prefill(FOREIGN / f"{name}.mlpackage", layout=LAYOUTS[name], model=folder)
    done = prefill(PROMPT)
    logits, keys, values = reference(folder, PROMPT)
    for layer, k, v in zip(done.cache.layers, keys, values, strict=True):
        assert layer.positions == range(len(PROMPT))
        assert close(layer.arrays["key"], k)
        assert close(layer.arrays["value"], v)
    if done.logits is not None:
        assert close(done.logits, logits)


HEADS = {
    "anemll": ["logits1", "logits2", "logits3", "logits4"],
    "torch_outputs": ["all_logits"],
    "torch_states": ["all_logits"],
}
"""Outputs that together are the logits of every token."""


@pytest.mark.parametrize("name", HEADS)
def test_logits_of_every_token_are_numpys(folder: Path, name: str) -> None:
    parts = []
    for output in HEADS[name]:
        layout = LAYOUTS[name].replace("[[tensor]]", f'[outputs]\nlogits = "{output}"\n\n[[tensor]]')
        prefill = kvbaton.Prefill(FOREIGN / f"{name}.mlpackage", layout=layout, model=folder)
        made = prefill(PROMPT).logits
        assert made is not None
        parts.append(made.reshape(-1, CONFIG["vocab_size"] // len(HEADS[name])))
    logits = np.concatenate(parts, axis=1)
    for number in (1, 5, len(PROMPT)):
        assert close(logits[number - 1], reference(folder, PROMPT[:number])[0]), number


def test_prompts_of_any_length_that_a_package_allows(folder: Path) -> None:
    """``torch_states`` takes 1 to 48 tokens, and computes no more rows than the prompt has."""
    package = FOREIGN / "torch_states.mlpackage"
    layout = TORCH_STATES.replace("[[tensor]]", '[outputs]\nlogits = "all_logits"\n\n[[tensor]]')
    prefill = kvbaton.Prefill(package, layout=layout, model=folder)
    long = [*PROMPT, *PROMPT, *PROMPT][:48]
    for number in (1, 2, 33, 48):
        done = prefill(long[:number])
        logits, keys, values = reference(folder, long[:number])
        assert done.logits is not None
        rows = done.logits.reshape(-1, CONFIG["vocab_size"])
        assert len(rows) == number
        assert close(rows[-1], logits)
        for layer, k, v in zip(done.cache.layers, keys, values, strict=True):
            assert close(layer.arrays["key"], k)
            assert close(layer.arrays["value"], v)
    with pytest.raises(kvbaton.KvbatonError, match="49 tokens"):
        prefill([*long, 1])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("numerics", ["f32", "f16-accumulate"])
def test_other_roundings_stay_close(folder: Path, name: str, numerics: Any) -> None:
    package = FOREIGN / f"{name}.mlpackage"
    prefill = kvbaton.Prefill(package, layout=LAYOUTS[name], model=folder, numerics=numerics)
    _, keys, _ = reference(folder, PROMPT)
    for layer, k in zip(prefill(PROMPT).cache.layers, keys, strict=True):
        assert close(layer.arrays["key"], k, 2e-3 if numerics == "f32" else 5e-2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_caches_go_to_mlx(folder: Path, name: str) -> None:
    """16 tokens greedily, as MLX alone."""
    model, _ = mlx_lm.utils.load_model(folder)
    model.set_dtype(mx.float32)
    prefill = kvbaton.Prefill(FOREIGN / f"{name}.mlpackage", layout=LAYOUTS[name], model=folder)
    handoff = kvbaton.to_mlx(prefill(PROMPT[:-1]).cache, model, PROMPT, measure_memcpy=False)
    assert handoff.remaining_tokens == PROMPT[-1:]
    alone = make_caches(model)
    mx.eval(model(mx.array([PROMPT[:-1]]), cache=alone))
    token = PROMPT[-1]
    for number in range(16):
        ours = np.array(model(mx.array([[token]]), cache=handoff.prompt_cache)[0, -1])
        theirs = np.array(model(mx.array([[token]]), cache=alone)[0, -1])
        assert close(ours, theirs, 2e-2), number
        token = int(theirs.argmax())
        assert int(ours.argmax()) == token or theirs[token] - theirs[ours.argmax()] < 0.02


def test_the_presets_hold_the_same_rows(folder: Path) -> None:
    """What a package leaves, filled into the tensors of the shipped layout of its exporter, and read back."""
    _, keys, values = reference(folder, PROMPT)
    presets = {
        "anemll": "anemll",
        "coreml_llm": "coreml-llm-sliding-outputs",
        "torch_outputs": "kvbaton-stacked",
        "torch_states": "apple-mistral",
    }
    for name, preset in presets.items():
        prefill = kvbaton.Prefill(FOREIGN / f"{name}.mlpackage", layout=LAYOUTS[name], model=folder)
        inputs = kvbaton.to_coreml(prefill(PROMPT).cache, preset, capacity=48)
        view = kvbaton.CacheView.from_arrays(inputs.arrays, layout=preset, tokens=PROMPT, model=folder)
        for layer, k, v in zip(view.layers, keys, values, strict=True):
            assert close(layer.arrays["key"], k)
            assert close(layer.arrays["value"], v)


def test_the_command_line_runs_them(kvbaton_cli: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(PROMPT))
    for name, text in LAYOUTS.items():
        layout = tmp_path / f"{name}.toml"
        layout.write_text(text)
        report = kvbaton_cli(
            "run",
            "--prefill",
            FOREIGN / f"{name}.mlpackage",
            "--decode",
            folder,
            "--layout",
            layout,
            "--model",
            folder,
            "--prompt-tokens",
            tmp_path / "ids.json",
            "--max-tokens",
            "4",
            "--dtype",
            "float32",
            "--json",
        ).json()
        assert report["handed_off_tokens"] == len(PROMPT) - 1, report
        assert len(report["tokens"]) == 4


def test_sizes_stay_small() -> None:
    for name in LAYOUTS:
        files = (FOREIGN / f"{name}.mlpackage").rglob("*")
        assert sum(file.stat().st_size for file in files if file.is_file()) < 2_000_000
