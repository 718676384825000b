"""The guide to tables and the pool's examples run as they stand; what the guide names and links to exists."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import torch

from tiny_engram.config import HashConfig
from tiny_engram.hashing import NgramHasher
from tiny_engram.pipelines.families import FAMILIES
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.table_writer import write_table

SHARED_MEMORY = "/dev/shm"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(code: list[str], page: str, names: dict[str, Any]) -> None:
    """The blocks one after the other, in one namespace, as the page says."""
    for block in code:
        exec(compile(block, page, "exec"), names)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a folder in the place of shared memory, and costs that are neither measured nor kept."""
    (tmp_path / "shm").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINY_ENGRAM_LOOKUP_COSTS", "default")
    return tmp_path


@pytest.fixture
def guide(repo_root, folder) -> str:
    return (repo_root / "docs/tables.md").read_text().replace(SHARED_MEMORY, str(folder / "shm"))


def run_guide(guide: str) -> None:
    from tiny_engram.table.mapped import write_pool
    from tiny_engram.table.table_file import TableFile

    python = blocks(guide, "python")
    reads_shared = next(number for number, code in enumerate(python) if "map_rows(" in code)
    names: dict[str, Any] = {"__name__": "guide"}
    with pytest.warns(RuntimeWarning, match="the first was 10000000"):
        run(python[:reads_shared], "tables.md", names)
    with TableFile("rows.safetensors") as table:  # as the shell's convert does
        write_pool("shm/rows.safetensors", table)
    run(python[reads_shared:], "tables.md", names)


def test_the_guide(guide, folder, repo_root, capsys):
    from tiny_engram.cli import main

    run_guide(guide)
    said = capsys.readouterr().out
    assert "100,000 rows of 32 values" in said and "the CPU's path from" in said and "1,000 of 1,000 hot rows" in said

    (folder / "tiers.json").write_text(*blocks(guide, "json"))
    (folder / "shm/rows.safetensors").unlink()
    commands = [shlex.split(line) for block in blocks(guide, "sh") for line in block.splitlines()]
    tables = [command[1:] for command in commands if command[0] == "tiny-engram" and "/dev/dax0.0" not in command]
    assert {command[1] for command in tables} == {"inspect", "verify", "convert", "plan"}
    for command in tables:
        assert main(command) == 0, command
    said = capsys.readouterr().out
    assert "sound, 1 of 2 blocks compared" in said and '"two drives"' in said and '"hit_rate"' in said
    assert (folder / "one.safetensors").exists() and (folder / "sharded.safetensors.index.json").exists()

    script, command = blocks(guide, "python ranks.py"), next(command for command in commands if command[0] == "torchrun")
    (folder / "ranks.py").write_text(*script)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1:]], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    # Both write to one pipe, and a line's end is a write of its own.
    assert sorted(re.findall(r"rank (\d): 50,000 of 100,000 rows, shared 100,000", ran.stdout)) == ["0", "1"], ran.stdout


@pytest.mark.gpu
def test_the_guide_on_a_device(guide):
    assert torch.cuda.is_available()
    run_guide(guide)


def test_the_pool(repo_root, folder):
    """Against a real master and store; the model's table is a small one here."""
    spec = importlib.util.spec_from_file_location("pool_cluster", repo_root / "tests/table/pool_cluster.py")
    assert spec is not None and spec.loader is not None
    cluster = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cluster)
    cluster.need_programs()
    hashing = HashConfig(max_ngram=4, heads=8, vocab=50, pad_id=2, compressed_vocab=99_092, layer_ids=(1, 14))
    write_table("layer1.safetensors", FillRule(256).rows(torch.arange(NgramHasher(hashing, 1).rows_total)))
    pool = cluster.Cluster(folder)
    try:
        pool.start()
        page = (repo_root / "docs/pool.md").read_text()
        for stands, here in (
            ("10.0.0.1:50051", f"127.0.0.1:{pool.port}"),
            (r"10\.0\.0\.[34]\"", '127.0.0.1", timeout_ms=20_000, staging_bytes=4 << 20'),
            ("16_000_000", "50"),
            ("5_120", "64"),
        ):
            page, count = re.subn(stands, here, page)
            assert count, stands
        names: dict[str, Any] = {"__name__": "guide"}
        run(blocks(page, "python"), "pool.md", names)
    finally:
        pool.stop()
    assert torch.equal(names["values"][0, 1], FillRule(256).values(torch.tensor([1_234]))[0]) and not names["values"][1, 1].any()
    assert names["states"].shape == (1, 5, 4, 64)


