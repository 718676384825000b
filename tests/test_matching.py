"""The match over all concepts: places, word boundaries, longest match, equality with a plain search, speed."""

import threading
import time

import numpy as np
import pytest
from transformers import CLIPTokenizerFast  # pyright: ignore[reportAttributeAccessIssue] # in all releases, as an alias in newer ones

from tiny_engram import matching
from tiny_engram.boundaries import CUT, UNTOLD, EdgeTables
from tiny_engram.errors import TinyEngramError
from tiny_engram.matching import TriggerIndex
from tiny_engram.tokenizer import CompressedTokenizer
from tiny_engram.triggers import CompiledTrigger, RowGroup, Variant, compile_trigger


@pytest.fixture(autouse=True, params=[0, 10**9], ids=["arrays", "one by one"])
def ways(request, monkeypatch):
    """Many places are looked for by arithmetic on arrays, a few one by one: each finds the same."""
    monkeypatch.setattr(matching, "FEW", request.param)


@pytest.fixture(scope="module")
def clip(repo_root):
    return CLIPTokenizerFast.from_pretrained(repo_root / "assets/bases/emoji-sd/tokenizer")


@pytest.fixture(scope="module")
def index_of(clip):
    edges, compressed = EdgeTables.of(clip), CompressedTokenizer(clip)

    def make(*triggers):
        index = TriggerIndex(edges)
        for t in triggers:
            index.add(t, compile_trigger(t, clip, compressed=compressed))
        return index

    return make


def raw(name, *ids):
    return name, CompiledTrigger(name, (), (Variant(tuple(ids), name, 0),), (RowGroup(name, tuple(ids), 0),))


def open_edges(size):
    """Tables of a vocabulary without word boundaries."""
    no = np.zeros(size + 1, dtype=bool)
    kinds = np.zeros(size + 1, dtype=np.uint8)
    return EdgeTables(no, no, kinds, kinds, no, no, no, False)


def padded(clip, *prompts):
    return np.array(clip(list(prompts), padding="max_length", max_length=77, truncation=True).input_ids)


PLACES = [
    "{}",
    "{} on a table",
    "a photo of {}",
    "a photo of {} on a table",
    "a {}, red",
    "a {}.",
    "a {}!",
    "what {}?",
    "a {}'s hat",
    'the "{}" shop',
    "({})",
    "[{}]",
    "{}: big",
    "red,{}",
    "a\n{}\there",
]


