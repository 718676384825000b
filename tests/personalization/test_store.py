"""Files of pieces, packs of them, and the results that they add up to."""

import zipfile

import numpy as np
import pytest

from benchmarks.personalization.store import Pictures, PieceFile, load_results, merge, pack, save_results, unpack


def piece(key, *, cells=("owl/0",), stage="final", label="Ours", value=1.0, finished=1.0, version=1, machine="CPU"):
    about = {"stage": stage, "method": "ours", "label": label, "version": version, "method_version": 1, "settings": {"steps": 3}}
    common = {"method": "ours", "label": label, "step": 3, "context": "bare", "identity": value}
    records = [common | {"subject": cell.split("/")[0]} for cell in cells]
    return {
        "key": key, "piece": about, "cells": list(cells), "seconds": 2.0, "work": 10, "finished": finished,
        "commit": f"commit of {key}", "machine": machine, "versions": {"torch": "2"},
        "records": {stage: records}, "pairs": [{"stage": stage, "subjects": ["owl", "yak"], "both": value}],
        "losses": {f"{stage}/{label}/{cell}": [value] for cell in cells}, "costs": {}, "judges": {}, "ceilings": {},
    }  # fmt: skip


@pytest.fixture
def empty(tmp_path):
    return load_results(tmp_path / "absent.json")


def values(results, stage="final"):
    return {record["subject"]: record["identity"] for record in results["stages"][stage]}


def test_a_piece_and_its_pictures_come_back(tmp_path):
    gradient = np.tile(np.arange(128, dtype=np.uint8)[:, None, None], (1, 128, 3))
    content = piece("0123456789abcdef")
    written = PieceFile.write(tmp_path / "deep", content["key"], content, {"ours/owl/0/3/bare": gradient}, {"owl-0.safetensors": b"rows"})
    assert PieceFile.all(tmp_path / "deep")[0].read() == content and written.key == content["key"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["0123456789abcdef.zip"]
    pictures = Pictures(tmp_path / "deep")
    assert list(pictures) == ["ours/owl/0/3/bare"] and len(pictures) == 1
    found = pictures["ours/owl/0/3/bare"]
    assert found.shape == (128, 128, 3) and np.abs(found.astype(int) - gradient).max() <= 6
    with zipfile.ZipFile(written.path) as file:
        assert file.read("concepts/owl-0.safetensors") == b"rows"


def test_the_newer_picture_counts(tmp_path):
    for key, shade, finished in (("b" * 16, 10, 1.0), ("a" * 16, 200, 2.0)):
        picture = np.full((128, 128, 3), shade, np.uint8)
        PieceFile.write(tmp_path, key, piece(key, finished=finished), {"ours/owl/0/3/bare": picture}, {})
    assert Pictures(tmp_path)["ours/owl/0/3/bare"].mean() > 150


def test_packs_are_carried_in_parts(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), np.uint8)
    keys = [digit * 16 for digit in "abc"]
    files = [PieceFile.write(tmp_path / "there", key, piece(key), {"x": noise}, {}) for key in keys]
    size = files[0].path.stat().st_size
    parts = pack(files, tmp_path / "pack.zip", part_bytes=2 * size + 2000)
    assert [path.name for path in parts] == ["pack.zip", "pack-2.zip"]
    assert [file.key for file in unpack(parts, tmp_path / "here")] == keys
    for file in PieceFile.all(tmp_path / "here"):
        assert file.path.read_bytes() == (tmp_path / "there" / file.path.name).read_bytes()
    assert [path.name for path in pack([], tmp_path / "none.zip")] == ["none.zip"] and unpack([tmp_path / "none.zip"], tmp_path) == []


def test_packs_that_are_none(tmp_path):
    (tmp_path / "text.zip").write_text("no zip")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as file:
        file.writestr("../up.zip", b"")
    for name, says in (("absent.zip", "cannot be read"), ("text.zip", "cannot be read"), ("other.zip", "expected files of pieces")):
        with pytest.raises(ValueError, match=says):
            unpack([tmp_path / name], tmp_path / "here")
    assert not list((tmp_path / "here").glob("*"))


