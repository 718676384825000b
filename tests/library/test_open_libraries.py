"""A library on a pipeline: every trigger fires, nothing else does, and what was not called is not read."""

import logging
import threading
import warnings

import pytest
import torch

import tiny_engram
from tests.library.conftest import same
from tiny_engram.errors import TinyEngramError
from tiny_engram.library import ConceptLibrary, LibraryError


@pytest.fixture
def word(maker):
    return lambda k: maker(k).trigger


def draw(pipe, prompt, **options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return pipe(prompt, num_inference_steps=2, output_type="pt", generator=generator, **options).images


def alone(pipe, maker, numbers, act):
    """What `act` gives with these concepts loaded by hand, on an adapter of its own."""
    adapter = tiny_engram.attach(pipe)
    try:
        for k in numbers:
            adapter.load_concept(maker(k))
        return act(adapter)
    finally:
        adapter.detach()


def test_nothing_without_a_trigger(emoji, library, word, maker):
    prompts = ["a cat", f"a {word(3)}ish thing", f"x{word(5)} and {word(6)}9", "", "zqa zqb a x"]
    plain = [alone(emoji, maker, (), lambda adapter, p=p: adapter.encode(p, "a dog")) for p in prompts]
    drawn = draw(emoji, prompts[1], negative_prompt="ugly")
    adapter = tiny_engram.attach(emoji)
    try:
        opened = adapter.open_library(library.path)
        assert len(opened) == 12 and adapter.get_list_libraries() == [str(library.path)] and adapter.get_list_concepts() == []
        for prompt, before in zip(prompts, plain, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(adapter.encode(prompt, "a dog"), before, strict=True)), prompt
        assert torch.equal(draw(emoji, prompts[1], negative_prompt="ugly"), drawn)
    finally:
        adapter.detach()
    assert torch.equal(draw(emoji, prompts[1], negative_prompt="ugly"), drawn)


@pytest.mark.parametrize("k", [3, 4])  # rows at the encoder; rows and maps at the denoiser too
def test_a_trigger_fires_as_if_loaded(k, emoji, library, word, maker, adapter):
    prompt = f"a photo of {word(k)} on grass"
    adapter.detach()
    by_hand = alone(emoji, maker, (k,), lambda _: draw(emoji, prompt, negative_prompt="ugly"))
    adapter = tiny_engram.attach(emoji)
    plain = draw(emoji, prompt, negative_prompt="ugly")
    adapter.open_library(library.path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as if it had been there before the first prompt
        found = draw(emoji, prompt, negative_prompt="ugly")
    assert torch.equal(found, by_hand) and not torch.equal(found, plain)
    assert adapter.get_list_concepts() == adapter.get_active_concepts() == [word(k)] and same(adapter.concept(word(k)), maker(k))
    assert torch.equal(draw(emoji, "a cat"), alone_after_detach(adapter, lambda: draw(emoji, "a cat")))


def alone_after_detach(adapter, act):
    adapter.detach()
    return act()


def test_triggers_in_both_prompts_and_batches(emoji, library, word, maker):
    """Concepts that come with the negative prompt, which is encoded in a call of its own, and in other rows of a batch."""
    prompts = [f"a {word(4)}", "a cat", f"{word(1)} beside a {word(9)}"]
    negative = [f"no {word(9)}", "ugly", f"no {word(2)}"]
    numbers = (4, 1, 9, 2)
    by_hand = alone(emoji, maker, numbers, lambda _: draw(emoji, prompts, negative_prompt=negative))
    adapter = tiny_engram.attach(emoji)
    try:
        adapter.open_library(library.path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(draw(emoji, prompts, negative_prompt=negative), by_hand)
        assert sorted(adapter.get_list_concepts()) == sorted(map(word, numbers))
    finally:
        adapter.detach()


def test_only_what_is_called_is_read(library, word, adapter, monkeypatch):
    read = []
    plain = ConceptLibrary.get
    monkeypatch.setattr(ConceptLibrary, "get", lambda self, name: (read.append(name), plain(self, name))[1])
    adapter.open_library(library.path)
    adapter.encode("a cat")
    assert read == []
    for _ in range(3):
        adapter.encode(f"a {word(7)}, {word(7)}", f"a {word(0)} two")
    assert sorted(read) == sorted([word(7), word(0)])
    adapter.unload_concept(word(7))
    adapter.encode(f"a {word(7)}")
    assert read.count(word(7)) == 2
    assert "fires: " + word(8) in str(adapter.explain(f"a {word(8)}")) and read[-1] == word(8)
    near = str(adapter.explain(f"a {word(9)}9"))
    assert "fires: " not in near and word(9) in near  # the trigger is seen, and why it does not fire is said


def test_what_was_read_can_be_switched(library, word, adapter):
    adapter.open_library(library.path, strength=0.5)
    with torch.inference_mode():
        half = adapter.encode(f"a {word(3)}")[0].clone()
    assert adapter.strength(word(3)) == 0.5
    adapter.set_strength(word(3), 0)
    off = adapter.encode(f"a {word(3)}")[0]
    adapter.disable_concepts()
    assert torch.equal(adapter.encode(f"a {word(3)} with {word(6)}")[0][:, :4], off[:, :4])
    adapter.enable_concepts()
    adapter.set_strength(word(3), 0.5)
    assert torch.equal(adapter.encode(f"a {word(3)}")[0], half) and not torch.equal(off, half)
    adapter.close_library()
    assert adapter.get_list_concepts() == adapter.get_list_libraries() == []
    assert torch.equal(adapter.encode(f"a {word(3)}")[0], off)


def test_exactly_these(library, word, adapter):
    """set_concepts may name what was not read yet, and then nothing else of a library fires."""
    plain = adapter.encode(f"a {word(5)}")[0]
    adapter.open_library(library.path)
    adapter.set_concepts([word(3), word(6)], [1.0, 0.5])
    assert adapter.get_active_concepts() == [word(3), word(6)] and adapter.strength(word(6)) == 0.5
    assert torch.equal(adapter.encode(f"a {word(5)}")[0], plain) and len(adapter.get_list_concepts()) == 2
    with pytest.raises(TinyEngramError, match="no concept 'nobody' is loaded or in an open library"):
        adapter.set_concepts([word(9), "nobody"])
    assert len(adapter.get_list_concepts()) == 2
    adapter.close_library(library)
    adapter.open_library(library.path, names=[word(5)])
    assert not torch.equal(adapter.encode(f"a {word(5)} and {word(4)}")[0], plain) and adapter.get_list_concepts() == [word(5)]


def test_what_a_choice_silences_is_said_and_comes_back(library, word, adapter, caplog):
    """set_concepts is no trap: a prompt that calls what it silenced is warned about, explain says why, None takes it back."""
    plain = adapter.encode(f"a {word(5)}")[0]
    adapter.open_library(library.path)
    adapter.set_concepts([word(3)])
    with caplog.at_level(logging.WARNING, "tiny_engram"):
        adapter.encode([f"a {word(3)}", f"a {word(5)}9, x{word(6)}", "a cat"])
        assert caplog.text == "", "near misses call nothing"
        for _ in range(2):
            assert torch.equal(adapter.encode(f"a {word(5)}")[0], plain)
        assert caplog.text.count(f"'{word(5)}' of the open library {library.path} was called and stays silent") == 1
        assert caplog.text.count("silent") == 1 and "set_concepts(None)" in caplog.text
    said = str(adapter.explain(f"a {word(5)} and {word(3)}"))
    assert f"does not fire: {word(5)} at token 2" in said and "in an open library, and not among the active concepts (set_concepts)" in said
    assert f"fires: {word(3)}" in said and adapter.get_list_concepts() == [word(3)], "nothing was loaded for it"
    adapter.set_strength(word(3), 0.5)
    adapter.set_concepts(None)
    assert adapter.get_active_concepts() == [word(3)] and adapter.strength(word(3)) == 0.5
    assert not torch.equal(adapter.encode(f"a {word(5)}")[0], plain) and adapter.get_active_concepts() == [word(3), word(5)]
    adapter.set_concepts([])
    assert adapter.get_active_concepts() == [] and torch.equal(adapter.encode(f"a {word(5)}")[0], plain)
    tiny_engram.set_concepts(adapter.pipe, None, 2.0)
    assert adapter.strength(word(3)) == adapter.strength(word(5)) == 2.0 and adapter.get_active_concepts() == [word(3), word(5)]


def test_a_silenced_namesake_and_a_damaged_one(library, word, maker, adapter):
    entry = library.entry(word(6))
    with library.path.open("r+b") as file:
        file.seek(entry.offset + entry.nbytes - 3)
        file.write(b"???")
    adapter.load_concept(maker(20), name=word(5))
    adapter.open_library(library.path)
    adapter.set_concepts([word(5)])
    said = str(adapter.explain(f"a {word(5)}, a {word(6)}"))
    assert f"does not fire: {word(5)}, in a library at token 2" in said and word(6) in said and "fires: " + word(6) not in said
    with pytest.raises(LibraryError, match="is not what was added"):
        adapter.set_concepts([word(6)])


def test_register_looks_at_open_libraries(library, word, adapter):
    assert adapter.register(word(3)).in_libraries == ()
    adapter.open_library(library.path)
    for trigger, aliases in ((word(3), ()), (word(3).upper(), ()), (f"{word(3)} two", ()), ("zz-other", (word(3),))):
        report = adapter.register(trigger, aliases)
        assert report.in_libraries == ((word(3), str(library.path)),), trigger
        assert f"would keep '{word(3)}' of the open library {library.path} from being called" in str(report)
        assert report.to_dict()["in_libraries"] == [{"name": word(3), "library": str(library.path)}] and report.taken_by == ()
    for trigger in ("zz-other", f"{word(3)} three", f"{word(3)}9"):
        assert adapter.register(trigger).in_libraries == (), trigger
    assert adapter.get_list_concepts() == []
    adapter.load_concept(adapter.new_concept(word(3)), name="mine")  # which may be: it is said, not refused
    assert adapter.register(word(3)).taken_by == ("mine",)
    adapter.close_library()
    adapter.open_library(library.path, names=[word(5)])
    assert adapter.register(word(3)).in_libraries == () != adapter.register(word(5)).in_libraries


def test_a_loaded_concept_keeps_its_trigger(library, word, maker, adapter):
    mine = maker(3).with_rows("clip_l", torch.ones(maker(3).mount_rows("clip_l").payload.shape), *gates(maker(3)))
    adapter.load_concept(mine, name="mine")
    adapter.load_concept(maker(20), name=word(6))  # a name that one in the library has
    before = adapter.encode(f"a {word(3)}")[0]
    adapter.open_library(library.path)
    assert torch.equal(adapter.encode(f"a {word(3)}")[0], before) and adapter.get_list_concepts() == ["mine", word(6)]
    adapter.encode(f"a {word(6)}")
    assert adapter.get_list_concepts() == ["mine", word(6), word(6) + "-2"] and same(adapter.concept(word(6) + "-2"), maker(6))
    adapter.close_library(str(library.path))
    assert adapter.get_list_concepts() == ["mine", word(6)]


def gates(concept):
    rows = concept.mount_rows("clip_l")
    return rows.gain, rows.bias


def test_schedules_stay_in_force(emoji, library, word, adapter):
    """What a prompt calls after a step callback was made does not make it stale."""
    adapter.open_library(library.path)
    adapter.encode(f"a {word(3)}")
    adapter.set_schedule(word(3), end=0.5)
    options = adapter.scheduled(f"a {word(3)}", num_inference_steps=2)
    adapter.encode(f"a {word(8)}")
    assert word(8) in adapter.get_list_concepts()
    first = emoji(**options, output_type="pt", generator=torch.Generator().manual_seed(0)).images
    again = emoji(**options, output_type="pt", generator=torch.Generator().manual_seed(0)).images
    assert torch.equal(first, again)


def test_changes_are_seen_when_it_is_opened_again(library, word, maker, adapter):
    adapter.open_library(library.path)
    library.add(maker(30))
    library.remove(word(2))
    library.compact()
    adapter.encode(f"a {word(30)} and {word(2)}")
    assert adapter.get_list_concepts() == [word(2)]
    adapter.close_library()
    adapter.open_library(library)
    adapter.encode(f"a {word(30)} and {word(2)}")
    assert adapter.get_list_concepts() == [word(30)]


def test_several_threads(emoji, library, word, adapter):
    """Each concept is loaded once, whoever comes first. Ids are made before: a tokenizer is one thread's at a time."""
    adapter.open_library(library.path)
    prompts = {(k, n): f"a {word(n)} and {word((n + k) % 6)}" for k in range(4) for n in range(6)}
    ids = {key: emoji.tokenizer(prompt, padding="max_length", return_tensors="pt").input_ids for key, prompt in prompts.items()}
    found = {}

    @torch.no_grad()
    def encode(k):
        for n in range(6):
            found[k, n] = emoji.text_encoder(ids[k, n])[0]

    threads = [threading.Thread(target=encode, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(adapter.get_list_concepts()) == sorted(map(word, range(6))) and found.keys() == ids.keys()
    for key, states in found.items():
        assert torch.equal(states, adapter.encode(prompts[key])[0]), key


def test_two_libraries(library, word, maker, adapter, tmp_path):
    with ConceptLibrary.create(tmp_path / "more.engrams") as more:
        more.add_many([maker(30), maker(3)])
        adapter.open_library(library.path)
        adapter.open_library(more, names=[word(30)])
    adapter.encode(f"a {word(30)} and {word(3)}")
    assert adapter.get_list_concepts() == [word(3), word(30)] or adapter.get_list_concepts() == [word(30), word(3)]
    tiny_engram.close_library(adapter.pipe, tmp_path / "more.engrams")
    assert tiny_engram.get_list_libraries(adapter.pipe) == [str(library.path)] and adapter.get_list_concepts() == [word(3)]


def test_what_does_not_fit_is_refused(library, word, adapter, tiny, tmp_path):
    def refused(says, action):
        with pytest.raises(TinyEngramError, match=says) as raised:
            action()
        assert "\n" not in str(raised.value)

    refused("names is the text 'zq', expected a list", lambda: adapter.open_library(library.path, names="zq"))
    refused("holds no concept 'nobody'", lambda: adapter.open_library(library.path, names=["nobody"]))
    refused("strength is nan", lambda: adapter.open_library(library.path, strength=float("nan")))
    refused("no open library", lambda: adapter.close_library(library.path))
    refused("cannot open the library", lambda: adapter.open_library(tmp_path / "absent.engrams"))
    adapter.open_library(library.path)
    refused("this library is open already", lambda: adapter.open_library(library))
    wide = tiny.build(width=96)
    other = tiny_engram.attach(wide)
    refused("none of its concepts fits: the first has width 128 at clip_l, expected 96", lambda: other.open_library(library.path))
    refused("width 128 at clip_l, expected 96", lambda: other.load_concept(f"{library.path}#{word(0)}"))
    assert other.get_list_libraries() == []
    library.add(other.new_concept("zz-other"), "for the other")
    refused(f"concept '{word(0)}' has width 128", lambda: other.open_library(library.path, names=[word(0)]))
    other.open_library(library.path)
    other.encode(f"a {word(0)} and a zz-other")
    assert other.get_list_concepts() == ["for the other"]
    adapter.detach()
    refused("this adapter was detached", lambda: adapter.open_library(library.path))


def test_a_damaged_concept_is_an_error_when_it_is_called(library, word, adapter):
    entry = library.entry(word(6))
    with library.path.open("r+b") as file:
        file.seek(entry.offset + entry.nbytes - 3)
        file.write(b"???")
    adapter.open_library(library.path)
    adapter.encode(f"a {word(5)}")
    with pytest.raises(LibraryError, match="is not what was added"):
        adapter.encode(f"a {word(6)}")
    assert adapter.get_list_concepts() == [word(5)]
    assert torch.isfinite(adapter.encode(f"a {word(5)}")[0]).all()
