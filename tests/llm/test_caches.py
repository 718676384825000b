"""What n-grams look back on goes with its cache: cropped, copied, reordered, reset, by turns and on threads."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tiny_engram.errors import TinyEngramError

pytestmark = pytest.mark.usefixtures("no_gradients")


def test_a_cropped_cache_reads_what_is_left(checked, text):
    at, ids, draft = checked(), text(2, 14), text(2, 5, seed=9)

    def cropped():
        cache = at.cache()
        first = at.model(ids[:, :9], cache=cache).logits
        at.model(draft, cache=cache)
        at.noted.only(slice(0, -1))
        cache.crop(-5)
        second = at.model(ids[:, 9:], cache=cache).logits
        return torch.cat((first, second), dim=1)

    at.same(lambda: at.model(ids).logits, cropped)


@pytest.mark.parametrize("kind", ("mistral", "gemma2"))
def test_a_cropped_cache_with_a_window(checked, text, kind):
    at, ids, draft = checked(kind), text(1, 16), text(1, 4, seed=9)

    def cropped():
        cache = at.cache()
        cache.activate_past_recording()
        first = at.model(ids[:, :12], cache=cache).logits
        cache.crop(0)
        at.model(draft, cache=cache)
        at.noted.only(slice(0, -1))
        cache.crop(-4)
        second = at.model(ids[:, 12:], cache=cache).logits
        return torch.cat((first, second), dim=1)

    at.same(lambda: at.model(ids).logits, cropped)


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))))
@pytest.mark.parametrize("kept", ("dynamic", "static"))
def test_a_prefix_is_used_again_by_copies_of_its_cache(checked, text, copied, kept):
    at, ids = checked(), text(1, 8)
    cache = at.cache(kept)
    at.model(ids, cache=cache)
    ends = [text(1, 6, seed=seed) for seed in (3, 4)]
    copies = [copied(cache) for _ in ends]
    assert type(copies[0]) is type(cache) and isinstance(copies[0], type(at.cache(kept)))
    for end, each in zip(ends, copies, strict=True):
        expected = at.model(torch.cat((ids, end), dim=1)).logits[:, 8:]
        # Token by token and by turns, so that copies that shared something would mix.
        found = [at.model(end[:, t : t + 1], cache=each).logits for t in range(6)]
        assert at.near(torch.cat(found, dim=1), expected)
    assert int(cache.get_seq_length()) == 8


@pytest.mark.parametrize("kept", ("dynamic", "static"))
def test_rows_are_reordered_selected_and_repeated_with_their_cache(checked, text, kept):
    at, ids, end = checked(), text(3, 9), text(6, 3, seed=8)

    def moved(change, rows):
        cache = at.cache(kept)
        at.model(ids, cache=cache)
        change(cache)
        at.noted.only(slice(0, 0))
        return at.model(end[: len(rows)], cache=cache).logits

    def whole(rows):
        logits = at.model(torch.cat((ids[rows], end[: len(rows)]), dim=1)).logits[:, 9:]
        at.noted.only(tokens=slice(9, None))
        return logits

    changes = [(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0])]
    if kept == "dynamic":  # of static caches transformers does not do these
        changes += [
            (lambda cache: cache.batch_select_indices(torch.tensor([1, 2])), [1, 2]),
            (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
            (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        ]
    for change, rows in changes:
        at.same(lambda rows=rows: whole(rows), lambda change=change, rows=rows: moved(change, rows))


@pytest.mark.parametrize("kept", ("dynamic", "static"))
def test_a_cache_that_was_reset_begins_anew(checked, text, kept):
    at, first, second = checked(), text(2, 9), text(2, 7, seed=4)
    cache = at.cache(kept)
    at.model(first, cache=cache)

    def again():
        cache.reset()
        return at.in_parts(second, [1, 1, 4, 1], cache)

    at.same(lambda: at.model(second).logits, again)
    if kept == "dynamic":
        cache.reset()
        assert at.model(first[:1], cache=cache).logits.shape[0] == 1  # another batch


def test_two_generations_take_turns(checked, text):
    at, ids = checked(), text(2, 12)
    caches = [at.cache() for _ in range(2)]
    found = [[], []]
    for t in range(12):
        for which in (0, 1):
            found[which].append(at.model(ids[which : which + 1, t : t + 1], cache=caches[which]).logits)
    for which in (0, 1):
        expected = at.model(ids[which : which + 1]).logits
        assert at.near(torch.cat(found[which], dim=1), expected)


def test_two_threads_generate_at_once(build, attach, text):
    model = build()
    attach(model)
    prompts = [text(1, 6 + seed, seed=seed) for seed in range(4)]
    alone = [model.generate(ids, max_new_tokens=12, do_sample=False) for ids in prompts]
    found = [None] * 4

    def work(number):
        with torch.no_grad():
            for _ in range(3):
                found[number] = model.generate(prompts[number], max_new_tokens=12, do_sample=False)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))  # raises what a thread raised
    assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


@pytest.mark.parametrize("form", ("paper", "v41"))
@pytest.mark.parametrize("kept", ("dynamic", "static"))
def test_a_cache_is_read_as_it_was_begun(checked, attach, text, kept, form):
    at, ids = checked(form=form), text(1, 14)
    caches = {True: at.cache(kept), False: at.cache(kept)}
    for at.engrams.enabled, cache in caches.items():
        at.model(ids[:, :5], cache=cache)
    for at.engrams.enabled, said in ((True, "without Engram layers that read now"), (False, "with Engram layers that do not now")):
        with pytest.raises(TinyEngramError, match=f"computed {said}.*begin with an empty cache") as caught:
            at.model(ids[:, 5:9], cache=caches[not at.engrams.enabled])
        assert "\n" not in str(caught.value)
    for at.engrams.enabled, cache in caches.items():  # a refusal has changed nothing
        found = at.model(ids[:, 5:], cache=cache).logits
        assert at.near(found, at.model(ids).logits[:, 5:])
        copied = copy.deepcopy(cache)
        at.engrams.enabled = not at.engrams.enabled
        with pytest.raises(TinyEngramError, match="begin with an empty cache"):
            at.model(ids[:, :1], cache=copied)
        copied.reset()
        at.model(ids[:, :5], cache=copied)
    at.engrams.enabled = True
    more = attach(at.model, seed=2)
    with pytest.raises(TinyEngramError, match="computed without Engram layers that read now"):
        at.model(ids[:, :1], cache=caches[True])
    more.detach()
    if kept == "dynamic":
        caches[True].crop(-14)
        more = attach(at.model, seed=2)
        assert at.near(at.model(ids, cache=caches[True]).logits, at.model(ids).logits)


def test_a_cache_filled_in_inference_mode_goes_on_outside(checked, text):
    at, ids = checked(), text(2, 100)
    with torch.inference_mode():
        cache = at.cache()
        at.model(ids[:, :70], cache=cache)  # grown
        turned = copy.deepcopy(cache)
        turned.reorder_cache(torch.tensor([1, 0]))
    expected = at.model(ids).logits[:, 70:]
    found = at.model(ids[:, 70:], cache=cache).logits
    assert at.near(found, expected, 5e-5)
    found = at.model(ids[[1, 0], 70:], cache=turned).logits
    assert at.near(found, expected[[1, 0]], 5e-5)


def test_caches_that_nobody_noted_are_refused(checked, text):
    at, ids = checked(), text(2, 6)
    at.engrams.detach()
    cache = at.cache()
    at.model(ids, cache=cache)
    engrams = at.engrams
    assert not at.model.model._forward_pre_hooks
    engrams._mount(at.model)
    with pytest.raises(TinyEngramError, match="holds 6 tokens from calls without Engram"):
        at.model(ids, cache=cache)
    cache = at.cache()
    at.model(ids, cache=cache)
    with pytest.raises(TinyEngramError, match="this call has 1 rows, the cache's ids 2"):
        at.model(ids[:1], cache=cache)
    engrams.detach()
    at.model(ids, cache=cache)
    engrams._mount(at.model)
    with pytest.raises(TinyEngramError, match="holds 12 tokens, and the ids of 6"):
        at.model(ids, cache=cache)
    with pytest.raises(TinyEngramError, match="the cache is object: expected a Cache of transformers"):
        at.model(ids, cache=object())
    with pytest.raises(TinyEngramError, match="layer 1 was called by itself"):
        at.model.model.layers[1](torch.zeros(1, 1, 32))