def test_pieces_add_up(empty):
    results = merge(empty, [piece("a" * 16, cells=("owl/0", "yak/0")), piece("b" * 16, cells=("cow/0",), value=2.0, machine="GPU")])
    assert values(results) == {"owl": 1.0, "yak": 1.0, "cow": 2.0}
    assert {record["piece"] for record in results["stages"]["final"]} == {"a" * 8, "b" * 8}
    assert len(results["pairs"]) == 2 and len(results["losses"]) == 3 and set(results["pieces"]) == {"a" * 16, "b" * 16}
    assert results["commit"] == f"commit of {'b' * 16}" and results["machine"] == "CPU and GPU"
    again = merge(results, [piece("a" * 16, cells=("owl/0", "yak/0"))])
    assert values(again) == values(results) and len(again["pairs"]) == 2 and len(again["losses"]) == 3


def test_a_later_piece_of_the_same_runs_takes_the_place(empty):
    old, new = piece("a" * 16, cells=("owl/0", "yak/0"), finished=1.0), piece("b" * 16, cells=("owl/0",), value=3.0, finished=2.0)
    for order in ([old, new], [new, old]):
        results = merge(empty, order)
        assert values(results) == {"owl": 3.0} and set(results["pieces"]) == {"b" * 16} and len(results["pairs"]) == 1
    assert values(merge(merge(empty, [new]), [old])) == {"owl": 3.0}
    other = merge(empty, [old, piece("c" * 16, label="Another", finished=3.0), piece("d" * 16, stage="levers", finished=3.0)])
    assert len(other["stages"]["final"]) == 3 and len(other["stages"]["levers"]) == 1


def test_another_version_takes_the_place_of_all_runs(empty):
    results = merge(empty, [piece("a" * 16, cells=("owl/0",)), piece("b" * 16, cells=("yak/0",), value=2.0, finished=2.0, version=2)])
    assert values(results) == {"yak": 2.0}


def test_results_are_kept_with_a_record_a_line(tmp_path, empty):
    results = merge(empty, [piece("a" * 16, cells=("owl/0", "yak/0"))])
    save_results(tmp_path / "results" / "all.json", results)
    text = (tmp_path / "results" / "all.json").read_text()
    assert load_results(tmp_path / "results" / "all.json") == results
    assert all(line.count('"context"') <= 1 for line in text.splitlines()) and text.count("\n") > 10
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="no results of this bench"):
        load_results(tmp_path / "bad.json")


def test_results_are_about_one_base(tmp_path, empty):
    other = piece("b" * 16) | {"base": "emoji-pixart"}
    with pytest.raises(ValueError, match="pieces on the base emoji-pixart, but the results are about emoji-sd"):
        merge(empty, [piece("a" * 16), other])
    results = merge(load_results(tmp_path / "absent.json", "emoji-pixart"), [other])
    save_results(tmp_path / "results.json", results)
    assert results["base"] == "emoji-pixart" and load_results(tmp_path / "results.json", "emoji-pixart") == results
    with pytest.raises(ValueError, match="results on the base emoji-pixart, expected those on emoji-sd; give --base emoji-pixart"):
        load_results(tmp_path / "results.json")
    assert "base" not in empty, "the first base's results are named by no base"


def test_figures_that_are_no_numbers(tmp_path, empty):
    diverged = piece("a" * 16) | {"losses": {"final/Ours/owl/0": [0.5, None]}}
    results = merge(empty, [PieceFile.write(tmp_path, "a" * 16, diverged, {}, {}).read()])
    save_results(tmp_path / "results.json", results)
    assert load_results(tmp_path / "results.json") == results and results["losses"]["final/Ours/owl/0"]["curve"] == [0.5, None]
    # files of others may hold what Python's parser takes and no other does
    (tmp_path / "results.json").write_text((tmp_path / "results.json").read_text().replace("null", "NaN"))
    assert load_results(tmp_path / "results.json") == results
    for broken in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a figure is no number"):
            PieceFile.write(tmp_path, "b" * 16, piece("b" * 16, value=broken), {}, {})
        with pytest.raises(ValueError, match="a figure is no number"):
            save_results(tmp_path / "results.json", merge(empty, [piece("b" * 16, value=broken)]))
    assert not (tmp_path / f"{'b' * 16}.zip").exists() and load_results(tmp_path / "results.json") == results
