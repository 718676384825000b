"""The command line: a round trip over every verb, JSON, every option, and what a process says and does when it is stopped."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tiny_engram.cli import main
from tiny_engram.concept import Concept
from tiny_engram.training.config import TrainConfig

# -- what works --------------------------------------------------------------------------------------------------------------


def test_round_trip(run, folder, tmp_path, capsys, quick):
    trained = ("--trigger", "cat-toy", "--aliases", "cat-toys", "kitty-toy", "--name", "toy", "--train_data_dir", folder, *quick)
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
    (folder / "2_more").mkdir()
    (folder / "1.png").rename(folder / "2_more" / "1.png")
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
        gradient_checkpointing=True,
        learning_rate=0.5,
        gate_learning_rate=0.25,
        map_learning_rate=0.125,
        optimizer="adamw",
        adam_beta1=0.8,
        adam_beta2=0.5,
        adam_epsilon=1e-6,
        adam_weight_decay=0.01,
        row_weight_decay=0.02,
        lr_scheduler="linear",
        lr_warmup_steps=5,
        lr_num_cycles=2,
        lr_power=1.5,
        lr_min_ratio=0.2,
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
        noise_offset=0.05,
        timestep_sampling="mode",
        logit_mean=0.5,
        logit_std=0.75,
        mode_scale=1.1,
        timestep_shift=3.0,
        ema_decay=0.5,
        mixed_precision="bf16",
        seed=9,
        validation_prompts=("one {trigger}", "two {trigger}"),
        validation_steps=6,
        validation_seeds=(4, 5),
        validation_inference_steps=3,
        validation_guidance_scale=2.5,
        validation_loss_steps=4,
        validation_loss_samples=16,
        validation_data_dir="held",
        early_stop_patience=3,
        checkpointing_steps=8,
        checkpoints_total_limit=11,
        resume_from_checkpoint="latest",
        report_to="none",
        recursive=True,
        folder_repeats=True,
        subject_type="person",
        caption_tag_dropout=0.25,
        shuffle_tags=True,
        random_flip=True,
        alpha_mask=True,
        unmasked_weight=0.5,
        buckets=True,
        bucket_steps=16,
        bucket_no_upscale=True,
        cache_dir="latents",
    )
    default = TrainConfig(train_data_dir="", trigger="")
    unchanged = [f.name for f in dataclasses.fields(TrainConfig) if getattr(told, f.name) == getattr(default, f.name)]
    assert unchanged == []
    argv: list[str] = []
    for name, value in told.to_dict().items():
        words = [] if value is True else [str(v) for v in value] if isinstance(value, list) else [str(value)]
        argv += [f"--{name}", *words]
    seen = []

    def train(pipe, config, *, loaded):
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


@pytest.mark.parametrize("number, code", ((signal.SIGINT, 130), (signal.SIGTERM, 143)))
def test_a_signal_keeps_the_last_whole_step(run, saved_pipe, folder, tmp_path, quick, number, code):
    options = ("--model", saved_pipe, "--device", "cpu", "--train_data_dir", folder, "--trigger", "zqx", "--checkpointing_steps", 2)
    process = start("train", *options, *quick, "--max_train_steps", 100_000, "--lr_scheduler", "constant", cwd=tmp_path)
    out = tmp_path / "out"
    deadline = time.monotonic() + 120
    while not (out / "checkpoint-4").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code and err.endswith("tiny-engram: stopped\n") and "go on with --resume_from_checkpoint latest" in err
    assert "Traceback" not in err
    names = {p.name for p in out.iterdir()} - {"config.yaml", "metrics.jsonl"}
    assert all(re.fullmatch(r"checkpoint-\d+", name) for name in names), names
    last = max(int(name.removeprefix("checkpoint-")) for name in names)
    state = json.loads((out / f"checkpoint-{last}" / "state.json").read_text())
    assert state["step"] == len(state["losses"]) == last >= 4
    assert torch.isfinite(Concept.load(out / f"checkpoint-{last}" / "concept.safetensors").mount_rows("clip_l", "input").rows()).all()
    code, said, _ = run(
        "train", *options[4:], *quick, "--max_train_steps", last + 2, "--lr_scheduler", "constant", "--resume_from_checkpoint", "latest"
    )
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").open()] == list(range(1, last + 3))
    again = json.loads((out / f"checkpoint-{last + 2}" / "state.json").read_text())
    assert code == 0 and f"{last + 2} steps" in said and again["losses"][:last] == state["losses"]
