"""The command: one small comparison from teaching to the results file, done once, carried elsewhere, and what it refuses."""

import json
import zipfile

import pytest

from benchmarks.personalization import __main__ as command
from benchmarks.personalization import plan
from benchmarks.personalization.__main__ import Clock, arguments, main, pieces_of, rates_of, settings_of
from benchmarks.personalization.pieces import Bench, estimate
from benchmarks.personalization.store import Pictures, PieceFile

TINY = ["--reduced", "--steps", "2", "--batch", "1", "--samples", "1", "--pair", "1", "--choices", "2", "--drawing-steps", "1"]


@pytest.fixture(scope="module")
def small(tmp_path_factory, few):
    """The folder of a comparison of one method, two steps long."""
    folder = tmp_path_factory.mktemp("small")
    assert main([*TINY, "--only", "ours", "--out", str(folder), "--pack", str(folder / "packs" / "carry.zip")]) == 0
    return folder


def test_records_of_a_small_comparison(small, few):
    results = json.loads((small / "results.json").read_text())
    records = results["stages"]["methods"]
    subjects = results["settings"]["subjects"]["development"][:2]
    assert [(r["subject"], r["context"]) for r in records] == [(s, c) for s in subjects for c in few]
    for record in records:
        assert (record["method"], record["step"], record["seed"], record["pictures"]) == ("ours", 2, 0, 1)
        assert all(0 <= record[name] <= 1 for name in ("effnet_best", "lpips_best", "identity", "identity_lpips"))
        assert ("prompt" in record) == (record["context"] != "bare")
    (pair,) = results["pairs"]
    assert sorted(pair["subjects"]) == sorted(subjects) and {"both", "both_lpips", "left", "right"} <= set(pair)
    assert len(results["losses"]) == 2 and all(len(loss["curve"]) == 1 and loss["curve"][0] > 0 for loss in results["losses"].values())
    assert results["settings"]["main"] == 2 and results["commit"] and results["machine"] and "torch" in results["versions"]


def test_pictures_and_concepts_are_kept(small, few):
    pictures = Pictures(small)
    assert len(pictures) == 2 * len(few) + 1 and all(pictures[name].shape == (128, 128, 3) for name in list(pictures)[:2])
    assert sum(name.endswith("/0/2/bare") for name in pictures) == 2
    with zipfile.ZipFile(PieceFile.all(small)[0].path) as file:
        assert sum(name.startswith("concepts/") for name in file.namelist()) == 2


def test_what_is_done_is_not_done_again(small, capsys):
    (file,) = PieceFile.all(small)
    before = file.path.stat().st_mtime_ns
    assert main([*TINY, "--only", "ours", "--out", str(small)]) == 0
    out = capsys.readouterr().out
    assert "nothing is left" in out and "begins" not in out and file.path.stat().st_mtime_ns == before


def test_pieces_are_carried_to_another_place(small, tmp_path, capsys):
    packed = small / "packs" / "carry.zip"
    assert main(["merge", "--reduced", "--out", str(tmp_path), "--unpack", str(packed)]) == 0
    here, there = (json.loads((folder / "results.json").read_text()) for folder in (tmp_path, small))
    assert all(here[name] == there[name] for name in ("stages", "pairs", "settings", "losses"))
    assert main([*TINY, "--only", "ours", "--out", str(tmp_path / "bare"), "--results", str(tmp_path / "results.json")]) == 0
    assert "begins" not in capsys.readouterr().out, "what the results file lists is done, though its file is elsewhere"


def test_no_time_begins_nothing(tmp_path, capsys):
    assert main([*TINY, "--out", str(tmp_path), "--minutes", "0"]) == 0
    out = capsys.readouterr().out
    assert "left: 3: methods: Textual inversion" in out and "begins" not in out and not list(tmp_path.glob("*.zip"))


