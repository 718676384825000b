"""Plots of invented results: what is drawn is what was measured, at the size that the page shows, and the same file every time."""

import pytest
from matplotlib import pyplot as plt
from PIL import Image

from benchmarks.personalization import plots
from benchmarks.personalization.results import Results


@pytest.fixture(scope="module")
def results(synthetic):
    return Results(synthetic.results())


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, kept open."""
    kept = []
    monkeypatch.setattr(plt, "close", lambda figure=None: kept.append(figure))
    yield kept
    monkeypatch.undo()
    plt.close("all")


def test_all_are_drawn_small_and_legible(results, tmp_path):
    drawn = plots.draw_all(results, tmp_path)
    assert [path.name for path in drawn] == ["fidelity.png", "seconds.png", "bytes.png"]
    for path in drawn:
        with Image.open(path) as image:
            assert image.width == 1040 and 400 <= image.height <= 800
            colours = image.convert("RGB").getcolors(1 << 20) or []
        # Paper white is most of it, and ours' colour is there.
        assert max(colours)[1] == (255, 255, 255)
        assert any(colour == (0xC8, 0x55, 0x3D) for _, colour in colours)
        assert path.stat().st_size < 200_000
    assert plots.draw_fidelity(results, tmp_path / "again.png").read_bytes() == drawn[0].read_bytes()


def test_points_are_where_the_figures_are(results, tmp_path, figures):
    plots.draw_bytes(results, tmp_path / "bytes.png")
    axes = figures[0].axes[0]
    points = {c.get_label(): (c.lines[0].get_xdata()[0], c.lines[0].get_ydata()[0]) for c in axes.containers}
    assert list(points) == list(results.methods("final")) and list(points)[-1] == "Ours"
    for label, method in results.methods("final").items():
        assert points[label] == (results.cost(method, "bytes"), results.score("final", label, "effnet_best").value)
    legend = figures[0].legends[0]
    assert [text.get_text() for text in legend.get_texts()] == list(points)


def test_seconds_are_steps_by_step_time(results, tmp_path, figures):
    plots.draw_seconds(results, tmp_path / "seconds.png")
    lines = {line.get_label(): line.get_xdata() for line in figures[0].axes[1].lines}
    assert list(lines["Ours"]) == pytest.approx([step * 0.02 * 1.04 for step in (25, 50, 100, 200, 300, 400)])


def test_methods_differ_without_colour(results):
    looks = plots.looks(results)
    assert len({look["marker"] for look in looks.values()}) == len(looks) == len({look["color"] for look in looks.values()})


def test_what_was_not_measured_is_not_drawn(results, tmp_path, capsys):
    assert [path.name for path in plots.draw_all(Results(results.data | {"costs": {}}), tmp_path)] == ["fidelity.png"]
    assert capsys.readouterr().out.count("not drawn, stage costs has no") == 2
    assert plots.draw_all(Results({}), tmp_path / "none") == [] and not (tmp_path / "none").exists()
