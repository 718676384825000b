"""The pages agree with the results; and on invented runs: statistics, verdicts both ways, and runs that cannot be compared."""

import json
import re
import shutil

import pytest

from benchmarks.llm import page, pieces, report, summary, targets
from benchmarks.llm.findings import Everywhere, FactRuns, NotMeasured, Retention, mean_of, ordinary_at, paired, turning
from benchmarks.tables import put_section, row

WHERE = {"commit": "0123456789abcdef", "machine": "a device", "versions": {"torch": "2.11.0"}}
STEPS = (100, 200, 300)
PLAIN = {0: 2.50, 1: 2.60, 2: 2.70}  # loss at the end, by seed
GAINS = {("table", 0.1): (-0.05, -0.07, -0.06), ("table", 0.2): (-0.02, -0.01, -0.03), ("table", 0.4): (0.1, 0.3, 0.2)}
GAINS |= {("hot", 0.2): (-0.03, -0.02, -0.04), ("size-1", 0.2): (0.01, 0.02, 0.03)}


def scratch(kind: str, share: float, seed: int, gain: float = 0.0, **more) -> dict:
    """A run whose gain is behind known trigrams, and which loses behind unknown ones from the second look on."""
    curve = []
    for k, step in enumerate(STEPS):
        loss = PLAIN[seed] + 2 - k + gain
        unknown = 0.0 if kind == "plain" else (-0.2, 0.1, 0.3)[k]
        look = {"step": step, "loss": loss, "by_frequency": [loss - gain + unknown, *[loss] * 5], "tokens": [10, 20, 30, 20, 10, 10]}
        if kind != "plain":
            look |= {f"gate_{layer}": [0.1 * n + 0.01 * seed for n in range(6)] for layer in (1, 4)}
        curve.append(look)
    parameters = {"dense": 1_000_000, "engram": 0, "table": 0, "width": 8}
    found = {"kind": kind, "share": share, "seed": seed, "parameters": parameters, "curve": curve, "seconds": 1.0}
    return found | {"steps": 300, "batch": 64, "rate": 1e-3} | WHERE | more


def all_scratch(seeds=(0, 1, 2)) -> list[dict]:
    runs = [scratch("plain", 0.0, seed) for seed in seeds]
    return runs + [scratch(kind, share, seed, gains[seed]) for (kind, share), gains in GAINS.items() for seed in seeds]


def narrow(method: str, rate: float, seed: int, ends: float, costs: float, **more) -> dict:
    """From a narrow loss of 3 to `ends` in a straight line, while ordinary loss goes from 2 to 2 + `costs`."""
    points = [{"step": k, "narrow": 3 + k / 4 * (ends - 3), "ordinary": 2 + k / 4 * costs} for k in range(5)]
    return {"method": method, "rate": rate, "seed": seed, "parameters": 100, "seconds": 1.0, "points": points} | WHERE | more


def all_retention() -> list[dict]:
    runs = [narrow("engram", 1e-3, seed, 0.2, 1.0 + seed / 10) for seed in (0, 1)]
    runs += [narrow("engram", 3e-3, seed, 0.2, 2.0) for seed in (0, 1)]
    runs += [narrow("lora", 1e-3, seed, 0.2, 3.0) for seed in (0, 1)]
    return [*runs, narrow("lora", 1e-4, 0, 0.2, 0.5), narrow("lora", 1e-4, 1, 2.8, 0.0)]


def fact(method: str, count: int, taught: float, other: float = 0.0, **more) -> dict:
    ways = {"as taught": taught, "context": 0.8, "alias": taught, "other paraphrase": other}
    found = {"method": method, "facts": count, "recall": {way: {"top1": share, "top5": share, "ends": 1.0} for way, share in ways.items()}}
    found |= {"loss_ordinary": 3.5, "goes_on": 1.5, "bytes": 594 * count, "bytes_per_fact": 594.0, "seconds": 10.0, "seconds_per_fact": 0.1}
    if method.startswith("facts"):
        found |= {"off_trigger_change": 0.0, "loss_ordinary_base": 3.5}
    return found | WHERE | more


def all_facts() -> list[dict]:
    runs = []
    for count in (20, 100):
        runs += [fact("facts", count, 1.0), fact("facts with aliases", count, 1.0)]
        for rate, taught in ((3e-4, 0.5), (1e-3, 0.9), (3e-3, 0.7)):
            runs.append(fact("LoRA r8 with aliases", count, taught, 0.4, learning_rate=rate, bytes=100_000 * count, loss_ordinary=3.6))
        runs.append(fact("LoRA r2, 3 layers with aliases", count, 0.3, learning_rate=1e-3))
    return runs


