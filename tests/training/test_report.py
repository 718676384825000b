"""report.html: one page with everything in it, that asks no network for anything, and the card beside it."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from tiny_engram.concept_card import ConceptCard
from tiny_engram.training import train
from tiny_engram.training.report import MOST_POINTS, MOST_SHEETS, Report


class Page(HTMLParser):
    """Tags that are open, what is drawn, and every address."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def of(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.seen if name == tag]


def points(attrs: dict) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in attrs["points"].split())]


@pytest.fixture
def make(tmp_path):
    def made(**changes) -> Report:
        told = {"trigger": "zqx", "losses": [1.0, 0.5, 0.25], "measured": [], "prompts": [], "sheets": tmp_path, "registered": "r"}
        return Report(**{**told, "costs": {"time": "3 s"}, "config": "seed: 0", **changes})

    return made


def test_a_run_leaves_a_page_with_its_pictures_and_a_card(pipe, recipe, tmp_path):
    options = {"validation_steps": 2, "validation_prompts": ("a {trigger}", "the {trigger} & <b>"), "validation_loss_steps": 2}
    result = train(pipe, recipe(**options, validation_loss_samples=4), progress=False)
    text = (tmp_path / "out" / "report.html").read_text()
    page = Page(text)
    assert page.open == [] and len(page.of("img")) == 2 and all(img["src"].startswith("data:image/webp;base64,") for img in page.of("img"))
    assert not re.search(r"https?://|//[a-z]|src=\"[^d]|@import|url\(", text) and not page.of("link") and not page.of("script")
    assert "prefers-color-scheme: dark" in text and "the zqx &amp; &lt;b&gt;" in text and "<b>" not in text
    for said in ("step 2", "step 4", f"{result.path.stat().st_size:,} bytes", "steps/s", "GiB", "near miss", "max_train_steps: 4"):
        assert said in text, said
    assert [line["class"] for line in page.of("polyline")] == ["raw", "smooth", "measured"]
    card = ConceptCard.read((tmp_path / "out" / "README.md").read_text())
    assert card is not None and card.entries[0].file == "concept.safetensors" and card.entries[0].trigger == "zqx"


def test_a_card_that_somebody_wrote_is_kept(pipe, config, tmp_path, caplog):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("mine")
    train(pipe, config(max_train_steps=1), progress=False)
    assert (tmp_path / "out" / "README.md").read_text() == "mine" and "so it is kept" in caplog.text


def test_the_curve_is_where_the_losses_are(make):
    page = Page(make(losses=[1.0, 0.5, float("nan"), 0.0], measured=[(2, 0.5), (4, 0.75)]).render())
    raw, _, measured = map(points, page.of("polyline"))
    assert [x for x, _ in raw] == [raw[0][0], measured[0][0], measured[1][0]] and measured[0][1] == raw[1][1]
    top, middle, ground = (y for _, y in raw)
    assert middle == pytest.approx((top + ground) / 2, abs=0.11) and top < ground
    circles = page.of("circle")
    assert [circle["class"] for circle in circles] == ["best", "dot"] and float(circles[0]["cy"]) == measured[0][1]


def test_what_is_hostile_long_empty_or_broken(make, tmp_path):
    rng = np.random.default_rng(0)
    for step in range(1, 31):
        Image.fromarray(rng.integers(0, 255, (8, 2000, 3), dtype=np.uint8)).save(tmp_path / f"step-{step}.png")
    (tmp_path / "step-30.png").write_text("no picture")
    (tmp_path / "step-x.png").write_text("no picture")
    (tmp_path / "step-99.png").write_bytes((tmp_path / "step-1.png").read_bytes())  # of a longer run before this one
    script = "<script>alert(1)</script>"
    told = {"trigger": script, "prompts": [script], "registered": script, "config": script, "costs": {script: script}}
    page = Page(make(losses=[1.0] * 50_000, **told).render())
    assert page.open == [] and not page.of("script") and len(page.of("img")) == MOST_SHEETS
    assert all(len(points(line)) == MOST_POINTS for line in page.of("polyline"))
    short = Page(make(losses=[1.0] * 30, **told).render())
    assert [img["alt"] for img in short.of("img")][0] == "pictures at step 1" and len(short.of("img")) == MOST_SHEETS - 1
    for losses in ([], [float("nan")], [0.0], [0.5]):
        assert Page(make(losses=losses, sheets=tmp_path / "none").render()).open == []
