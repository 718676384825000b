"""A report of a trigger says what the adapter's says, and more; suggestions are fit to be registered."""

import random
import threading
import time

import pytest

from tiny_engram.studio.registering import Registrar
from tiny_engram.triggers import COMMON_WORDS


@pytest.fixture
def registrar(studio):
    return Registrar(studio)


@pytest.mark.parametrize(
    "trigger", ["zed-quack", "art", "vortex-99", "Caf\u00e9 Noir", "\U0001f986quack", "sks", "\u4e2d\u6587", "o'blip!"]
)
def test_says_what_the_adapter_says(studio, registrar, trigger):
    ours, theirs = registrar.report(trigger), studio.register(trigger)
    role = theirs.roles["clip_l"]
    assert ours.problem is None and ours.trigger == theirs.trigger
    assert [tuple(chip.text for chip in chips) for _, chips in ours.roles[0].spellings] == list(role.tokens)
    assert set(theirs.warnings) <= set(ours.warnings) and ours.roles[0].window == role.window == 75
    ours_by_text, theirs_by_text = ({n.text: n for n in misses} for misses in (ours.misses, role.near_misses))
    shared = ours_by_text.keys() & theirs_by_text.keys()
    assert len(shared) >= 5 and all(ours_by_text[text] == theirs_by_text[text] for text in shared)


def test_a_good_trigger(registrar):
    report = registrar.report("  zed-quack ", ["zed quack", " "])
    assert report.ready and report.trigger == "zed-quack" and report.aliases == ("zed quack",)
    assert not report.warnings and not report.collisions
    assert all(place.fires and place.text[place.start : place.end] == "zed-quack" and not place.reason for place in report.places)
    chips = report.roles[0].spellings[0][1]
    assert [chip.text for chip in chips] == ["zed</w>", "-</w>", "quack</w>"] and all(chip.id >= 0 for chip in chips)
    misses = {miss.text: miss.fires for miss in report.misses}
    assert misses["zed-quacks"] is False and misses["zed-quack's"] is True


def test_places_where_it_will_not_fire(registrar):
    report = registrar.report("blip!")
    dead = {place.text: place.reason for place in report.places if not place.fires}
    assert dead and all(dead.values()) and any(place.fires for place in report.places)
    assert any("punctuation at an edge" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    ("trigger", "aliases", "line"),
    [
        ("!!!", (), "all punctuation"),
        ("<|endoftext|>", (), "special token"),
        ("zed " * 29, (), None),
        ("qxz" * 39, (), "expected at most 75 (the text window)"),
        ("z" * 121, (), "trigger has 121 characters, expected at most 120"),
        ("zed-quack", ("z" * 121,), "alias has 121 characters"),
        ("zed-quack", ("a",) * 9, "9 aliases, expected at most 8"),
        ("zed-quack", ("...",), "all punctuation"),
    ],
)
def test_what_cannot_be_registered_is_told_in_a_line(registrar, trigger, aliases, line):
    report = registrar.report(trigger, aliases)
    if line is None:
        assert report.problem is None and any("takes 29 tokens of the 75" in warning for warning in report.warnings)
        return
    assert not report.ready and line in report.problem and "\n" not in report.problem and len(report.trigger) <= 120
    assert not report.roles and not report.places


@pytest.mark.parametrize("trigger", ["", "  ", "\n"])
def test_nothing_typed_is_no_problem(registrar, trigger):
    report = registrar.report(trigger)
    assert report.problem is None and not report.ready and not report.roles


def test_common_words_are_warned_of(registrar):
    assert any("ordinary words" in warning for warning in registrar.report("art").warnings)
    misses = [miss for miss in registrar.report("art").misses if miss.text.isalpha()]
    assert {"arts"} < {miss.text for miss in misses} and not any(miss.fires for miss in misses)


def test_collisions(studio, registrar, concept_of):
    taken = studio.library.add(concept_of("zed-quack", name="duck", aliases=["zedling"], plain=True))
    draft = studio.library.save_draft("tako hat")
    (same,) = registrar.report("ZED-QUACK").collisions
    assert (same.id, same.name, same.blocks, same.draft) == (taken, "duck", True, False)
    assert not registrar.report("ZED-QUACK").ready and registrar.report("zedling").collisions[0].blocks
    assert registrar.report("zed-quack", own=taken).ready
    (inside,) = registrar.report("tako").collisions
    assert (inside.id, inside.draft, inside.blocks) == (draft, True, False) and "holds this one" in inside.reason
    assert registrar.report("tako").ready
    (around,) = registrar.report("red tako hat").collisions
    assert "stands inside this one" in around.reason
    assert registrar.report("bimu", ["zed-quack"]).collisions[0].id == taken
    studio.library.delete(taken)
    assert not registrar.report("ZED-QUACK").collisions, "the answer of before is not kept"


def test_cleaning_of_the_pipeline(studio, engine_pipe, monkeypatch):
    """A pipeline that cleans captions, as PixArt's does: dashes and what is in brackets go."""

    def _text_preprocessing(text, clean_caption=False):
        return [text.lower().replace("(", "").replace(")", "").replace("_", " ")] if clean_caption else [text]

    monkeypatch.setattr(engine_pipe, "_text_preprocessing", _text_preprocessing, raising=False)
    registrar = Registrar(studio)
    assert any("'zed_quack' does not survive" in warning for warning in registrar.report("zed_quack").warnings)
    assert not registrar.report("Zed-Quack").warnings


def test_suggestions_are_fit(studio, registrar, concept_of):
    words = set(registrar._words["clip_l"]) | COMMON_WORDS
    seen = set()
    for seed in range(20):
        trigger = registrar.suggest(random.Random(seed))
        report = registrar.report(trigger)
        first, dash, second = trigger.partition("-")
        assert dash and 4 <= len(first) <= 5 and 4 <= len(second) <= 5 and not {first, second} & words
        assert report.ready and not report.warnings and not report.collisions and all(place.fires for place in report.places)
        assert all(len(chips) <= 5 for _, chips in report.roles[0].spellings)
        seen.add(trigger)
    assert len(seen) == 20 and registrar.suggest() != registrar.suggest()
    taken = registrar.suggest(random.Random(0))
    studio.library.save_draft(taken)
    assert registrar.suggest(random.Random(0)) != taken


def test_many_threads_at_once(registrar):
    expected = registrar.report("zed-quack", ["zed quack"])
    wrong: list[object] = []

    def ask(k: int) -> None:
        try:
            for j in range(5):
                registrar.report(f"mivo{'bdfgk'[j]}-tark{'abcdefgh'[k]}")
                registrar._cache.clear()
                if registrar.report("zed-quack", ["zed quack"]) != expected:
                    wrong.append(k)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_fast_with_a_thousand_concepts(thousand):
    """At most 150 ms an answer, none of them asked before: the median of seven, with aliases, in a library of a thousand."""
    engine, triggers = thousand
    registrar = Registrar(engine)
    engine.warm()
    seconds = []
    for trigger in triggers[:7]:
        begin = time.perf_counter()
        report = registrar.report(f"{trigger}-quack", [f"{trigger} quack", trigger])
        seconds.append(time.perf_counter() - begin)
        assert report.collisions[0].blocks
    assert sorted(seconds)[3] <= 0.15, seconds
