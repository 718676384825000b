"""LMTrainConfig and the command: every field an option, nonsense refused in one line, and a run from files to files."""

import dataclasses
import json
import re
import signal

import pytest
from accelerate.state import AcceleratorState

from tiny_engram.cli import main
from tiny_engram.errors import ConfigError
from tiny_engram.llm_training.config import LMTrainConfig
from tiny_engram.llm_training.run import Run
from tiny_engram.llm_training.train_cli import HELP

GIVEN = {"train_file": ("a.txt",), "layers": (2, 10)}


def test_json_round_trip():
    config = LMTrainConfig(
        **GIVEN, validation_file=("b.txt",), table_learning_rate=0.1, gradient_checkpointing=True, checkpoints_total_limit=2
    )
    assert LMTrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert LMTrainConfig(**GIVEN).table_rate == 5 * LMTrainConfig(**GIVEN).learning_rate and config.table_rate == 0.1
    with pytest.raises(ConfigError, match="no field tables"):
        LMTrainConfig.from_dict(config.to_dict() | {"tables": 1})
    made = config.engram_config(7)
    assert (made.layers, made.vocab, made.blocked_ids, made.form) == ((2, 10), config.rows, (7,), "paper")


NONSENSE = {
    "train_file": [(), ("a", 3), "a.txt", None],
    "layers": [(), (1, 1), (-1,), (True,), ("1",), 3],
    "validation_split_percentage": [-1, 51, float("nan"), "5"],
    "max_ngram": [1, 2.0, True],
    "rows": [1],
    "heads": [0],
    "head_dim": [0, 33, 32.0],
    "form": ["v42"],
    "block_size": [1],
    "train_batch_size": [0],
    "max_train_steps": [0, 1.5],
    "gradient_accumulation_steps": [0],
    "learning_rate": [0, -1, float("inf"), None],
    "table_learning_rate": [0],
    "adam_beta2": [1, -0.1],
    "adam_weight_decay": [-0.1],
    "lr_scheduler": ["exponential"],
    "lr_warmup_steps": [-1],
    "max_grad_norm": [0],
    "mixed_precision": ["fp8"],
    "gradient_checkpointing": [1],
    "seed": [-1],
    "validation_steps": [-1],
    "max_validation_samples": [0],
    "checkpointing_steps": [-1],
    "checkpoints_total_limit": [0],
    "report_to": ["mlflow"],
}


@pytest.mark.parametrize("field, value", [(field, value) for field, values in NONSENSE.items() for value in values])
def test_nonsense_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"^{field} is .*expected"):
        LMTrainConfig(**GIVEN | {field: value})


def test_every_field_is_an_option_with_a_help(capsys):
    assert set(HELP) == {field.name for field in dataclasses.fields(LMTrainConfig)}
    with pytest.raises(SystemExit) as caught:
        main(["train-lm", "--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0 and all(f"--{name} " in shown or f"--{name}]" in shown for name in HELP)


@pytest.fixture
def run(build, tokenizer, tmp_path, capsys, monkeypatch):
    """Runs train-lm with a tiny model's folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    build().save_pretrained("model")
    tokenizer.save_pretrained("model")
    (tmp_path / "a.txt").write_text("A row is read by the last tokens of a text. " * 60)

    def call(*argv):
        AcceleratorState._reset_state(reset_partial_state=True)
        capsys.readouterr()
        small = ["--heads", "2", "--rows", "211", "--block_size", "32", "--train_batch_size", "4", "--report_to", "none"]
        code = main(["train-lm", "--device", "cpu", *small, *argv])
        return code, *capsys.readouterr()

    yield call
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_command_teaches_and_goes_on(run, tmp_path, caplog):
    words = ["--model", "model", "--train_file", "a.txt", "--layers", "1,2", "--output_dir", "out", "--checkpointing_steps", "2"]
    code, out, _ = run(*words, "--max_train_steps", "3")
    assert code == 0 and re.search(r"out: [\d,]+ bytes, 3 steps in \d+ s\nvalidation loss \d.*->", out)
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    code, out, _ = run(*words, "--max_train_steps", "5", "--resume_from_checkpoint", "latest", "--checkpoints_total_limit", "1")
    assert code == 0 and "5 steps" in out and "resumed from out/checkpoint-3" in caplog.text
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-5"]
    assert len(json.loads((tmp_path / "out" / "checkpoint-5" / "state.json").read_text())["losses"]) == 5


def test_sigterm_leaves_a_checkpoint_of_a_whole_step(run, tmp_path, monkeypatch, caplog):
    plain = Run.update

    def terminated(self):
        if self.step == 1:
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # it would end the tests
            signal.raise_signal(signal.SIGTERM)
        return plain(self)

    words = ["--model", "model", "--train_file", "a.txt", "--layers", "1,2", "--output_dir", "out", "--max_train_steps", "3"]
    with monkeypatch.context() as patch:
        patch.setattr(Run, "update", terminated)
        code, out, err = run(*words)
    assert code == 143 and out == "" and err.endswith("tiny-engram: stopped\n") and "stopped at step 2; go on with" in caplog.text
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    code, out, _ = run(*words, "--resume_from_checkpoint", "latest")
    assert code == 0 and "3 steps" in out


REFUSED = {
    "no such text": (["--train_file", "none.txt"], "none.txt: no such file or folder"),
    "no such model": (["--model", "none"], "none: cannot be loaded"),
    "no such path": (["--model", "/none/model"], "/none/model: no such folder; expected a transformers causal LM's"),
    "no such device": (["--device", "foo"], "device 'foo' is none that torch knows"),
    "no such GGUF": (["--model", "none.gguf"], "none.gguf: no such file"),
    "a folder that is no model": (["--model", "."], "no config.json in it"),
    "no such layer": (["--layers", "1", "9"], "layer 9: expected 0 to 3"),
    "windows too long": (["--block_size", "256"], "block_size is 256: expected at most 128"),
    "too little text": (["--block_size", "128", "--train_file", "short.txt"], "the text has 1 window of 128 tokens"),
    "no checkpoint": (["--resume_from_checkpoint", "checkpoint-9"], "'checkpoint-9' is no checkpoint"),
    "somebody's README": (["--output_dir", "other"], "README.md: would be overwritten"),
    "no place to write": (["--output_dir", "a.txt/out"], "cannot write there"),
    "float16 on a CPU": (["--mixed_precision", "fp16"], "mixed_precision 'fp16' cannot be used here"),
    "no number": (["--layers", "1,x"], "argument --layers: invalid int value: '1,x'"),
}


def test_bad_input_is_one_line(run, tmp_path):
    (tmp_path / "short.txt").write_text("a short text of a few words")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").write_text("mine")
    words = {"--model": ["model"], "--train_file": ["a.txt"], "--layers": ["1"], "--output_dir": ["out"]}
    for case, (changes, message) in REFUSED.items():
        argv = words | {changes[0]: changes[1:2] if changes[0] == "--block_size" else changes[1:]}
        if "--train_file" in changes[2:]:
            argv["--train_file"] = changes[-1:]
        try:
            code, _, err = run(*(word for name, values in argv.items() for word in (name, *values)))
        except SystemExit as stopped:
            assert stopped.code == 2 and case == "no number"
            continue
        line = err.strip().splitlines()[-1]
        assert code == 2 and line.startswith("tiny-engram: ") and message in line, (case, err)
        assert not list(tmp_path.glob("out/*.safetensors")), case