def section(name: str, found: list[dict]) -> dict:
    make = {"everywhere": pieces.everywhere_figures, "retention": pieces.retention_figures, "facts": pieces.facts_figures}[name]
    figures = make(found)
    return {**pieces.together(found), "figures": figures, "rows": targets.ROWS[name](figures)}


@pytest.fixture
def sections() -> dict:
    return {"facts": section("facts", all_facts()), "everywhere": section("everywhere", all_scratch())} | {
        "retention": section("retention", all_retention())
    }


def rows_of(section: dict) -> dict[str, tuple[str, bool | None]]:
    return {line["measure"]: (line["figure"], line["met"]) for line in section["rows"]}


def test_the_pages_agree_with_the_results():
    assert report.cli(["--check"]) == 0


def test_means_and_paired_differences():
    mean = mean_of([1.0, 2.0, 3.0])
    assert (mean.value, mean.n) == (2.0, 3) and mean.half == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert mean_of([5.0]).half is None and mean_of([5.0]).high == float("inf")
    with pytest.raises(NotMeasured):
        mean_of([])
    both = paired({0: 1.0, 1: 2.0, 7: 100.0}, {0: 2.0, 1: 2.5, 3: 0.0})
    assert (both.value, both.n) == (-0.75, 2) and both.half == pytest.approx(12.706 * 0.25)
    with pytest.raises(NotMeasured, match="no seed that both sides have"):
        paired({0: 1.0}, {1: 1.0})
    assert mean_of([0.0, 1.0] * 20).half == pytest.approx(2.086 * 0.5064 / 40**0.5, rel=1e-3)


def test_where_a_sign_turns():
    assert turning([-1, -1, 1, -1, 1, 1]) == 4
    assert turning([-1, 1, -1]) is None and turning([1, 2]) is None
    assert turning([1, -1]) == 1


def test_from_scratch(sections):
    found = Everywhere(sections["everywhere"]["figures"])
    assert found.best() == 0.1 and found.shares == [0.1, 0.2, 0.4]
    gain = found.against_plain("table", 0.1)
    assert gain.value == pytest.approx(-0.06) and gain.half == pytest.approx(4.303 * 0.01 / 3**0.5, abs=1e-4)
    assert found.hot_tier(0.2).value == pytest.approx(-0.01)
    unknown = [look[0].value for look in found.by_frequency("table", 0.1)]
    assert unknown == pytest.approx([-0.2, 0.1, 0.3]) and found.by_frequency("table", 0.1)[-1][3].value == pytest.approx(-0.06)
    assert found.gates("table", 0.1)["4"][5].value == pytest.approx(0.51)
    rows = rows_of(sections["everywhere"])
    assert rows["from scratch, 10 % of the budget a table, the best share: loss against none"] == ("-0.060 [-0.085, -0.035], 3 seeds", True)
    assert rows["from scratch, 40 % of the budget a table: loss against none"][1] is None


def test_one_run_is_not_the_best_share_beside_three():
    found = Everywhere(section("everywhere", [*all_scratch(), scratch("table", 0.05, 0, -0.5)])["figures"])
    assert (found.best(), found.lowest()) == (0.1, 0.05)


def test_verdicts_from_scratch(sections):
    text = summary.summary(sections)
    assert "a table helps" in text and "lowest at the smallest share" in text and "from 40 % on a table does harm" in text
    assert "0.020 worse than none" in text and "+0.300 [+0.300, +0.300], a difference whose sign turns in training, at step 200" in text
    few = {"everywhere": section("everywhere", all_scratch(seeds=(0, 1)))}
    assert "a table seems to help" in summary.summary(few)
    one = section("everywhere", all_scratch(seeds=(0,)))
    assert [line["met"] for line in one["rows"] if line["met"] is not None] == [False]
    harm = section("everywhere", [scratch("plain", 0.0, 0), scratch("table", 0.1, 0, 0.1), scratch("table", 0.2, 0, 0.2)])
    assert "a table does not help" in summary.summary({"everywhere": harm}) and "+0.100, 1 seed" in summary.summary({"everywhere": harm})


