"""Concepts of the embedded base, and libraries that hold some."""

import dataclasses
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tiny_engram
from tiny_engram.config import ConceptConfig
from tiny_engram.library import ConceptLibrary
from tiny_engram.pipelines.loaders import load_pipeline


@pytest.fixture(scope="session")
def emoji():
    """The embedded base, loaded once; tests attach to it and detach."""
    pipe = load_pipeline("emoji-sd", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def maker(emoji, tiny) -> Callable[..., Any]:
    """(number) -> a concept of random rows, trigger "zq" and three letters; every fifth has rows and maps at the denoiser."""
    adapter = tiny_engram.attach(emoji)

    def make(k: int, **details: Any):
        word = "zq" + "".join(chr(97 + k // 26**p % 26) for p in range(2)) + "x"
        config = ConceptConfig(mounts=("span", "context"), attention_rank=2) if k % 5 == 4 else ConceptConfig()
        made = tiny.concept(adapter, word, seed=k, size=0.5, config=config, aliases=(f"{word} two",) if k % 3 == 0 else ())
        thumbnail = "data:image/png;base64,iVBORw0KGgo=" if k % 2 else None
        return made.with_details(recipe={"step": k, "words": "duck, d\u00fcck"}, thumbnail=thumbnail, **details)

    made = {k: make(k) for k in range(60)}
    adapter.detach()
    return lambda k, **details: dataclasses.replace(made[k], **details)


@pytest.fixture
def library(tmp_path, maker):
    """Twelve concepts, zero to eleven, added one by one."""
    made = ConceptLibrary.create(tmp_path / "ducks.engrams")
    for k in range(12):
        made.add(maker(k))
    return made


@pytest.fixture
def adapter(emoji):
    """On the embedded base, for one test."""
    attached = tiny_engram.attach(emoji)
    yield attached
    attached.detach()


def same(one: Any, other: Any) -> bool:
    """Are two concepts equal in every bit?"""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other


def in_child(action: Callable[[], Any]) -> tuple[int, Any]:
    """Run it in a process of its own; returns the signal that ended it (0: none), and what it returned, or its exception."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            answer: Any = action()
        except BaseException as error:  # noqa: BLE001
            answer = error
        try:
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, pickle.loads(told) if told else None
