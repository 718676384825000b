"""The book of triggers says what the adapter says, keeps up with the library, and waits for nobody."""

import random
import threading

import pytest

from tiny_engram.studio.trigger_book import IDLE, NOT_TAUGHT, SWITCHED_OFF, TYPED


@pytest.fixture
def shelf(studio, concept_of):
    """Ids of three concepts in the library, none loaded."""
    return {trigger: studio.library.add(concept_of(trigger)) for trigger in ("zed-quack", "zed-quack hat", "tako")}


PROMPTS = (
    "a photo of zed-quack",
    "ZED-QUACK, zed-quack's hat and a tako.",
    "a Zed-Quack   hat beside takos, re-tako and taco",
    '"tako"(tako) tako!?tako9 _tako x-tako-x',
    "  zed-quack  ",
    "",
    "caf\u00e9 \U0001f986 zed\u2011quack tako",
    "tako " * 90 + "zed-quack",
)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_says_what_the_adapter_says(studio, shelf, prompt):
    strengths = {id: 1.0 for id in shelf.values()}
    ours = studio.book.explain(prompt, "an ugly tako", strengths)
    theirs = studio.explain(prompt, "an ugly tako", strengths).prompts

    def told(explained):
        fired = [(f.name, f.start, f.end, f.text, f.strength) for f in explained.fired]
        return explained.role, explained.negative, explained.tokens, fired, explained.unfired

    assert [told(e) for e in ours] == [told(e) for e in theirs]


def test_says_what_the_adapter_says_of_any_text(studio, shelf):
    """Three hundred prompts put together at random; strengths of -1, 0 and 1."""
    rng = random.Random(0)
    words = [
        "zed-quack",
        "ZED-Quack",
        "zed - quack",
        "zed",
        "quack",
        "tako",
        "Tako",
        "takos",
        "hat",
        "\u2011",
        "\u00e9",
        "\U0001f986",
        "9",
        "_",
        "a",
    ]
    joints = [" ", "  ", "\n", "-", ".", ",", "'s ", '"', "(", ")", "!", "", "_"]
    for _ in range(3):
        strengths = {id: rng.choice([-1.0, 0.0, 1.0]) for id in shelf.values()}
        prompts = ["".join(rng.choice(words) + rng.choice(joints) for _ in range(rng.randint(1, 12))) for _ in range(100)]
        studio.explain("", strengths=strengths)
        theirs = studio.run(lambda adapter, prompts=prompts: [adapter.explain(prompt).prompts[0] for prompt in prompts])
        for prompt, expected in zip(prompts, theirs, strict=True):
            (found,) = studio.book.explain(prompt, None, strengths)
            assert [(f.name, f.start, f.end, f.text) for f in found.fired] == [(f.name, f.start, f.end, f.text) for f in expected.fired]
            # of what is off the book names only what would fire
            named = [u for u in expected.unfired if strengths[u.name] or u.reason == SWITCHED_OFF]
            assert [(u.name, u.start, u.text) for u in found.unfired] == [(u.name, u.start, u.text) for u in named], prompt


def test_keeps_up_with_the_library(studio, concept_of):
    book, library = studio.book, studio.library
    assert book.known() == {}
    id = library.add(concept_of("tako"))
    assert [k.trigger for k in book.known().values()] == ["tako"]
    before = book.known()[id].compiled
    draft = library.save_draft("mivo-tark", ["mivo tark"])
    assert book.known()[draft].draft and book.known()[id].compiled is before
    token = library.delete(id)
    assert list(book.known()) == [draft]
    library.undo(token)
    assert set(book.known()) == {draft, id}


def test_a_damaged_file_is_passed_over(studio, concept_of, workspace):
    id = studio.library.add(concept_of("tako"))
    (workspace.concepts / "00000000000000ff.safetensors").write_bytes(b"no concept")
    studio.library.version += 1
    assert list(studio.book.known()) == [id]


def test_owners_and_seen(studio, shelf):
    assert studio.book.owners(studio.book.compile("Tako")) == {shelf["tako"]: "Tako"}
    assert studio.book.owners(studio.book.compile("mivo-tark")) == {}
    assert studio.book.seen("a ZED-quack   hat") == [id for id in studio.book.known() if id != shelf["tako"]]


def test_of_what_is_off_only_what_would_fire_is_named(studio, shelf):
    (found,) = studio.book.explain("tako and takos", None, {})
    assert [(u.name, u.reason) for u in found.unfired] == [(shelf["tako"], IDLE)]


def test_answers_while_the_engine_is_busy(studio, shelf):
    running, finish = threading.Event(), threading.Event()
    busy = threading.Thread(target=studio.run, args=(lambda adapter: running.set() or finish.wait(20),))
    busy.start()
    try:
        assert running.wait(10)
        assert studio.book.explain("a tako", None, {shelf["tako"]: 1.0})[0].fired
    finally:
        finish.set()
        busy.join()


def test_many_threads_at_once(studio, shelf):
    """Tokenizers fail when two threads use one at the same time; the book's are behind its lock."""
    strengths = {id: 1.0 for id in shelf.values()}
    expected = [studio.book.explain(prompt, None, strengths) for prompt in PROMPTS]
    wrong: list[object] = []

    def ask() -> None:
        try:
            wrong.extend(p for p, e in zip(PROMPTS, expected, strict=True) if studio.book.explain(p, None, strengths) != e)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_of_two_with_one_spelling_the_second_is_told_why(studio, shelf, concept_of):
    twin = studio.library.add(concept_of("tako", name="twin", seed=9))
    first, second = [id for id in studio.book.known() if id in (twin, shelf["tako"])]
    (found,) = studio.book.explain("a tako, TAKO and takos", None, {twin: 1.0, shelf["tako"]: 1.0})
    assert [f.name for f in found.fired] == [first, first]
    told = [(u.text, u.reason) for u in found.unfired if u.name == second]
    assert told == [(text, f"its spelling is taken by {first!r}; put one of the two away") for text in ("tako", "TAKO")]


def test_a_trigger_that_is_being_typed(studio, shelf):
    book = studio.book
    typed = book.typed("mivo-tark", ["mivotark"])
    prompt, negative = book.explain("a mivo-tark, mivotark and mivo-tarks", "no mivo-tark", {}, typed=typed)
    told = {u.text: u.reason for u in prompt.unfired}
    assert told["mivo-tark"] == told["mivotark"] == NOT_TAUGHT and len(told) >= 2
    assert [(u.name, u.reason) for u in negative.unfired] == [(TYPED, NOT_TAUGHT)]
    studio.library.save_draft("mivo-tark")
    (found,) = book.explain("a mivo-tark", None, {}, typed=book.typed("mivo-tark"))
    assert [u.name for u in found.unfired] == [TYPED]  # once: its own draft is the same
    assert book.typed("Tako") is None and book.typed("!!!") is None
