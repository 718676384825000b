"""`train --manifest`: a file of concepts from the command line, told again, refused, gone on with."""

import json
import re

import pytest
import yaml

from tiny_engram.concept import Concept
from tiny_engram.demo import EXAMPLES
from tiny_engram.library import ConceptLibrary

SHARED = {"max_train_steps": 2, "train_batch_size": 2, "collages": 0, "report_to": "none"}
SHARED |= {"mounts": ["span"], "attention_rank": 0, "feedforward_rank": 0, "resolution": 64}


@pytest.fixture
def manifest(tmp_path, folder):
    """Writes a manifest beside the pictures: shared fields, and entries."""

    def write(*entries, name="all.yaml", **shared):
        path = tmp_path / "told" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump({**SHARED, **shared, "concepts": list(entries)}))
        return path

    return write


ENTRIES = (
    {"trigger": "zqx", "train_data_dir": "../pictures"},
    {"trigger": "vortex cat", "train_data_dir": "../pictures", "seed": 3, "name": "A cat!", "learning_rate": 1e-2},
)


def test_a_manifest_is_taught_and_told_again(run, manifest, tmp_path, caplog):
    path = manifest(*ENTRIES)
    code, out, err = run("train", "--manifest", path, "--library", "all.engrams")
    assert code == 0, err
    base = tmp_path / "told" / "concepts"
    assert [line.split()[0] for line in out.splitlines()] == ["concept", "zqx", "A", f"{base}/summary.html:", "all.engrams:"]
    made = Concept.load(base / "A-cat" / "concept.safetensors")
    assert made.trigger == "vortex cat" and made.recipe["learning_rate"] == 1e-2 and made.recipe["seed"] == 3
    assert (base / "zqx" / "report.html").exists() and 'href="A-cat/report.html"' in (base / "summary.html").read_text()
    with ConceptLibrary.open(tmp_path / "all.engrams") as library:
        assert {entry.name for entry in library} == {"zqx", "A cat!"}
    files = {p: p.read_bytes() for p in base.rglob("*") if p.is_file() and p.name != "summary.html"}
    code, out, err = run("train", "--manifest", path)
    assert code == 0 and out.count("there") == 2 and "there already, taught with these settings: 2 concepts, zqx, A cat!" in caplog.messages
    assert {p: p.read_bytes() for p in files} == files


def test_flags_go_over_the_shared_fields_and_the_whole_is_printed(run, manifest, tmp_path):
    path = manifest(*ENTRIES, output_dir="out", concepts_together=4, library="l.engrams")
    code, out, _ = run("train", "--manifest", path, "--max_train_steps", "7", "--learning_rate", "3e-3", "--print_config")
    assert code == 0
    told = yaml.safe_load(out)
    assert told["max_train_steps"] == 7 and "learning_rate" not in told and told["concepts_together"] == 4
    assert [each["learning_rate"] for each in told["concepts"]] == [3e-3, 1e-2]
    assert [each["output_dir"] for each in told["concepts"]] == [str(tmp_path / "told" / "out" / name) for name in ("zqx", "A-cat")]
    again = tmp_path / "again.yaml"
    again.write_text(out)
    assert run("train", "--manifest", again, "--print_config")[1] == out


