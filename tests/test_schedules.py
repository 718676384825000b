"""What schedules say, and what is refused."""

import math

import pytest

from tiny_engram.errors import TinyEngramError
from tiny_engram.schedules import Schedule

HALF = [(0.0, 1.0), (0.5, 0.0)]


def test_the_factor_holds_up_to_the_next_point():
    schedule = Schedule(((0, 1), (0.4, 0.5), (0.75, 0)))
    assert [schedule.factor(step / 5) for step in range(5)] == [1.0, 1.0, 0.5, 0.5, 0.0]
    assert schedule.factors == (1.0, 0.5, 0.0) and schedule.changes and not schedule.moves
    assert str(schedule) == "factor 1, from 40 % of the steps 0.5, from 75 % of the steps 0"
    assert not Schedule(((0.0, 0.3), (0.5, 0.3))).changes


def test_shares_are_met_exactly():
    """0.3 of 10 steps are 3, whatever floats say of sums."""
    for count in range(1, 60):
        for step in range(1, count):
            assert Schedule.between(end=step / count).factor(step / count) == 0.0
            assert Schedule.between(end=step / count).factor((step - 1) / count) == 1.0
    assert [Schedule.between(end=0.3).factor(step / 10) for step in range(5)] == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_a_slope_goes_from_point_to_point():
    schedule = Schedule(((0, 0), (0.5, 1), (1, 0)), "linear")
    assert [schedule.factor(step / 8) for step in range(8)] == [0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25]
    assert Schedule(((0, 1), (0.5, 0)), "linear").factor(0.9) == 0.0
    assert schedule.moves and str(schedule) == "factor 0, to 1 at 50 % of the steps, to 0 at 100 % of the steps"


def test_presets_and_what_a_command_line_writes():
    assert Schedule.between(0.2, 0.8).points == ((0.0, 0.0), (0.2, 1.0), (0.8, 0.0))
    assert Schedule.between().points == ((0.0, 1.0),)
    assert Schedule.parse("0:1, 0.5:0.25") == Schedule(((0.0, 1.0), (0.5, 0.25)))
    assert Schedule.parse("linear,0:1,1:0") == Schedule(((0.0, 1.0), (1.0, 0.0)), "linear")
    assert Schedule.parse("0..0.4") == Schedule.between(end=0.4)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([], r"no points, expected some such as \[\(0.0, 1.0\), \(0.5, 0.0\)\]; None removes"),
        (3, "a schedule is '3', expected points such as"),
        ("half", "a schedule is 'half', expected points"),
        ([0.0, 1.0], r"point is 0.0, expected \(share of the steps, factor\)"),
        ([(0.0, 1.0, 2.0)], "expected .share of the steps, factor."),
        ([(0.0, math.nan)], "factor is nan, expected a finite number"),
        ([("0", 1.0)], "share of the steps is '0', expected a finite number"),
        ([(0.0, True)], "factor is True, expected a finite number"),
        ([(0.5, 1.0)], "first point is at 0.5, expected 0.0"),
        ([(0.0, 1.0), (40, 0.0)], "point is at 40, expected a share of the steps from 0 to below 1"),
        ([(0.0, 1.0), (-0.1, 0.0)], "point is at -0.1"),
        ([(0.0, 1.0), (0.5, 0.0), (0.5, 1.0)], "point at 0.5 follows the one at 0.5, expected shares that rise"),
        ([(0.0, 1.0), (1.0, 0.0)], "point at 1 comes after the last step"),
    ],
)
def test_bad_points(adapter, tiny, points, words):
    adapter.load_concept(tiny.concept(adapter, "vortex cat"), "vortex")
    with pytest.raises(TinyEngramError, match=words) as error:
        adapter.set_schedule("vortex", points)
    assert "\n" not in str(error.value) and adapter.get_schedule("vortex") is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start": 0.6, "end": 0.4}, "start is 0.6 and end 0.4, expected shares of the steps with 0 <= start < end <= 1"),
        ({"end": 40}, "end 40, expected shares"),
        ({"start": "half"}, "start is 'half', expected a finite number"),
        ({"points": HALF, "end": 0.5}, "points and as start or end, expected one of the two"),
        ({"points": HALF, "interpolation": "cubic"}, "interpolation is 'cubic', expected 'constant' or 'linear'"),
        ({"points": [(0.0, 1e308)]}, "expected a finite number"),
    ],
)
def test_bad_options(adapter, tiny, options, words):
    adapter.load_concept(tiny.concept(adapter, "vortex cat"), "vortex", strength=10.0)
    with pytest.raises(TinyEngramError, match=words):
        adapter.set_schedule("vortex", **options)
    with pytest.raises(TinyEngramError, match="no concept 'other'; known: 'vortex'"):
        adapter.set_schedule("other", HALF)


@pytest.mark.parametrize("text", ["half", "0:1,0.5", "0-0.4", "", "0..x", "cubic,0:1"])
def test_bad_words_of_a_command_line(text):
    with pytest.raises(TinyEngramError, match=r"expected 0:1,0.5:0 or linear,0:1,1:0 or a range of the steps such as 0..0.4"):
        Schedule.parse(text)