def test_retention(sections):
    assert ordinary_at([3.0, 2.0, 1.0], [1.0, 1.4, 2.0], 2.5) == pytest.approx(1.2)
    assert ordinary_at([3.0, 2.0], [1.0, 1.4], 1.5) is None
    found = Retention(sections["retention"]["figures"])
    assert found.levels() == [2.5, 2.0, 1.5, 1.0, 0.5, 0.3]
    rate, values = found.at("engram", 1.6)
    assert rate == 1e-3 and values == pytest.approx({0: 2.5, 1: 2.55})
    assert found.at("lora", 1.6)[0] == 1e-3  # the lower rate keeps more, but with one of its two seeds only
    with pytest.raises(NotMeasured, match="no rate of engram brought the narrow loss to 0.1"):
        found.at("engram", 0.1)
    assert all(met for _, met in rows_of(sections["retention"]).values())
    assert "Engram forgets less than LoRA" in summary.summary(sections)
    worse = section("retention", [narrow("engram", 1e-3, 0, 0.2, 4.0), narrow("lora", 1e-3, 0, 0.2, 3.0)])
    assert "does not always forget less" in summary.summary({"retention": worse})
    assert not any(met for _, met in rows_of(worse).values())


def test_facts_beside_lora(sections):
    found = FactRuns(sections["facts"]["figures"])
    assert found.counts == [20, 100] and found.get(100, "lora")["learning_rate"] == 1e-3
    assert found.has(20, "same-bytes") and not found.has(20, "lora", aliases=False)
    with pytest.raises(NotMeasured, match="LoRA r8, equal time was not run with 7 facts"):
        found.get(7, "lora")
    rows = rows_of(sections["facts"])
    assert rows["100 facts, as taught: top-1"] == ("100 % against LoRA r8's 90 %", True)
    assert rows["100 facts, other paraphrase: top-1"] == ("0 % against LoRA r8's 40 %", False)
    assert rows["100 facts: LoRA r8's bytes over the table's"] == ("168.4 times", True)
    assert rows["20 facts: LoRA r8's bytes over the table's"] == ("168.4 times", None)
    assert rows["20 facts: largest change of logits without a trigger"] == ("0", True)
    moved = section("facts", [fact("facts with aliases", 20, 0.9, 0.1, off_trigger_change=1e-7)])
    assert rows_of(moved)["20 facts: largest change of logits without a trigger"] == ("1e-07", False)
    text = summary.summary({"facts": moved})
    assert "not all are recalled" in text and "few by other words" in text and "does not keep its bits" in text


