"""One clear line and exit code 2 for every bad input of the command line, and no file left behind."""

import dataclasses
import errno
import os
import re
import struct

import pytest

import tiny_engram
from tiny_engram.cli import main


def test_bad_pictures(refused, folder, tmp_path, quick):
    train = ("train", "--trigger", "zqx", *quick, "--train_data_dir")
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
def test_bad_triggers(refused, folder, trigger, words, quick):
    refused(words, "train", "--train_data_dir", folder, f"--trigger={trigger}", *quick)


def test_bad_settings(refused, folder, quick):
    train = ("train", "--train_data_dir", folder, "--trigger", "zqx", *quick)
    refused("max_train_steps is 0, expected a whole number from 1", *train, "--max_train_steps", 0)
    refused("'a photo' does not hold the trigger", *train, "--caption_template", "a photo")
    refused("'checkpoint-9' is no checkpoint", *train, "--resume_from_checkpoint", "checkpoint-9")


def test_bad_models(refused, concept_file, folder, run, monkeypatch, quick):
    refused("model 'nowhere' cannot be loaded", "explain", "--model", "nowhere", "a zqx")
    refused("model 'nowhere' cannot be loaded", "train", "--model", "nowhere", "--train_data_dir", folder, "--trigger", "zqx", *quick)
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
    refused(r"holds 7 files to choose from \(cut.safetensors, .*\); name one", "inspect", tmp_path)
    refused("nowhere: no such folder", "list", "nowhere")
    refused("other.safetensors: is a file, expected a folder of concept files; inspect tells", "list", "other.safetensors")
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


def test_bad_outputs(refused, folder, tmp_path, quick):
    (tmp_path / "file").write_text("mine")
    refused("file/out: cannot write there", "train", "--train_data_dir", folder, "--trigger", "zqx", *quick, "--output_dir", "file/out")
    generate = ("generate", "--prompt", "a cat", "--num_inference_steps", 1)
    refused("file: cannot write there", *generate, "--output", "file/p.png")
    refused("expected a file name ending in .png", *generate, "--output", "p.jpg")
    refused("--num_images is 0, expected at least 1", *generate, "--num_images", 0)
    refused("file/demo: cannot write there", "demo", "--out", "file/demo")
    refused("no example subject 'unheard-of'; known: .*octopus", "demo", "--subject", "unheard-of")


def test_a_full_disk(refused, run, folder, tmp_path, monkeypatch, quick):
    train = ("train", "--train_data_dir", folder, "--trigger", "zqx", *quick)
    assert run(*train)[0] == 0
    (tmp_path / "p.png").write_bytes(b"old")

    def fail(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    refused("No space left on device", *train)
    refused(r"p\.png: .*No space left", "generate", "--prompt", "a", "--num_inference_steps", 1, "--output", "p.png", shown=("prompt", " "))


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["teach"],
        ["train", "--seed"],
        ["train", "--trigger", "zqx", "--train_data_dir", "x", "--seed", "one"],
        ["generate"],
        ["list", "--nope"],
    ],
)
def test_usage_errors_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and not out and re.fullmatch(r"tiny-engram: .+; see tiny-engram( [a-z]+)? --help\n", err), err