def test_everything_that_is_wrong_in_a_manifest_is_a_line(run, manifest, tmp_path):
    path = manifest(
        {"trigger": "zqx", "train_data_dir": "../pictures", "learning_rte": 1},
        {"trigger": "one", "train_data_dir": "../pictures", "max_train_steps": "many"},
        {"trigger": "two"},
        {"train_data_dir": "../pictures"},
        {"trigger": "three", "train_data_dir": "../pictures", "mixed_precision": "bf16"},
        {"trigger": "four", "train_data_dir": "../pictures", "resume_from_checkpoint": "latest"},
        {"trigger": "five", "train_data_dir": "../pictures", "bands": 9},
        "six",
        trigger="all",
        lerning_rate=1.0,
        concepts_together=0,
    )
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("train", "--manifest", path)
    lines = [line.removeprefix(f"tiny-engram: {path}: ") for line in err.splitlines()]
    assert code == 2 and not out and sorted(tmp_path.rglob("*")) == before
    for said in (
        "entry 1 ('zqx'): no option 'learning_rte'; the nearest is 'learning_rate', and --help lists all",
        "entry 2 ('one'): max_train_steps is 'many', expected a whole number",
        "entry 3 ('two'): no train_data_dir; add it",
        "entry 4 (None): no trigger; add it",
        "entry 5 ('three'): mixed_precision is of the whole run; write it at the top",
        "entry 6 ('four'): resume_from_checkpoint is nowhere in a manifest: the same command goes on where it was stopped",
        "entry 7 ('five'): bands is 9, expected a whole number from 1 to 4",
        "entry 8 is 'six', expected lines such as 'trigger: zqx'",
        "trigger stands at the top, expected it in an entry of concepts, each of which has its own",
        "no option 'lerning_rate'; the nearest is 'learning_rate', and --help lists all",
        "concepts_together is 0, expected a whole number from 1",
    ):
        assert said in lines, (said, lines)
    assert lines[-1] == "tiny-engram: nothing was begun" and len(lines) == 12


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("concepts: []", r"concepts is \[\], expected a list of entries"),
        ("max_train_steps: 3", "concepts is None, expected a list of entries"),
        ("- a", "holds a list, expected lines such as"),
        ("concepts: {", "no YAML"),
    ],
)
def test_a_file_that_is_no_manifest(run, tmp_path, text, said):
    (tmp_path / "m.yaml").write_text(text)
    code, _, err = run("train", "--manifest", tmp_path / "m.yaml")
    assert code == 2 and re.search(said, err)
    assert run("train", "--manifest", tmp_path / "none.yaml")[0] == 2


def test_options_that_do_not_go_together(refused, manifest):
    path = manifest(*ENTRIES)
    refused("--trigger, --train_data_dir with --manifest", "train", "--manifest", path, "--trigger", "a", "--train_data_dir", "b")
    refused("--resume_from_checkpoint with --manifest", "train", "--manifest", path, "--resume_from_checkpoint", "latest")
    refused("--again without --manifest", "train", "--again", "--trigger", "a", "--train_data_dir", "b")
    refused("--concepts_together, --library without", "train", "--concepts_together", "3", "--library", "l", "--trigger", "a")


def test_a_concept_that_fails_is_named_and_the_exit_code_is_one(run, manifest, tmp_path, folder, caplog):
    (folder / "0.txt").write_text(" and so on" * 100 + " {trigger}")
    path = manifest(ENTRIES[0], {**ENTRIES[1], "train_data_dir": "good"})
    (tmp_path / "told" / "good").mkdir()
    (folder / "1.png").rename(tmp_path / "told" / "good" / "1.png")
    code, out, err = run("train", "--manifest", path)
    (line,) = [message for message in caplog.messages if message.startswith("zqx is left out: caption 'and so on")]
    assert code == 1 and len(line) < 400 and line.endswith("or write the trigger as a word of its own") and "Traceback" not in err
    assert (tmp_path / "told" / "concepts" / "A-cat" / "concept.safetensors").exists()
    assert [line.split()[1] for line in out.splitlines()[1:3]] == ["failed", "cat!"]


def test_three_concepts_on_the_embedded_base(tmp_path, capsys):
    from tiny_engram.cli import main

    told = {"max_train_steps": 2, "train_batch_size": 2, "collages": 0, "output_dir": str(tmp_path / "out")}
    entries = [{"trigger": word, "train_data_dir": str(EXAMPLES / name)} for word, name in
               (("zed-quack", "duck"), ("tako-blip", "octopus"), ("mip-zorp", "teddy"))]  # fmt: skip
    (tmp_path / "m.yaml").write_text(yaml.safe_dump({**told, "concepts": entries}))
    assert main(["train", "--manifest", str(tmp_path / "m.yaml"), "--device", "cpu"]) == 0
    for entry in entries:
        out = tmp_path / "out" / entry["trigger"]
        assert Concept.load(out / "concept.safetensors").trigger == entry["trigger"] and list((out / "logs").rglob("events*"))
        assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert len(capsys.readouterr().out.splitlines()) == 5
