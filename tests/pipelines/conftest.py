"""Fixtures of all tests that need a pipeline: a tiny real one for the session, an adapter per test."""

import importlib.util
from pathlib import Path

import pytest

import tiny_engram


@pytest.fixture(scope="session")
def tiny():
    """tests/tiny_pipeline.py as a module: build, picture, concept, load_tokenizer."""
    spec = importlib.util.spec_from_file_location("tiny_pipeline", Path(__file__).resolve().parent.parent / "tiny_pipeline.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def pipe(tiny):
    """One pipeline for the session; tests leave it without hooks."""
    return tiny.build()


@pytest.fixture
def adapter(pipe):
    """Attached for one test."""
    attached = tiny_engram.attach(pipe)
    yield attached
    attached.detach()
    assert not pipe.text_encoder._forward_hooks and not pipe.unet._forward_pre_hooks


@pytest.fixture
def own_pipe(tiny):
    """A pipeline that the test may change for good."""
    return tiny.build()