@pytest.mark.parametrize("trigger", ["cat-toy", "zqx bolo", "my_dog", "ohwx"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", [str, str.upper, str.title], ids=["typed", "upper", "title"])
def test_fires_in_running_text_at_the_right_tokens(clip, index_of, trigger, place, case):
    ids = padded(clip, place.format(case(trigger)))
    found = index_of(trigger).match(ids)
    own = clip(trigger, add_special_tokens=False).input_ids
    assert len(found) == 1 and found.length[0] == len(own)
    assert ids[0, found.start[0] : found.start[0] + found.length[0]].tolist() == own


@pytest.mark.parametrize(
    ("trigger", "text", "code"),
    [
        ("cat-toy", "a cat-toys", None),
        ("cat-toy", "a cat-toyz", None),
        ("cat-toy", "a wildcat-toy", None),
        ("vortex-9", "a xvortex-9", CUT),
        ("cat-toy", "a cat-toy9", UNTOLD),
        ("cat-toy", "a 3cat-toy", UNTOLD),
        ("cat-toy", "a cat-toy_2", None),
        ("my_dog", "tommy_dog", None),
        ("dog", "my_dog", UNTOLD),
        ("vortex-9", "a vortex-90", UNTOLD),
        ("vortex-9", "a vortex-99", UNTOLD),
        ("vortex-9", "a vortex-9s", UNTOLD),
        ("vortex-9", "a vortex-9x", UNTOLD),
        ("vortex-9", "a vortex-9th", UNTOLD),
        ("vortex-9", "a vortex-9_b", None),
        ("vortex-9", "an iphone-9", None),
        ("9-lives", "a 99-lives", UNTOLD),
        ("9-lives", "a x9-lives", UNTOLD),
        ("<zqx>", "a <zqx>>", None),
        ("<zqx>", "a <<zqx>", None),
        ("sks", "tasks and sksen", None),
        ("sks", "'sks'", None),
    ],
)
def test_near_misses_do_not_fire(clip, index_of, trigger, text, code):
    index = index_of(trigger)
    ids = padded(clip, text)
    assert len(index.match(ids)) == 0
    if code is not None:
        assert [blocked.code for blocked in index.near(ids)] == [code]


@pytest.mark.parametrize(
    "text", ["a vortex-9", "a vortex-9 on a table", "a vortex-9, red", "vortex-9's hat", "a vortex-9 kangaroo", "(vortex-9)"]
)
def test_a_digit_at_the_edge_fires_where_ids_can_tell(clip, index_of, text):
    assert len(index_of("vortex-9").match(padded(clip, text))) == 1


@pytest.mark.parametrize(
    "text", ["a <zqx>!", "a <zqx>.", "wait...<zqx>", "a <zqx> , red", "<zqx>'s hat", "(\U0001f984)", "\U0001f984!", "a \U0001f984"]
)
def test_punctuation_at_the_edge_fires_where_it_does_not_fuse(clip, index_of, text):
    assert len(index_of("<zqx>", "\U0001f984").match(padded(clip, text))) == 1


def test_a_number_in_front_fires_after_the_article(clip, index_of):
    assert len(index_of("9-lives").match(padded(clip, "a 9-lives cat"))) == 1


def test_twice_in_a_prompt_and_in_several_rows(clip, index_of):
    found = index_of("zqx").match(padded(clip, "zqx and zqx", "nothing", "a zqx"))
    assert list(zip(found.batch.tolist(), found.start.tolist(), strict=True)) == [(0, 1), (0, 3), (2, 2)] or found.batch.tolist() == [
        0,
        0,
        2,
    ]


def test_longest_wins_and_spans_never_overlap(clip, index_of):
    index = index_of("zqx", "zqx bolo", "bolo dog")
    found = index.match(padded(clip, "a zqx bolo dog"))
    assert [index.entries[e].name for e in found.entry] == ["zqx bolo"]


def test_a_silent_concept_does_not_stand_in_the_way(clip, index_of):
    index = index_of("zqx", "zqx bolo")
    ids = padded(clip, "a zqx bolo")
    index.set_silent("zqx bolo", True)
    assert [index.entries[e].name for e in index.match(ids).entry] == ["zqx"]
    index.set_silent("zqx bolo", False)
    assert [index.entries[e].name for e in index.match(ids).entry] == ["zqx bolo"]


def test_half_a_trigger_never_fires(clip, index_of):
    index = index_of("cat-toy")
    for words in range(70, 76):
        ids = padded(clip, " ".join(["word"] * words) + " cat-toy")
        assert len(index.match(ids)) == (1 if words + 3 <= 75 else 0)


def test_windows_do_not_run_from_one_row_into_the_next():
    index = TriggerIndex(open_edges(50))
    index.add(*raw("ab", 1, 2))
    assert len(index.match([[0, 0, 1], [2, 0, 0]])) == 0


def test_names_and_sequences_are_owned_once(index_of, clip):
    index = index_of("zqx")
    compressed = CompressedTokenizer(clip)
    with pytest.raises(TinyEngramError, match="already in the index"):
        index.add("zqx", compile_trigger("other", clip, compressed=compressed))
    with pytest.raises(TinyEngramError, match="'ZQX' of concept 'b' is already registered by concept 'zqx'"):
        index.add("b", compile_trigger("ZQX", clip, compressed=compressed))
    with pytest.raises(TinyEngramError, match="known: \\['zqx'\\]"):
        index.remove("nope")
    index.remove("zqx")
    assert len(index.match(padded(clip, "a zqx"))) == 0 and len(index) == 0
    index.add("b", compile_trigger("zqx", clip, compressed=compressed))
    assert len(index.match(padded(clip, "a zqx"))) == 1


def test_the_shape_is_checked(index_of):
    with pytest.raises(TinyEngramError, match="expected \\[batch, time\\]"):
        index_of("zqx").match([1, 2, 3])


def test_ids_outside_the_vocabulary_are_no_match(index_of):
    assert len(index_of("zqx").match([[-1, 10**6, 5, 2**40]])) == 0


def plain_search(sequences, ids):
    """Leftmost, longest, never overlapping, by comparing lists."""
    found = []
    for b, row in enumerate(ids.tolist()):
        t = 0
        while t < len(row):
            fits = [s for s in sequences if tuple(row[t : t + len(s)]) == s]
            best = max(fits, key=len, default=None)
            if best is not None:
                found.append((b, t, best))
            t += len(best) if best is not None else 1
    return found


def test_equals_a_plain_search_on_random_ids():
    rng = np.random.default_rng(0)
    for size in (2, 3, 12):
        sequences = {tuple(rng.integers(0, size, rng.integers(1, 6)).tolist()) for _ in range(40)}
        index = TriggerIndex(open_edges(size))
        for s in sequences:
            index.add(*raw(str(s), *s))
        ids = rng.integers(0, size, (5, 60))
        found = index.match(ids)
        mine = [
            (b, s, index.entries[e].variant.ids)
            for b, s, e in zip(found.batch.tolist(), found.start.tolist(), found.entry.tolist(), strict=True)
        ]
        assert mine == plain_search(sequences, ids)


def test_an_equal_hash_is_not_taken_for_an_equal_key(monkeypatch):
    monkeypatch.setattr(TriggerIndex, "_mix", staticmethod(lambda ids: np.ones(ids.shape, dtype=np.uint64)))
    index = TriggerIndex(open_edges(9))
    index.add(*raw("a", 3, 4, 5))
    found = index.match([[3, 4, 5, 3, 5, 5, 3, 4]])
    assert found.start.tolist() == [0]


def test_a_thousand_concepts_are_matched_within_two_milliseconds():
    rng = np.random.default_rng(1)
    index = TriggerIndex(open_edges(49_408))
    # The worst case: every id of the prompt could start a trigger, and spans of six lengths are in use.
    sequences = {(int(i), *rng.integers(0, 49_408, i % 6).tolist()) for i in range(1000)}
    for k, s in enumerate(sequences):
        index.add(*raw(str(k), *s))
    ids = rng.integers(0, 1000, (4, 77))
    index.match(ids)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        index.match(ids)
        times.append(time.perf_counter() - begin)
    assert min(times) <= 2e-3


def test_two_threads_may_match_right_after_a_change(monkeypatch):
    """The second thread must not see the tables that the first is still filling: spans would be missing without a word."""
    index = TriggerIndex(open_edges(100))
    for length in range(1, 9):
        index.add(*raw(str(length), *range(10 * length, 11 * length)))
    ids = np.arange(100)[None]
    want = len(index.match(ids))
    index.set_silent("1", True)
    index.set_silent("1", False)
    plain, nearly, found = TriggerIndex._powers, threading.Event(), []

    def slow(self, count):
        if count < 9:  # one call for each length of the tables
            time.sleep(0.01)
            if count == 7:
                nearly.set()
        return plain(self, count)

    monkeypatch.setattr(TriggerIndex, "_powers", slow)
    first = threading.Thread(target=lambda: found.append(len(index.match(ids))))
    first.start()
    nearly.wait()
    second = threading.Thread(target=lambda: found.append(len(index.match(ids))))
    second.start()
    first.join()
    second.join()
    assert found == [want, want]
