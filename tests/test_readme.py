"""The README runs: its Python on the embedded base (few steps), its commands through the parser, its links and paths exist."""

import re
import shlex
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline

import tiny_engram
from tiny_engram.cli import main
from tiny_engram.pipelines.loaders import load_pipeline


@pytest.fixture(scope="module")
def readme(repo_root) -> str:
    return (repo_root / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def fewer_steps(code: str) -> str:
    short, count = re.subn(r"(num_inference_steps|max_train_steps)=\d+", r"\1=1", code)
    assert count, f"the snippet no longer sets its steps, so it would take minutes here:\n{code}"
    return short


@pytest.fixture
def checkout(repo_root, tmp_path, monkeypatch):
    """A working directory with the assets and, in place of what `make demo` writes, an untrained concept."""
    (tmp_path / "assets").symlink_to(repo_root / "assets")
    (tmp_path / "out" / "demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_using_a_concept(readme, checkout, capsys):
    code = next(code for code in blocks(readme, "python") if "load_concept" in code)
    pipe = load_pipeline(device="cpu")
    adapter = tiny_engram.attach(pipe)
    concept = adapter.new_concept("tako-blip")
    old = concept.mount_rows("clip_l")
    concept.with_rows("clip_l", torch.ones(old.payload.shape), old.gain, old.bias).save("out/demo/concept.safetensors")
    adapter.detach()
    exec(compile(fewer_steps(code), "README.md", "exec"), {"__name__": "readme"})
    assert "fires: tako-blip" in capsys.readouterr().out
    assert (checkout / "tako-blip.png").stat().st_size > 0


def test_the_embedded_base_loads_and_draws_with_plain_from_pretrained(repo_root):
    pipe = StableDiffusionPipeline.from_pretrained(repo_root / "assets/bases/emoji-sd")
    assert {pipe.unet.dtype, pipe.text_encoder.dtype, pipe.vae.dtype} == {torch.float32}
    drawn: Any = pipe("a cat", num_inference_steps=1)
    assert drawn.images[0].size == (128, 128)


def test_teaching_a_concept(readme, checkout, capsys):
    code = next(code for code in blocks(readme, "python") if "TrainConfig" in code)
    quick = fewer_steps(code).replace("TrainConfig(", "TrainConfig(validation_inference_steps=1, ")
    exec(compile(quick, "README.md", "exec"), {"__name__": "readme"})
    assert "bytes of rows, gates and maps" in capsys.readouterr().out
    assert tiny_engram.Concept.load(checkout / "out/duck/concept.safetensors").trigger == "zed-quack"


def test_reading_a_table(readme, checkout, capsys):
    code = next(code for code in blocks(readme, "python") if "EngramTable" in code)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert "100,000 rows of 256 values" in capsys.readouterr().out
    commands = [shlex.split(line) for block in blocks(readme, "sh") for line in block.splitlines() if " rows.safetensors" in line]
    assert {command[2] for command in commands} == {"inspect", "verify", "convert"}
    for command in commands:
        assert main([word.replace("/dev/shm", str(checkout / "out")) for word in command[1:]]) == 0
    assert (checkout / "out/rows.safetensors").stat().st_size > 100_000 * 264


def test_every_command_is_understood(readme):
    from tiny_engram.cli import _parser

    commands = [shlex.split(line) for block in blocks(readme, "sh") for line in block.splitlines()]
    assert {command[0] for command in commands} == {"tiny-engram"}
    verbs = {"app", "train", "generate", "explain", "inspect", "list", "push", "demo", "library", "table"}
    assert {_parser().parse_args(command[1:]).verb for command in commands} == verbs


def test_what_it_points_to_exists(readme, repo_root):
    named = set(re.findall(r"\]\((?!https?:)([^)#]+)\)", readme))
    named |= set(re.findall(r"`((?:benchmarks|assets|kernels|pipelines|tests|tiny_engram)/[\w./-]*)`", readme))
    named |= set(re.findall(r"\b(benchmarks/\w+\.py)\b", readme))
    lacking = sorted(path for path in named if not (repo_root / path).exists())
    assert len(named) > 6 and not lacking
    targets = re.findall(r"^([\w-]+):", (repo_root / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", readme)) - {"it"} <= {*targets}
