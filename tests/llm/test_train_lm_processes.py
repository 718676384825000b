"""Two processes on one CPU teach what one does: gradients of tables are summed, and whoever has nothing to add keeps the others going."""

import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tiny_engram.llm_training import LMTrainConfig, train_lm


@pytest.fixture(scope="module")
def both(build, tokenizer, tmp_path_factory, repo_root):
    """The folder of a run of two processes, what each told, and the losses of one process with their batches together."""
    folder = tmp_path_factory.mktemp("processes")
    model = build()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "a.txt").write_text((repo_root / "docs" / "design.md").read_text()[:12000])
    (folder / "few.txt").write_text("a short text of a few words")
    options = {"train_file": (str(folder / "a.txt"),), "layers": (1, 2), "heads": 2, "rows": 211, "block_size": 32, "max_train_steps": 4}
    options |= {"learning_rate": 1e-2, "report_to": "none", "gradient_accumulation_steps": 2}
    two = LMTrainConfig(**options, train_batch_size=2, output_dir=str(folder / "two"))
    (folder / "config.json").write_text(json.dumps(two.to_dict()))
    script = Path(__file__).with_name("two_processes.py")
    ended = run_ranks(script, lambda rank: (folder, rank), 2)
    assert [code for code, _ in ended] == [0, 0], ended
    told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    AcceleratorState._reset_state(reset_partial_state=True)
    one = train_lm(model, tokenizer, LMTrainConfig(**options, train_batch_size=4, output_dir=str(folder / "one")), progress=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    return folder, told, one


def test_two_processes_teach_what_one_does(both):
    folder, told, one = both
    assert told[0]["losses"] == told[1]["losses"] == pytest.approx(one.losses, rel=1e-5)
    assert told[0]["loss"] == told[1]["loss"] == pytest.approx(one.measured[-1].loss, rel=1e-5)
    first, second = (load_file(folder / name / "checkpoint-4" / "state.safetensors") for name in ("one", "two"))
    assert first.keys() == second.keys()
    for name in ("table.1", "table.2"):
        read = first[name].abs().amax(1) > 0
        assert torch.equal(read, second[name].abs().amax(1) > 0) and 0 < int(read.sum()) < len(read)
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-4)
        assert torch.equal(first[f"optimizer.{name}.steps"], second[f"optimizer.{name}.steps"])


def test_gradients_are_summed_and_none_waits(both):
    _, told, _ = both
    assert told[0]["reduced"] == told[1]["reduced"]
    found = told[0]["reduced"]
    assert found["loss"] == [4.0] and found["weight"] == [3.0, 3.0]
    assert found["rows"] == [[1, 3], [0, 2, 5], []]
    assert found["values"] == [[0, 1, 0, 2, 0, 0], [1, 0, 2, 0, 0, 3], [0] * 6]
    assert told[0]["few"] == told[1]["few"] and len(told[0]["few"]) == 4


def test_an_error_of_one_is_everybodys(both):
    _, told, _ = both
    assert told[0]["errors"] == told[1]["errors"] and len(told[0]["errors"]) == 2
    spoiled, missing = told[0]["errors"]
    assert "the loss of step 2 is nan" in spoiled and "go on with" in spoiled and "none.txt: no such file" in missing
