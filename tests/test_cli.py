"""The command line: a round trip over every verb, JSON, and one clear line with exit code 2 for every bad input."""

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import tiny_engram
from tiny_engram.cli import main
from tiny_engram.concept import Concept
from tiny_engram.training.config import TrainConfig

pytestmark = pytest.mark.usefixtures("log_levels")


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


TRAIN = ("--max_train_steps", 2, "--train_batch_size", 2, "--report_to", "none", "--output_dir", "out")
TRAIN = (*TRAIN, "--collage_pictures", 1, "--validation_inference_steps", 2)


# -- what works --------------------------------------------------------------------------------------------------------------


def test_round_trip(run, folder, tmp_path, capsys):
    trained = ("--trigger", "cat-toy", "--aliases", "cat-toys", "kitty-toy", "--name", "toy", "--train_data_dir", folder, *TRAIN)
    validated = ("--validation_steps", 2, "--validation_prompts", "a {trigger}")
    code, out, _ = run("train", *trained, *validated)
    file = tmp_path / "out" / "concept.safetensors"
    assert code == 0 and re.fullmatch(rf"out/concept\.safetensors: {file.stat().st_size:,} bytes, 2 steps in \d+ s\n", out)

    code, out, err = run("inspect", "out/concept.safetensors", "--json")
    about = json.loads(out)
    assert code == 0 and err == "" and about["trigger"] == "cat-toy" and about["aliases"] == ["cat-toys", "kitty-toy"]
    assert about["name"] == "toy" and about["base"] == "tiny-sd" and about["recipe"]["step"] == 2 and about["bytes"] == file.stat().st_size
    mount = about["roles"]["clip_l"]["mounts"]["input"]
    assert mount["rows"] == 4 * about["roles"]["clip_l"]["positions"] and about["roles"]["clip_l"]["width"] == 128
    code, out, _ = run("inspect", file)
    assert code == 0 and "trigger 'cat-toy', also 'cat-toys', 'kitty-toy'" in out and "made on base 'tiny-sd'" in out

    code, out, err = run("list", "out", "--json")
    (entry,) = json.loads(out)
    assert code == 0 and err == "" and entry["trigger"] == "cat-toy" and entry["file"] == "out/concept.safetensors"
    assert "'cat-toy'" in run("list", "out")[1] and "no concept files" in run("list", folder)[1]

    code, out, err = run("explain", "--concept", file, "a cat-toy, and CAT-TOYS", "--negative_prompt", "kitty-toyish", "--json")
    prompt, negative = json.loads(out)["prompts"]
    assert code == 0 and err == "" and [f["text"] for f in prompt["fired"]] == ["cat-toy", "CAT-TOYS"]
    assert negative["negative"] and not negative["fired"] and negative["unfired"][0]["name"] == "toy"
    assert "fires: toy at tokens" in run("explain", "--concept", file, "a cat-toy")[1]

    drawn = ("--prompt", "a cat-toy", "--num_inference_steps", 2, "--guidance_scale", 4.0)
    code, out, err = run("generate", "--concept", file, *drawn, "--output", "new/p.png", "--num_images", 2)
    assert code == 0 and out == "new/p-0.png\nnew/p-1.png\n" and "fires: toy" in err
    picture = Image.open(tmp_path / "new" / "p-0.png")
    sheet = Image.open(tmp_path / "out" / "validation" / "step-2.png")
    assert np.array_equal(np.asarray(picture), np.asarray(sheet))  # what was validated is what the shell draws
    said = json.loads(picture.text["parameters"])  # pyright: ignore[reportAttributeAccessIssue]
    assert said["prompt"] == "a cat-toy" and said["seed"] == 0 and said["concepts"] == [str(file)]
    assert not np.array_equal(np.asarray(picture), np.asarray(Image.open(tmp_path / "new" / "p-1.png")))

    # Strength 0 is the base, to the bit, and so is no concept at all.
    assert (
        run("generate", *drawn, "--output", "base.png")[0]
        == run("generate", "--concept", f"{file}=0", *drawn, "--output", "off.png")[0]
        == 0
    )
    base, off = (np.asarray(Image.open(tmp_path / name)) for name in ("base.png", "off.png"))
    assert np.array_equal(base, off) and not np.array_equal(base, np.asarray(picture))


def test_a_file_whose_name_holds_an_equals_sign(run, tiny, adapter, tmp_path):
    tiny.concept(adapter, "zqx").save(tmp_path / "a=1.safetensors")
    for name, strength in (("a=1.safetensors", 1.0), ("a=1.safetensors=0.25", 0.25)):
        code, out, _ = run("explain", "--concept", name, "a zqx", "--json")
        assert code == 0 and json.loads(out)["prompts"][0]["fired"][0]["strength"] == strength