def test_mistakes_are_one_line(tmp_path, capsys):
    results = ["--out", str(tmp_path), "--results", str(tmp_path / "results.json")]
    (tmp_path / "levers.json").write_text("{}")
    for words, says in (
        (["final", *results], "the best LoRA is not known"),
        (["methods", *results], "no learning rate was chosen for inversion-1"),
        (["sweep", "--only", "nothing", *results], "method 'nothing' is not known"),
        (["levers", "--levers", str(tmp_path / "levers.json"), *results], "expected a JSON list"),
        (["merge", "--unpack", str(tmp_path / "absent.zip"), *results], "cannot be read as a pack"),
    ):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and says in err, err
    for words in (["--shard", "3/2"], ["--shard", "x"], ["nosuch"], ["--rate", "ours"], ["--rate", "ours=0"], ["--rate", "nosuch=1"]):
        with pytest.raises(SystemExit):
            arguments(words)


def test_a_rate_may_be_given():
    bench = Bench("cpu")
    args = arguments(["final", "--only", "ours", "--rate", "ours=0.25"])
    (piece,) = pieces_of("final", bench, args, {"rates": {"ours": {"rate": 0.5}}, "best_lora": "lora-unet-r8"})
    assert {run.learning_rate for run in piece.runs} == {0.25}


def test_the_second_base_has_files_of_its_own_and_lent_rates():
    first, second = arguments(["final"]), arguments(["final", "--base", "emoji-pixart", "--rate", "ours=0.25"])
    assert first.results.name == "personalization.json" and second.results.name == "personalization-dit.json"
    assert first.out.name == "personalization" and second.out.name == "personalization-emoji-pixart"
    bench, own = Bench("cpu", second.spec), {"rates": {"inversion-t": {"rate": 0.5}}}
    lent = json.loads(first.results.read_text())["rates"]
    rates = {p.method: p.runs[0].learning_rate for p in pieces_of("final", bench, second, own)}
    assert rates["ours"] == 0.25 and rates["inversion-t"] == 0.5 and rates["lora-unet-r8"] == lent["lora-unet-r8"]["rate"]
    assert bench.inputs != Bench("cpu").inputs
    with pytest.raises(SystemExit):
        arguments(["final", "--base", "nosuch"])


def test_settings_of_trials_are_other_settings():
    assert settings_of(arguments(["sweep"])) == plan.FULL and settings_of(arguments(["--reduced"])) == plan.REDUCED
    assert settings_of(arguments(["sweep", "--steps", "150"])).checkpoints == (25, 50, 100, 150)
    trial = settings_of(arguments(["sweep", "--steps", "100", "--main", "60"]))
    assert (trial.steps, trial.main, trial.checkpoints) == (100, 60, (25, 50, 60, 100))


def test_published_rates_serve_the_reduced_form_alone():
    results = {"rates": {"ours": {"rate": 0.25}}}
    assert rates_of(results, reduced=False) == {"ours": 0.25}
    assert rates_of(results, reduced=True) == {**plan.RATES, "ours": 0.25}


def test_time_that_is_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    clock = Clock(2)
    assert clock.fits(600), "the first piece is begun whatever the estimate says"
    clock.begun = 1
    assert clock.fits(119) and clock.fits(None) and not clock.fits(121)
    now[0] += 60
    assert clock.fits(59) and not clock.fits(61)
    assert Clock(None).fits(1e9)


def test_estimates_follow_the_work(small):
    read = PieceFile.all(small)[0].read()
    done = {"method": "ours", "work": read["work"], "seconds": 10.0}
    splits = json.loads((small / "results.json").read_text())["settings"]["subjects"]
    names = plan.Subjects(**{split: tuple(of) for split, of in splits.items()})
    piece = plan.reduced(names, settings_of(arguments(TINY)), plan.RATES, only=["ours"])[0]
    assert estimate(piece, {"a": done}) == pytest.approx(10.0, rel=0.01)
    slower = {"method": "inversion-t", "work": 10, "seconds": 1000.0}
    assert estimate(piece, {"a": done, "b": slower}) == pytest.approx(10.0, rel=0.01)
    assert estimate(piece, {"b": slower}) == pytest.approx(100 * piece.work()) and estimate(piece, {}) is None
