"""What the tests of the command line share: two pictures, a command that runs, one that is refused, a concept file."""

import re

import numpy as np
import pytest
from PIL import Image

from tiny_engram.cli import main


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "pictures"
    made.mkdir()
    for k in range(2):
        Image.fromarray(np.random.default_rng(k).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(made / f"{k}.png")
    return made


@pytest.fixture
def run(capsys, tmp_path, saved_pipe, monkeypatch):
    """Runs a command in tmp_path with the tiny model where one is asked for: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*argv: object):
        words = [str(word) for word in argv]
        model = ["--model", str(saved_pipe), "--device", "cpu"] if words[0] in ("train", "generate", "explain") else []
        capsys.readouterr()
        code = main([words[0], *model, *words[1:]])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def refused(run, tmp_path):
    """Runs a command that must fail: exit code 2, one line on stderr that matches, the same files as before."""

    def files() -> dict[str, bytes]:
        return {str(p.relative_to(tmp_path)): p.read_bytes() if p.is_file() else b"" for p in tmp_path.rglob("*")}

    def call(words: str, *argv: object, shown: tuple[str, ...] = ("teaching", "drawing companions")) -> None:
        before = files()
        code, out, err = run(*argv)
        lines = [line for line in re.split("[\r\n]+", err) if line and not line.startswith(shown)]
        assert code == 2 and len(lines) == 1 and lines[0].startswith("tiny-engram: "), (code, err)
        assert re.search(words, lines[0]), lines[0]
        assert out == "" and files() == before

    return call


@pytest.fixture
def concept_file(tiny, adapter, tmp_path):
    return tiny.concept(adapter, "zqx").save(tmp_path / "zqx.safetensors")


@pytest.fixture
def quick() -> tuple:
    """Options with which `train` takes seconds."""
    return (
        *("--max_train_steps", 2, "--train_batch_size", 2, "--report_to", "none", "--output_dir", "out"),
        *("--collage_pictures", 1, "--validation_inference_steps", 2),
    )
