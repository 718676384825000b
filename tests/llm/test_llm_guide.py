"""The guide's Python and commands on training, decoding and DeepSeek's layers run as they stand, on small models of the real classes."""

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tiny_engram.cli import main

pytestmark = pytest.mark.usefixtures("accelerator_state")


@pytest.fixture
def section(repo_root, tmp_path, monkeypatch):
    """section(title): what stands below a heading; the working directory has a folder of notes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("The table is read by the last tokens of a text. " * 200)
    page = (repo_root / "docs" / "llm.md").read_text()
    return lambda title: re.split(r"^## ", page.partition(f"## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for stands, here in pairs:
        assert stands in text, stands
        text = text.replace(stands, here)
    return text


@pytest.fixture
def small(build, tokenizer):
    """small(code): runs blocks one after the other, with a tiny model and its tokenizer in the place of SmolLM2."""
    names: dict[str, Any] = {"__name__": "guide", "load_small": lambda: (build(max_position_embeddings=256), tokenizer)}

    def run(code: list[str]) -> dict[str, Any]:
        for block in code:
            block = block.replace("load_smollm()", "load_small()").replace("(2, 10)", "(1, 2)")
            exec(compile(block, "llm.md", "exec"), names)
        return names

    return run


def test_layers_and_decoding(section, small, capsys):
    names = small(blocks(section("Everywhere"), "python"))
    assert re.match(r"trainable params: [\d,]+ \|\| all params", capsys.readouterr().out)
    names = small(blocks(section("Decoding"), "python"))
    ids, model = names["ids"], names["model"]
    assert torch.equal(names["said"], model.generate(ids, max_new_tokens=8)) and names["said"].shape[1] == ids.shape[1] + 8


def test_training(section, small, build, tokenizer, tmp_path, capsys):
    text = section("Training from text")
    build(max_position_embeddings=256).save_pretrained("model")
    tokenizer.save_pretrained("model")
    few = ["--heads", "2", "--rows", "211", "--model", "model", "--device", "cpu"]
    (shell,) = blocks(text, "sh")
    shell = replaced(shell, ("500", "3"), ("2,10", "1,2"))
    commands = [shlex.split(line, comments=True) for line in shell.replace("\\\n", " ").splitlines()]
    for command in commands:
        assert command[0] == "tiny-engram" and main([*command[1:], *few]) == 0
    first, *own = blocks(text, "python")
    assert len(own) == 2
    small([replaced(first, ("max_train_steps=500", "max_train_steps=3, heads=2, rows=211"))])
    names = small(own)
    assert names["trainer"].state.global_step == 20 and (tmp_path / "lamps" / "adapter_model.safetensors").is_file()
    with torch.no_grad():
        loss = names["model"](input_ids=names["ids"], labels=names["ids"]).loss
        names["layers"].enabled = False
        assert float(loss) < float(names["model"](input_ids=names["ids"], labels=names["ids"]).loss) - 0.5


def test_deepseek(section, tmp_path, deepseek_backend):
    spec = importlib.util.spec_from_file_location("deepseek_checkpoint", Path(__file__).with_name("deepseek_checkpoint.py"))
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    folder = tmp_path / "DeepSeek-V4.1-Flash"
    folder.mkdir()
    made.write(folder, {made.SHARDS[layer]: made.named(made.layer_tensors(layer), layer) for layer in (1, 14)})
    (code,) = blocks(section("DeepSeek-V4.1's Engram layers"), "python")
    PreTrainedTokenizerFast(tokenizer_object=deepseek_backend).save_pretrained(folder)
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(replaced(code, ("4, 5120)", f"4, {made.HIDDEN})")), "llm.md", "exec"), names)
    assert names["x"].shape == (*names["ids"].shape, 4, made.HIDDEN) and names["x"].isfinite().all()
