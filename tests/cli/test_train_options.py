"""How `train` is told what to do: files of options, flags that win over them, and the same from `accelerate launch`."""

import json
import subprocess
import sys

import pytest
import yaml

from tiny_engram.cli import main
from tiny_engram.config_file import config_text, read_config_file
from tiny_engram.errors import ConfigError
from tiny_engram.train_cli import LOADING
from tiny_engram.training.config import TrainConfig


@pytest.fixture
def printed(capsys):
    """What `train ... --print_config` prints."""

    def call(*argv: object) -> dict:
        capsys.readouterr()
        assert main(["train", *map(str, argv), "--print_config"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return yaml.safe_load(out)

    return call


def test_flags_win_over_the_file_and_the_file_over_defaults(printed, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "train_data_dir: pictures\ntrigger: zqx\nmodel: emoji-pixart\nlearning_rate: 1e-3\nmixed_precision: no\nseed: 3\n"
        "mounts: [span]\naliases: zqxs\nskip_bad_pictures: true\nsnr_gamma: null\nreport_to: none\n"
    )
    told = printed("--config", path)
    assert told["learning_rate"] == 1e-3 and told["mixed_precision"] == "no" and told["model"] == "emoji-pixart" and told["seed"] == 3
    assert told["mounts"] == ["span"] and told["aliases"] == ["zqxs"] and told["skip_bad_pictures"] is True and told["snr_gamma"] is None
    assert told["dtype"] == "float32" and told["max_train_steps"] == 300
    other = printed(
        "--config", path, "--seed", 4, "--model", "emoji-sd", "--dtype", "bfloat16", "--no_skip_bad_pictures", "--mounts", "input", "value"
    )
    assert other == told | {
        "seed": 4,
        "model": "emoji-sd",
        "dtype": "bfloat16",
        "skip_bad_pictures": False,
        "mounts": ["input", "value"],
    }


def test_what_is_printed_reads_back_to_the_same_config(printed, tmp_path):
    given = {"trigger": "é: 'zqx' #1", "learning_rate": 1 / 3, "adam_epsilon": 1e-12, "validation_prompts": ("a {trigger}, no",)}
    config = TrainConfig(train_data_dir="pictures", aliases=("no", "null", "1e-3"), **given)
    path = tmp_path / "config.yaml"
    path.write_text(config_text(config, {"model": "no", "dtype": "float16", "device": None}))
    told = read_config_file(path, TrainConfig, LOADING)
    assert (told.pop("model"), told.pop("dtype")) == ("no", "float16") and TrainConfig(**told) == config
    assert printed("--config", path)["learning_rate"] == 1 / 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learnig_rate: 1", "no option 'learnig_rate'; the nearest is 'learning_rate'"),
        ("max_steps: 1", "no option 'max_steps'; the nearest is 'max_train_steps'"),
        ("3: 1", "no option 3; the nearest is"),
        ("learning_rate: fast", "learning_rate is 'fast', expected a number"),
        ("max_train_steps: 1.5", "max_train_steps is 1.5, expected a whole number"),
        ("max_train_steps: true", "max_train_steps is True, expected a whole number"),
        ("skip_bad_pictures: yes", "skip_bad_pictures is 'yes', expected true or false"),
        ("trigger: 12", "trigger is 12, expected a text"),
        ("validation_seeds: [1, a]", r"validation_seeds is \[1, 'a'\], expected a list"),
        ("resolution: big", "resolution is 'big', expected a whole number or null"),
        ("max_train_steps: 0", "max_train_steps is 0, expected a whole number from 1"),
        ("dtype: int8", "dtype is 'int8', expected one of float32"),
        ("seed: 1\nseed: 2", "no YAML .*'seed' stands there twice"),
        ("- seed", "holds a list, expected lines such as"),
        ("seed: [", "no YAML"),
        ("x: !!python/object:os.system 1", "no YAML"),
        ("train_data_dir: null", "train_data_dir is None, expected a text"),
    ],
)
def test_bad_files_are_refused_in_one_line(refused, tmp_path, text, words):
    (tmp_path / "run.yaml").write_text(text + "\n")
    has = [] if text.startswith("train_data_dir") else ["--train_data_dir", "pictures"]
    has += [] if text.startswith("trigger") else ["--trigger", "zqx"]
    refused(words, "train", "--config", "run.yaml", *has, "--print_config")


def test_what_is_missing_and_what_is_not_there(refused, tmp_path):
    refused("the following are required: --train_data_dir, --trigger; pass them, or write them into the file of --config", "train")
    (tmp_path / "run.yaml").write_text("trigger: zqx\n")
    refused("the following are required: --train_data_dir;", "train", "--config", "run.yaml")
    refused("nowhere.yaml: cannot read the config", "train", "--config", "nowhere.yaml")
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    refused("run.yaml: no YAML", "train", "--config", "run.yaml")


def test_a_run_leaves_its_config_with_which_it_can_be_made_again(run, folder, tmp_path, quick):
    code, _, _ = run("train", "--train_data_dir", folder, "--trigger", "zqx", *quick, "--seed", 5, "--mounts", "span")
    assert code == 0
    here, beside = tmp_path / "out" / "config.yaml", tmp_path / "out" / "checkpoint-2" / "config.yaml"
    assert here.read_bytes() == beside.read_bytes() and yaml.safe_load(here.read_text())["seed"] == 5
    assert yaml.safe_load(here.read_text())["device"] == "cpu"
    first = (tmp_path / "out" / "metrics.jsonl").read_text()
    code, _, _ = run("train", "--config", here, "--output_dir", "again")
    assert code == 0 and (tmp_path / "again" / "metrics.jsonl").read_text() == first
    assert [json.loads(line)["step"] for line in first.splitlines()] == [1, 2]


def test_the_module_is_the_command(tmp_path):
    (tmp_path / "run.yaml").write_text("trigger: zqx\ntrain_data_dir: pictures\n")
    words = [sys.executable, "-m", "tiny_engram.training", "--config", "run.yaml", "--seed", "7", "--print_config"]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert yaml.safe_load(told.stdout)["seed"] == 7
    wrong = subprocess.run([*words, "--no_such_option"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2 and wrong.stderr.startswith("tiny-engram: ") and len(wrong.stderr.splitlines()) == 1


def test_missing_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="no option 'b'"):
        (tmp_path / "a.yaml").write_text("b: 1")
        read_config_file(tmp_path / "a.yaml", TrainConfig)
