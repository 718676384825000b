"""`tiny-engram table`: a round trip over every verb, JSON, and one clear line with exit code 2 for every bad input."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from tiny_engram.cli import main
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.mapped import map_rows
from tiny_engram.table.table_digest import BLOCK_ROWS
from tiny_engram.table.table_file import TableFile
from tiny_engram.table.table_writer import write_table

ROWS = 2 * BLOCK_ROWS + 500
PREFIX = "model.layers.1.engram."


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs `tiny-engram table ...` in tmp_path: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*argv):
        capsys.readouterr()
        try:
            code = main(["table", *map(str, argv)])
        except SystemExit as error:  # what argparse refuses
            code = error.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def refused(run, tmp_path):
    """A command that must fail: exit code 2, one line on stderr that matches, the same files as before."""

    def files():
        return {str(p.relative_to(tmp_path)): p.read_bytes() if p.is_file() else b"" for p in tmp_path.rglob("*")}

    def call(words, *argv):
        before = files()
        code, out, err = run(*argv)
        lines = err.splitlines()
        assert code == 2 and len(lines) == 1 and lines[0].startswith("tiny-engram: "), (code, err)
        assert re.search(words, lines[0]), lines[0]
        assert out == "" and files() == before

    return call


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "t.safetensors"
    write_table(path, FillRule(32).rows(torch.arange(ROWS)), prefix=PREFIX)
    return path


@pytest.fixture
def table(made, tmp_path):
    return Path(shutil.copy(made, tmp_path / "t.safetensors"))


def damage(path, row):
    with TableFile(path) as file:
        part = next(p for p in file.parts if p.first_row <= row < p.first_row + p.rows)
        place, offset = part.payload_file.path, part.payload.offset + (row - part.first_row) * 32 + 5
    with open(place, "r+b") as raw:
        raw.seek(offset)
        byte = raw.read(1)
        raw.seek(offset)
        raw.write(bytes([byte[0] ^ 1]))


def test_round_trip(run, table):
    code, out, err = run("inspect", "t.safetensors", "--json")
    about = json.loads(out)
    assert code == 0 and err == "" and (about["rows"], about["head_dim"], about["bytes"]) == (ROWS, 32, ROWS * 33)
    assert about["prefix"] == PREFIX and about["dtypes"] == {"embed.weight": "F8_E4M3", "embed.scale": "F8_E8M0"}
    digest = about["digest"]
    code, out, _ = run("inspect", "t.safetensors")
    assert code == 0 and f"{ROWS:,} rows of 32 values" in out and f"digest {digest}" in out and f"{PREFIX}embed.weight F8_E4M3" in out

    code, out, _ = run("convert", "t.safetensors", "parts.safetensors", "--shard-bytes", "2M", "--new-prefix", "")
    assert code == 0 and out == f"parts.safetensors.index.json: {ROWS:,} rows, {ROWS * 33:,} bytes, digest {digest}\n"
    code, out, _ = run("inspect", "parts.safetensors.index.json")
    assert code == 0 and f"rows {BLOCK_ROWS:,} to {2 * BLOCK_ROWS - 1:,} in parts-00002-of-00003.safetensors" in out and digest in out
    assert len(json.loads(run("inspect", "parts.safetensors.index.json", "--json")[1])["parts"]) == 3
    assert run("verify", "parts.safetensors.index.json")[1].startswith("parts.safetensors.index.json: sound, 3 of 3 blocks")

    code, out, _ = run("convert", "parts.safetensors.index.json", "pool", "--new-prefix", PREFIX)
    assert code == 0 and digest in out and Path("pool").read_bytes() == table.read_bytes()
    assert map_rows("pool").rows == ROWS
    code, out, _ = run("verify", "pool", "--rows", f"{BLOCK_ROWS + 3}:{BLOCK_ROWS + 9}", "--json")
    assert code == 0 and json.loads(out) == {"file": "pool", "digest": digest, "blocks_compared": 1, "blocks": 3}
    assert sorted(os.listdir()) == [
        *(f"parts-0000{k}-of-00003.safetensors" for k in (1, 2, 3)), "parts.safetensors.index.json", "pool", "t.safetensors"
    ]  # fmt: skip


def test_convert_to_fewer_shards_in_place(run, table):
    assert run("convert", table, "parts.safetensors", "--shard-bytes", "2M")[0] == 0
    Path("parts-00009-of-00009.safetensors").write_bytes(table.read_bytes())  # not of this table
    assert run("convert", "parts.safetensors.index.json", "parts.safetensors", "--shard-bytes", "5M", "--force")[0] == 0
    assert run("verify", "parts.safetensors.index.json")[1].startswith("parts.safetensors.index.json: sound, 3 of 3 blocks")
    left = [f"parts-{name}.safetensors" for name in ("00001-of-00002", "00002-of-00002", "00009-of-00009")]
    assert sorted(os.listdir()) == [*left, "parts.safetensors.index.json", "t.safetensors"]


def test_verify_names_the_damage(refused, run, table):
    damage(table, BLOCK_ROWS + 7)
    refused(rf"t\.safetensors: rows {BLOCK_ROWS} to {2 * BLOCK_ROWS - 1} \(block 1 of 3\) are damaged", "verify", table)
    assert run("verify", table, "--rows", f":{BLOCK_ROWS}")[0] == 0 and run("verify", table, "--rows", f"{2 * BLOCK_ROWS}:")[0] == 0
    refused("block 1 of 3", "verify", table, "--rows", f"{BLOCK_ROWS}:{BLOCK_ROWS + 1}")
    # Damaged rows do not get a digest that calls them sound.
    refused("block 1 of 3", "convert", table, "new.safetensors")


def test_bad_files(refused, run, table, tmp_path):
    refused("none: cannot open the table .No such file", "inspect", "none")
    (tmp_path / "short.safetensors").write_bytes(table.read_bytes()[:-1])
    for verb in ("inspect", "verify"):
        refused("short.safetensors: not a sound safetensors file .*truncated", verb, "short.safetensors")
    refused("truncated", "convert", "short.safetensors", "new.safetensors")
    refused("is there already", "convert", "t.safetensors", "t.safetensors")
    assert run("convert", "t.safetensors", "t.safetensors", "--force")[0] == 0 and run("verify", "t.safetensors")[0] == 0
    refused("holds no table 'other.'", "inspect", "t.safetensors", "--prefix", "other")
    refused("rows 0:999999999 are asked for", "verify", "t.safetensors", "--rows", ":999999999")
    refused("the name of an index, expected --shard-bytes", "convert", "t.safetensors", "x.safetensors.index.json")
    refused("a device holds one file", "convert", "t.safetensors", "/dev/null", "--shard-bytes", "1M")
    refused("cannot be made .*; make the folder first", "convert", "t.safetensors", "no/where.safetensors")
    refused("shards of 0 bytes", "convert", "t.safetensors", "x.safetensors", "--shard-bytes", 0)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("verify", "x", "--rows", "7"), "'7' is no range of rows"),
        (("verify", "x", "--rows", "a:b"), "'a:b' is no range of rows"),
        *((("verify", "x", "--rows", empty), f"'{empty}' holds no row") for empty in ("0:0", "5:3", ":0", "7:7")),
        (("verify", "x", "--rows=-3:-1"), "'-3:-1' is no range of rows"),
        (("verify",), "required: file"),
        (("twist",), "invalid choice: 'twist'"),
        (("inspect", "x", "--no\nsuch"), "unrecognized arguments: --no such"),
        (("plan", "--layers", "x", "--layer-time-us", "1"), "argument --layers: invalid int value: 'x'"),
        (("convert", "x", "y", "--shard-bytes", "5Q"), "'5Q' is no size"),
        (("plan", "--layers", "3", "--layer-time-us", "1", "--engram-layers", "a"), "'a' are no layers"),
    ],
)
def test_bad_words(refused, argv, words):
    refused(words + ".*; see tiny-engram( [a-z]+)* --help$", *argv)


PLAN = ("plan", "--layer-time-us", 56, "--layers", 64, "--batch", 256, "--columns", 16, "--row-bytes", 320)


def test_plan(run, tmp_path):
    code, out, err = run(*PLAN)
    assert code == 0 and err == ""
    assert "windows: 56.0 us before layer 1, 784.0 us before layer 14" in out and "0.731 GB/s over a step" in out
    assert re.search(r"\ndevice .* does not fit\n", out) and re.search(r"\nnvme +4,186 +75  none ", out)
    found = json.loads(run(*PLAN, "--json")[1])
    assert [w["us"] for w in found["windows"]] == [56, 784] and "hot" not in found

    (tmp_path / "tiers.json").write_text(json.dumps({"tiers": {"nvme": {"ns_per_row": 1.0, "gb_per_s": 500.0}}}))
    hot = (*PLAN, "--tiers", "tiers.json", "--zipf", 1.0, "--hot-rows", 4_000_000, "--unique-share", 0.5)
    code, out, _ = run(*hot)
    assert code == 0 and "hit rate 77.6% at Zipf 1" in out and "nvme: given in tiers.json" in out and "2.38 GiB" in out
    found = json.loads(run(*hot, "--json")[1])
    assert found["demand"]["rows_per_layer"] == 2048 and found["hot"]["hit_rate"] == pytest.approx(0.776, abs=1e-3)
    assert json.loads(run(*PLAN, "--tokens-per-step", 2, "--start-us", 5, "--json")[1])["demand"]["rows_per_layer"] == 8192


def test_bad_plans(refused, tmp_path):
    refused("--zipf is 1.0 and --hot-rows None: expected both", *PLAN, "--zipf", 1.0)
    refused("expected 0 to the table's 384006168", *PLAN, "--zipf", 1.0, "--hot-rows", 10**12)
    refused("--engram-layers is .1, 70., expected from 0 to 63", *PLAN, "--engram-layers", "1,70")
    refused("none.json: cannot read the tiers", *PLAN, "--tiers", "none.json")
    refused("--unique-share is 0", *PLAN, "--unique-share", 0)
    refused("--hot-rows is 1000000000000, expected", *PLAN, "--zipf", 1.0, "--hot-rows", 10**12)
    refused("--zipf is -1.0, expected 0 to 100", *PLAN, "--zipf", -1.0, "--hot-rows", 1)
    for option in ("--layer-time-us", "--layers", "--batch", "--columns", "--row-bytes", "--rows", "--tokens-per-step", "--start-us"):
        refused(f"{option} is -1(.0)?, expected", *PLAN, option, -1)


def test_columns_of_a_plan_stand_apart(run):
    huge = ("--layer-time-us", 1e9, "--batch", 10**13, "--engram-layers", ",".join(map(str, range(1, 40))), "--zipf", 1, "--hot-rows", 9)
    for words in ((), huge):
        code, out, _ = run(*PLAN, *words)
        lines = [line for line in out.splitlines() if line.startswith(("tier ", "device ", "nvme ", "dram ")) and ": " not in line]
        assert code == 0 and len(lines) > 4
        for line in lines:
            assert len(re.split(r"  +", line)) in (4, 6, 7), line