def test_the_guide_to_pipelines(repo_root, monkeypatch):
    monkeypatch.setattr("tiny_engram.pipelines.families._added", {})
    page = (repo_root / "docs/pipelines.md").read_text()
    names: dict[str, Any] = {"__name__": "guide"}
    run(blocks(page, "python"), "pipelines.md", names)
    assert names["adapter"].family is names["mine"] and list(names["adapter"].mounts) == ["clip_l"]
    listed = set(re.findall(r"^\| [^|]*\| `(\w+)` \|", page, re.MULTILINE))
    known = [name for family in FAMILIES for name in family.pipelines]
    assert all(any(name.startswith(start) for start in listed) for name in known)
    assert all(any(name.startswith(start) for name in known) for start in listed)


def test_the_guide_to_schedules(repo_root, capsys):
    names: dict[str, Any] = {"__name__": "guide"}
    run(blocks((repo_root / "docs/schedules.md").read_text(), "python"), "schedules.md", names)
    assert names["made"].names == ("tako-blip",) and names["again"].size == names["picture"].size
    assert capsys.readouterr().out.startswith("factor 1, to 0 at 100 % of the steps\nprompt 'a photo of tako-blip'")


def test_the_guide_to_libraries(repo_root, folder, capsys):
    import tiny_engram
    from tiny_engram.cli import main
    from tiny_engram.pipelines.loaders import load_pipeline

    pipe = load_pipeline(device="cpu")
    adapter = tiny_engram.attach(pipe)
    for path, trigger in (("out/duck/concept.safetensors", "zed-quack"), ("concepts/tako.safetensors", "tako-blip")):
        (folder / path).parent.mkdir(parents=True)
        adapter.new_concept(trigger).save(path)
    adapter.detach()
    page = (repo_root / "docs/library.md").read_text()
    names: dict[str, Any] = {"__name__": "guide"}
    run(blocks(page, "python"), "library.md", names)
    said = capsys.readouterr().out
    assert "6 concepts" in said and "['tako, untrained']" in said and "fires: zqax-blip" in said
    assert len(names["library"]) == 4 and names["name"] == "tako-blip" and (folder / "tako.safetensors").exists()
    commands = [shlex.split(line)[1:] for block in blocks(page, "sh") for line in block.splitlines()]
    verbs = {command[1] for command in commands if command[0] == "library"}
    assert verbs == {"create", "add", "remove", "list", "verify", "export", "compact"}
    for command in commands:
        assert main(command) == 0, command
    assert capsys.readouterr().out.count("fires: tako-blip") == 2
    assert (folder / "again.safetensors").read_bytes() == (folder / "out/duck/concept.safetensors").read_bytes()


def test_dax_is_understood(guide):
    from tiny_engram.cli import _parser

    (line,) = re.findall(r"^tiny-engram (.* /dev/dax0\.0)$", guide, re.MULTILINE)
    assert _parser().parse_args(shlex.split(line)).table_verb == "convert"


@pytest.mark.parametrize("page", ["tables.md", "pool.md"])
def test_what_a_page_links_to_exists(repo_root, page):
    named = re.findall(r"\]\((?!https?:)([\w./-]+\.\w+)[^)]*\)", (repo_root / "docs" / page).read_text())
    assert named and not [path for path in named if not (repo_root / "docs" / path).exists()]