def test_pieces_of_folders_and_of_output(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.json").write_text(json.dumps(fact("facts", 20, 0.5)))
    bare = {key: value for key, value in fact("facts", 20, 1.0).items() if key not in WHERE}
    other = fact("LoRA r8", 20, 0.1, learning_rate=1e-3)
    log = tmp_path / "facts.log"
    log.write_text(f"Loading weights: 100%\n{json.dumps(bare)}\n{json.dumps(other)}\n")
    found = pieces.read("facts", [tmp_path / "a", log], commit="abc", machine="another")
    assert [(run["method"], run["commit"]) for run in found] == [("LoRA r8", WHERE["commit"]), ("facts", "abc")]
    assert found[1]["recall"]["as taught"]["top1"] == 1.0  # the later place's
    told = pieces.together(found)
    assert told == {"commit": f"{WHERE['commit']}, abc", "machine": "a device, another", "versions": {"torch": "2.11.0"}}
    assert pieces.together(pieces.read("facts", [log]))["machine"] == "a device"
    assert pieces.together([bare | {"commit": "", "machine": "", "versions": {}}])["commit"] == "not recorded"


def test_runs_that_cannot_be_compared(tmp_path):
    with pytest.raises(ValueError, match="table-0.10-0: measured with .*'steps': 500.* give runs of one setting"):
        pieces.everywhere_figures([scratch("plain", 0.0, 0), scratch("table", 0.1, 0, steps=500)])
    other = scratch("table", 0.1, 0)
    other["curve"][-1]["tokens"] = [1] * 6
    with pytest.raises(ValueError, match="give runs on one corpus"):
        pieces.everywhere_figures([scratch("plain", 0.0, 0), other])
    elsewhere = narrow("lora", 1e-3, 0, 0.2, 1.0)
    elsewhere["points"][0]["narrow"] = 3.1
    with pytest.raises(ValueError, match="lora-0.001-0: begins at 3.100 on narrow text, the first run at 3.000"):
        pieces.retention_figures([narrow("engram", 1e-3, 0, 0.2, 1.0), elsewhere])
    with pytest.raises(ValueError, match="give runs of one setting"):
        pieces.facts_figures([fact("facts", 20, 1.0, settings={"model": "a"}), fact("facts", 100, 1.0, settings={"model": "b"})])
    with pytest.raises(ValueError, match="holds no pieces of retention"):
        pieces.read("retention", [tmp_path])
    (tmp_path / "x.json").write_text(json.dumps(fact("facts", 20, 1.0)))
    with pytest.raises(ValueError, match="x.json: no piece of retention: it has no 'rate'"):
        pieces.read("retention", [tmp_path])
    (tmp_path / "x.json").write_text('{"met')
    with pytest.raises(ValueError, match="x.json: no JSON"):
        pieces.read("facts", [tmp_path])


def test_sections_stay(tmp_path):
    path = tmp_path / "llm.json"
    put_section(path, "a", {"figures": {"x": [1.5, None, 2], "names": ["p, q", "r"]}, "rows": [{"measure": "m"}]})
    put_section(path, "b", {"figures": {}, "rows": [{"measure": "n"}]})
    kept = json.loads(path.read_text())
    assert kept["table"] == [{"measure": "m"}, {"measure": "n"}] and '"x": [1.5, null, 2]' in path.read_text()
    assert kept["sections"]["a"]["figures"] == {"x": [1.5, None, 2], "names": ["p, q", "r"]}


def test_the_command(tmp_path, capsys):
    pages = [tmp_path / each.name for each in report.PAGES]
    for source, copy in zip(report.PAGES, pages, strict=True):
        shutil.copy(source, copy)
    results = tmp_path / "llm.json"
    words = ["--results", str(results), "--pages", *map(str, pages)]
    assert report.cli(words) == 0
    assert pages[0].read_text().count("*Not measured yet: no runs; benchmarks/llm/everywhere.py makes them.*") >= 2
    for name, runs in (("everywhere", all_scratch()), ("retention", all_retention()), ("facts", all_facts())):
        (tmp_path / name).mkdir()
        for k, run in enumerate(runs):
            (tmp_path / name / f"{k}.json").write_text(json.dumps(run))
    corpus = tmp_path / "corpus.json"
    corpus.write_text(json.dumps({"train": 16_000_000, "validation": 700_000, "characters": 1, "packages": ["a 1", "b 2"]}))
    given = [word for name in targets.ROWS for word in (f"--{name}", str(tmp_path / name))]
    capsys.readouterr()
    assert report.cli([*words, *given, "--corpus", str(corpus)]) == 0
    kept = json.loads(results.read_text())
    assert kept["table"] == [line for part in kept["sections"].values() for line in part["rows"]]
    assert sorted(path.stem for path in (tmp_path / report.IMAGES).iterdir()) == sorted(report.PLOTS)
    assert report.cli([*words, "--check"]) == 0
    # another report's places are another test's
    text = re.sub(r"<!-- dit:([\w-]+) -->.*?<!-- /dit:\1 -->", "", pages[0].read_text(), flags=re.DOTALL)
    assert "of 2 packages" in text and text.count("Not measured yet") == 1  # decoding
    rows = [row("tokens/s", "1"), row("pinned below device", "3 %", "<= 1 %", False), row("the same, 32", "0 %", "<= 1 %", True)]
    put_section(results, "decode", {**WHERE, "figures": {}, "rows": rows})
    capsys.readouterr()
    assert report.cli([*words, "--check"]) == 1
    assert [line.split(" in ")[1].split(";")[0] for line in capsys.readouterr().err.splitlines()] == [
        *("summary", "decode", "targets", "circumstances", "summary")
    ]
    assert report.cli(words) == 0 and "| tokens/s | 1 |" in pages[0].read_text()
    assert "1 of 2 targets met.** Missed: pinned below device, 3 % (asked: <= 1 %)." in pages[1].read_text()
    before = results.read_text()
    assert report.cli([*words, "--facts", str(tmp_path / "absent")]) == 2 and capsys.readouterr().err.count("\n") == 1
    assert results.read_text() == before
    for bad in ("{", "[]", '{"sections": 3}'):
        results.write_text(bad)
        assert report.cli(words) == 2 and capsys.readouterr().err.count("\n") == 1
    other = tmp_path / "notes.txt"
    other.write_text("no page\n")
    drawn = {path: path.stat().st_mtime_ns for path in (tmp_path / report.IMAGES).iterdir()}
    results.write_text(before)
    assert report.cli(["--results", str(results), "--pages", str(other), *given]) == 2
    assert "notes.txt: holds no '<!-- llm:NAME -->'" in capsys.readouterr().err and other.read_text() == "no page\n"
    assert drawn == {path: path.stat().st_mtime_ns for path in (tmp_path / report.IMAGES).iterdir()} and results.read_text() == before
    pages[0].write_text("<!-- llm:speed -->\n<!-- /llm:speed -->\n")
    results.write_text(before)
    assert report.cli([*words, "--check"]) == 2 and "marker llm:speed is none of summary" in capsys.readouterr().err


def test_every_block_has_a_place_on_the_page():
    found = [match["name"] for match in report.MARKED.finditer(report.PAGES[0].read_text())]
    assert sorted(found) == sorted(report.blocks({}, report.PAGES[0].parent)) and set(page.BLOCKS) < set(found)
