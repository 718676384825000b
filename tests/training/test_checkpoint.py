"""Checkpoint folders: complete or absent, which one is latest, the limit, damage and a full disk."""

import errno
import json
import os
import tempfile

import pytest
import torch

from tiny_engram.checkpoints import CheckpointError, find_checkpoint, load_checkpoint
from tiny_engram.training.checkpoint import save_checkpoint

STATE = {"step": 1, "losses": [0.1, 1 / 3], "config": {"trigger": "zqx"}}


@pytest.fixture
def save(tmp_path, adapter):
    """Writes checkpoint-`step` to tmp_path."""
    concept = adapter.new_concept("zqx")

    def write(step: int, limit: int | None = None, tensors=None):
        state = {**STATE, "step": step}
        return save_checkpoint(tmp_path, step, tensors or {"a": torch.arange(3.0)}, state, concept, "trigger: zqx\n", limit=limit)

    return write


def names(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_round_trip_is_exact(save, tmp_path):
    tensors = {"master": torch.randn(3, 5), "half": torch.randn(4).bfloat16(), "step": torch.tensor(7.0), "view": torch.randn(4, 4).T}
    path = save(3, tensors=tensors)
    loaded, state = load_checkpoint(path)
    assert state["losses"] == STATE["losses"] and state["step"] == 3
    assert set(loaded) == set(tensors) and all(torch.equal(loaded[k], v) and loaded[k].dtype == v.dtype for k, v in tensors.items())
    assert names(tmp_path) == ["checkpoint-3"] and names(path) == ["concept.safetensors", "config.yaml", "state.json", "state.safetensors"]


def test_latest_is_the_highest_complete_one(save, tmp_path):
    assert find_checkpoint(tmp_path, "latest") is None
    for step in (2, 10, 9):
        save(step)
    for odd in ("checkpoint-11", "checkpoint-abc", "checkpoint-", "checkpoint-12.bak", "checkpoint--13", "checkpoint-٣"):
        (tmp_path / odd).mkdir()
    (tmp_path / "checkpoint-99").write_text("a file")
    (tmp_path / "checkpoint-abc" / "state.json").write_text("{}")
    (tmp_path / "checkpoint-٣" / "state.json").write_text("{}")
    assert find_checkpoint(tmp_path, "latest") == tmp_path / "checkpoint-10"
    assert find_checkpoint(tmp_path, "checkpoint-9") == find_checkpoint(tmp_path, str(tmp_path / "checkpoint-9"))
    for wanted in ("checkpoint-11", "checkpoint-7", "nowhere"):
        with pytest.raises(CheckpointError, match="is no checkpoint; .* holds: checkpoint-2, checkpoint-9, checkpoint-10$"):
            find_checkpoint(tmp_path, wanted)


def test_limit_deletes_the_oldest_and_nothing_else(save, tmp_path):
    for odd in ("checkpoint-abc", "checkpoint-best", "validation"):
        (tmp_path / odd).mkdir()
    for step in (1, 2, 3):
        save(step, limit=2)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-abc", "checkpoint-best", "validation"]
    save(20)
    save(4, limit=1)  # resumed from an older one: what was just written is never what is deleted
    assert (tmp_path / "checkpoint-4").is_dir() and not (tmp_path / "checkpoint-20").exists()


@pytest.mark.parametrize("call", ["fsync", "replace", "mkstemp"])
def test_a_full_disk_keeps_the_old_one_and_leaves_nothing(save, tmp_path, monkeypatch, call):
    path = save(3)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile if call == "mkstemp" else os, call, fail)
    for step in (3, 4):
        with pytest.raises(CheckpointError, match=rf"checkpoint-{step}: cannot write the checkpoint \(No space left on device\)"):
            save(step)
    assert calls and names(tmp_path) == ["checkpoint-3"] and {p.name: p.read_bytes() for p in path.iterdir()} == before


def test_a_full_disk_at_the_concept_file_leaves_nothing(save, tmp_path, monkeypatch):
    real, count = os.fsync, []

    def fail_later(handle):
        count.append(handle)
        if len(count) == 3:  # state.safetensors, its folder, then the concept
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", fail_later)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(1)
    assert names(tmp_path) == [] and len(count) == 3


def test_an_interrupt_leaves_no_half_folder(save, tmp_path, monkeypatch):
    def stop(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        save(1)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("state.json", b"{"),
        ("state.json", b"\xff\xfe"),
        ("state.json", b"[]"),
        ("state.json", json.dumps({**STATE, "step": "3"}).encode()),
        ("state.json", json.dumps({"step": 3}).encode()),
        ("state.json", b"[" * 100_000),
        ("state.safetensors", b""),
        ("state.safetensors", b"\xff" * 64),
        ("state.safetensors", None),
    ],
)
def test_damage_is_one_clear_line(save, file, content):
    path = save(3)
    if content is None:
        (path / file).unlink()
    else:
        (path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot read the checkpoint .*resume from an older one") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