def test_list_names_broken_files_and_lists_the_others(run, concept_file, tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(concept_file.read_bytes()[:300])
    (tmp_path / "notes.txt").write_text("no concept")
    code, out, err = run("list", tmp_path, "--json")
    broken, sound = json.loads(out)
    assert code == 0 and err == "" and "truncated" in broken["error"] and sound["trigger"] == "zqx"
    code, out, _ = run("list")
    assert code == 0 and re.search(r"broken\.safetensors  not a concept: .*truncated", out) and "zqx.safetensors  'zqx'" in out
    assert len(out.splitlines()) == 2


def test_every_field_of_the_config_is_an_option(run, folder, monkeypatch):
    told = TrainConfig(
        train_data_dir=str(folder),
        trigger="zqx",
        aliases=("zqxs", "my zqx"),
        name="mine",
        output_dir="there",
        caption_template=("a {trigger}", "the {trigger}"),
        caption_dropout=0.25,
        skip_bad_pictures=True,
        resolution=96,
        train_batch_size=3,
        max_train_steps=7,
        gradient_accumulation_steps=2,
        learning_rate=0.5,
        gate_learning_rate=0.25,
        map_learning_rate=0.125,
        adam_beta2=0.5,
        lr_scheduler="linear",
        lr_warmup_steps=5,
        max_grad_norm=2.0,
        mounts=("span", "value"),
        share="none",
        bands=3,
        attention_rank=3,
        feedforward_rank=2,
        class_word="hot air balloon",
        collages=3,
        companions=("hat", "sailing ship"),
        collage_pictures=3,
        rho=0.75,
        context_rho=0.5,
        snr_gamma=None,
        ema_decay=0.5,
        mixed_precision="bf16",
        seed=9,
        validation_prompts=("one {trigger}", "two {trigger}"),
        validation_steps=6,
        validation_seeds=(4, 5),
        validation_inference_steps=3,
        validation_guidance_scale=2.5,
        checkpointing_steps=8,
        checkpoints_total_limit=11,
        resume_from_checkpoint="latest",
        report_to="none",
    )
    default = TrainConfig(train_data_dir="", trigger="")
    unchanged = [f.name for f in dataclasses.fields(TrainConfig) if getattr(told, f.name) == getattr(default, f.name)]
    assert unchanged == []
    argv: list[str] = []
    for name, value in told.to_dict().items():
        words = [] if value is True else [str(v) for v in value] if isinstance(value, list) else [str(value)]
        argv += [f"--{name}", *words]
    seen = []

    def train(pipe, config):
        seen.append(config)
        return SimpleNamespace(path=folder / "0.png", steps=0, seconds=0.0)

    monkeypatch.setattr("tiny_engram.pipelines.loaders.load_pipeline", lambda *args, **kwargs: None)
    monkeypatch.setattr("tiny_engram.training.loop.train", train)
    assert run("train", *argv)[0] == 0 and seen == [told]
    assert run("train", "--train_data_dir", folder, "--trigger", "zqx")[0] == 0
    assert seen[1] == TrainConfig(train_data_dir=str(folder), trigger="zqx")


def test_help_tells_what_every_option_of_train_is_for_and_its_default(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    options = re.split(r"\n  -", capsys.readouterr().out.replace("\n    ", " "))
    told = {option.split()[0].strip("-"): " ".join(option.split()) for option in options[1:]}
    for field in dataclasses.fields(TrainConfig):
        words = re.sub(r"\(default: .*\)$", "", told[field.name]).split()
        assert any(word.islower() for word in words[1:]), told[field.name]
    for name, default in (("seed", "0"), ("lr_warmup_steps", "0"), ("rho", "2.5"), ("mounts", "input value")):
        assert told[name].endswith(f"(default: {default})"), told[name]


# -- bad input ---------------------------------------------------------------------------------------------------------------


def test_bad_pictures(refused, folder, tmp_path):
    train = ("train", "--trigger", "zqx", *TRAIN, "--train_data_dir")
    (tmp_path / "empty").mkdir()
    refused("nowhere: no such folder", *train, "nowhere")
    refused("empty: no pictures in it", *train, "empty")
    (folder / "notes.md").write_text("junk")
    (folder / "2.png").write_bytes(b"no")
    refused(r"pictures/2\.png: not a picture that can be read .*--skip_bad_pictures", *train, folder)
    for path in folder.glob("*.png"):
        path.write_bytes(b"no")
    refused(r"none of its 3 pictures can be read: 0\.png, 1\.png, 2\.png", *train, folder, "--skip_bad_pictures")


@pytest.mark.parametrize(
    ("trigger", "words"),
    [
        ("", "trigger '' is empty"),
        ("  ", "is empty"),
        ("-!?", "trigger '-!\\?' is all punctuation"),
        ("zqx " * 76, "takes .* tokens, expected at most 75"),
    ],
)
def test_bad_triggers(refused, folder, trigger, words):
    refused(words, "train", "--train_data_dir", folder, f"--trigger={trigger}", *TRAIN)


def test_bad_settings(refused, folder):
    train = ("train", "--train_data_dir", folder, "--trigger", "zqx", *TRAIN)
    refused("max_train_steps is 0, expected a whole number from 1", *train, "--max_train_steps", 0)
    refused("'a photo' does not hold the trigger", *train, "--caption_template", "a photo")
    refused("'checkpoint-9' is no checkpoint", *train, "--resume_from_checkpoint", "checkpoint-9")


def test_bad_models(refused, concept_file, folder, run, monkeypatch):
    refused("model 'nowhere' cannot be loaded", "explain", "--model", "nowhere", "a zqx")
    refused("model 'nowhere' cannot be loaded", "train", "--model", "nowhere", "--train_data_dir", folder, "--trigger", "zqx", *TRAIN)
    refused("device 'toaster' cannot be used", "explain", "--device", "toaster", "a zqx")


def test_bad_concept_files(refused, tiny, adapter, concept_file, tmp_path):
    whole = concept_file.read_bytes()
    hostile = {
        "cut": whole[:-40],
        "short": whole[:5],
        "huge": struct.pack("<Q", 2**60) + whole[8:],
        "deep": struct.pack("<Q", 100_000) + b"[" * 100_000,
        "text": b"not a concept, but a text of some length",
        "other": whole.replace(b"tiny_engram", b"tiny_engrum"),
    }
    for name, blob in hostile.items():
        (tmp_path / f"{name}.safetensors").write_bytes(blob)
        refused(rf"{name}\.safetensors: ", "inspect", f"{name}.safetensors", "--json")
        refused(rf"{name}\.safetensors: ", "explain", "--concept", f"{name}.safetensors", "a zqx")
    refused(r"nowhere\.safetensors: does not exist", "generate", "--concept", "nowhere.safetensors", "--prompt", "a zqx")
    refused("is a folder, expected a concept file", "inspect", tmp_path)
    refused("nowhere: no such folder", "list", "nowhere")
    refused(r"a b\.safetensors: does not exist", "inspect", "a\nb.safetensors")  # one line, whatever is in the name


def test_concepts_of_another_base(refused, tiny, adapter, tmp_path):
    other = tiny_engram.attach(narrow := tiny.build(width=64))
    tiny.concept(other, "zqx").save(tmp_path / "narrow.safetensors")
    other.detach()
    del narrow
    refused("has width 64 at clip_l, expected 128; load it into the base", "explain", "--concept", "narrow.safetensors", "a zqx")
    mine = tiny.concept(adapter, "zqx")
    place = dataclasses.replace(mine.roles["clip_l"], fingerprint="0" * 64)
    dataclasses.replace(mine, roles={"clip_l": place}).save(tmp_path / "tokens.safetensors")
    refused("made with tokenizer 000000000000 at clip_l, expected", "explain", "--concept", "tokens.safetensors", "a zqx")


def test_a_trigger_that_is_taken_and_strengths(refused, tiny, adapter, concept_file, tmp_path):
    tiny.concept(adapter, "ZQX", name="other").save(tmp_path / "other.safetensors")
    generate = ("generate", "--prompt", "a zqx", "--num_inference_steps", 1, "--concept", concept_file, "--concept")
    refused("zqx.safetensors': its name 'zqx' is that of .*zqx.safetensors'; teach one with another --trigger", *generate, concept_file)
    refused("trigger 'ZQX' of concept 'other' is already registered by concept 'zqx'", *generate, "other.safetensors")
    refused("strength 'much' is no number; write FILE=0.8", *generate, "other.safetensors=much")
    refused("strength is nan, expected a finite number", *generate[:-2], f"{concept_file}=nan")


def test_unknown_concept_names(adapter, tiny):
    adapter.load_concept(tiny.concept(adapter, "zqx"))
    with pytest.raises(tiny_engram.TinyEngramError, match="no concept 'zqy'; known: 'zqx'"):
        tiny_engram.set_concepts(adapter.pipe, "zqy")


def test_bad_outputs(refused, folder, tmp_path):
    (tmp_path / "file").write_text("mine")
    refused("file/out: cannot write there", "train", "--train_data_dir", folder, "--trigger", "zqx", *TRAIN, "--output_dir", "file/out")
    generate = ("generate", "--prompt", "a cat", "--num_inference_steps", 1)
    refused("file: cannot write there", *generate, "--output", "file/p.png")
    refused("expected a file name ending in .png", *generate, "--output", "p.jpg")
    refused("--num_images is 0, expected at least 1", *generate, "--num_images", 0)
    refused("file/demo: cannot write there", "demo", "--out", "file/demo")
    refused("no example subject 'unheard-of'; known: .*octopus", "demo", "--subject", "unheard-of")


def test_a_full_disk(refused, run, folder, tmp_path, monkeypatch):
    train = ("train", "--train_data_dir", folder, "--trigger", "zqx", *TRAIN)
    assert run(*train)[0] == 0
    (tmp_path / "p.png").write_bytes(b"old")

    def fail(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    refused("No space left on device", *train)
    refused(r"p\.png: .*No space left", "generate", "--prompt", "a", "--num_inference_steps", 1, "--output", "p.png", shown=("prompt", " "))


@pytest.mark.parametrize(
    "argv",
    [[], ["teach"], ["train"], ["train", "--trigger", "zqx", "--train_data_dir", "x", "--seed", "one"], ["generate"], ["list", "--nope"]],
)
def test_usage_errors_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and not out and re.fullmatch(r"tiny-engram: .+; see tiny-engram( [a-z]+)? --help\n", err), err


# -- as a process ------------------------------------------------------------------------------------------------------------

PROGRAM = Path(sys.executable).parent / "tiny-engram"


def start(*argv: object, cwd: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY")}
    words = [str(word) for word in argv]
    # What a shell runs in the background ignores Ctrl-C, and so would the program that it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen([PROGRAM, *words], cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)


def test_processes_say_one_thing_on_each_stream(saved_pipe, concept_file, folder, tmp_path):
    shutil.copy(concept_file, tmp_path / "again.safetensors")
    common = ("--model", saved_pipe, "--device", "cpu", "--concept", concept_file)
    sound = start("explain", *common, "a zqx", "--json", cwd=tmp_path)
    taken = start("explain", *common, "--concept", "again.safetensors", "a zqx", "--json", cwd=tmp_path)
    (folder / "notes.md").write_text("junk")
    (folder / "2.png").write_bytes(b"II*\0" + b"\xff" * 40)
    picture = start("train", "--train_data_dir", folder, "--trigger", "zqx", "--output_dir", "out", cwd=tmp_path)
    out, err = sound.communicate(timeout=120)
    assert sound.returncode == 0 and err == "" and json.loads(out)["prompts"][0]["fired"][0]["name"] == "zqx"
    for process, words in ((taken, "its name 'zqx' is that of"), (picture, "2.png: not a picture")):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 2 and out == "" and len(err.splitlines()) == 1, err
        assert err.startswith("tiny-engram: ") and words in err
    assert not (tmp_path / "out").exists()


def test_ctrl_c_keeps_the_last_whole_step(run, saved_pipe, folder, tmp_path):
    options = ("--model", saved_pipe, "--device", "cpu", "--train_data_dir", folder, "--trigger", "zqx", "--checkpointing_steps", 2)
    process = start("train", *options, *TRAIN, "--max_train_steps", 100_000, "--lr_scheduler", "constant", cwd=tmp_path)
    out = tmp_path / "out"
    deadline = time.monotonic() + 120
    while not (out / "checkpoint-4").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.endswith("tiny-engram: stopped\n") and "go on with --resume_from_checkpoint latest" in err
    assert "Traceback" not in err
    names = {p.name for p in out.iterdir()}
    assert all(re.fullmatch(r"checkpoint-\d+", name) for name in names), names
    last = max(int(name.removeprefix("checkpoint-")) for name in names)
    state = json.loads((out / f"checkpoint-{last}" / "state.json").read_text())
    assert state["step"] == len(state["losses"]) == last >= 4
    assert torch.isfinite(Concept.load(out / f"checkpoint-{last}" / "concept.safetensors").mount_rows("clip_l", "input").rows()).all()
    code, said, _ = run(
        "train", *options[4:], *TRAIN, "--max_train_steps", last + 2, "--lr_scheduler", "constant", "--resume_from_checkpoint", "latest"
    )
    again = json.loads((out / f"checkpoint-{last + 2}" / "state.json").read_text())
    assert code == 0 and f"{last + 2} steps" in said and again["losses"][:last] == state["losses"]
