"""One full forward is the truth: the same text in steps, in chunks, padded, in batches gives the same hash ids and logits."""

import copy
import pickle
import threading

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tiny_engram.errors import TinyEngramError
from tiny_engram.llm.history import history_of

pytestmark = pytest.mark.usefixtures("no_gradients")

KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
FORMS = (("paper", 1), ("paper", 2), ("v41", 1), ("v41", 2))


def caching(model):
    return DynamicCache(config=model.config)


def static(model, length=24):
    return StaticCache(config=model.config, max_cache_len=length)


def in_parts(model, ids, sizes, cache, mask=None):
    """Logits ``[B, T, V]`` of a text that comes in parts of these sizes."""
    found, start = [], 0
    for size in sizes:
        seen = None if mask is None else mask[:, : start + size]
        found.append(model(ids[:, start : start + size], attention_mask=seen, cache=cache).logits)
        start += size
    assert start == ids.shape[1]
    return torch.cat(found, dim=1)


def difference(a, b):
    return float((a - b).abs().max())


class Checked:
    """A model with Engram, and how far its own ways of computing a text are apart without."""

    def __init__(self, model, engrams, noted):
        self.model, self.engrams, self.noted = model, engrams, noted

    def same(self, full, other):
        """Both ways (functions of nothing, which give logits) agree: hash ids to the bit, logits as far as the base's own do."""
        self.noted.taken()
        with_engram = full()
        ids = self.noted.taken()
        found = other()
        again = self.noted.taken()
        assert again.keys() == ids.keys() == set(self.engrams.layers)
        for layer, rows in again.items():
            assert torch.equal(rows, ids[layer]), f"hash ids of layer {layer}"
        self.engrams.enabled = False
        base = full()
        allowed = max(2 * difference(other(), base), 2e-5 * float(base.abs().max()))
        self.engrams.enabled = True
        assert difference(found, with_engram) <= allowed
        assert difference(with_engram, base) > 100 * allowed  # it is not as if Engram did nothing
        return with_engram


@pytest.fixture
def checked(build, attach, note):
    def make(kind="llama", form="paper", branches=1, **options):
        model = build(kind)
        engrams = attach(model, form=form, branches=branches, **options)
        return Checked(model, engrams, note(engrams))

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form, branches", FORMS)
def test_token_by_token_and_in_chunks(checked, text, kind, form, branches):
    at, ids = checked(kind, form, branches), text(2, 19)
    for sizes in ([1] * 19, [7, 4, 1, 1, 6], [18, 1]):
        at.same(lambda: at.model(ids).logits, lambda sizes=sizes: in_parts(at.model, ids, sizes, caching(at.model)))


@pytest.mark.parametrize("kind", ("llama", "mistral", "gemma2", "gemma3_text"))
@pytest.mark.parametrize("form, branches", (("paper", 2), ("v41", 1)))
def test_a_static_cache(checked, text, kind, form, branches):
    at, ids = checked(kind, form, branches), text(2, 19)
    for sizes in ([1] * 19, [7, 4, 1, 1, 6]):
        at.same(lambda: at.model(ids).logits, lambda sizes=sizes: in_parts(at.model, ids, sizes, static(at.model)))


@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("kind, form", (("llama", "paper"), ("mistral", "v41"), ("gemma3_text", "paper")))
@pytest.mark.parametrize("kept", (None, caching, static))
def test_rows_of_a_padded_batch_are_their_solo_runs(checked, text, tokenizer, side, kind, form, kept):
    at, lengths = checked(kind, form), (15, 6, 11)
    whole = text(3, 15)
    mask = torch.zeros_like(whole)
    for row, length in enumerate(lengths):
        mask[row, 15 - length :] = 1
        mask[row] = mask[row] if side == "left" else mask[row].flip(0)
    padded = torch.where(mask == 1, whole, tokenizer.pad_token_id)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    for row in range(3):
        real = mask[row] == 1

        def solo(row=row, real=real):
            return at.model(whole[row : row + 1, real]).logits

        def batch(row=row, real=real):
            cache = kept(at.model) if kept else None
            logits = at.model(padded, attention_mask=mask, position_ids=places, cache=cache, use_cache=kept is not None).logits
            at.noted.only(rows=slice(row, row + 1))
            at.noted.only(tokens=real)
            return logits[row : row + 1, real]

        at.same(solo, batch)


@pytest.mark.parametrize("form, branches", FORMS)
def test_padded_positions_keep_their_bits(checked, text, form, branches):
    at, ids = checked("llama", form, branches), text(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 8:] = 0, 0
    with_engram = at.model.model(ids, attention_mask=mask, output_hidden_states=True)
    at.engrams.enabled = False
    base = at.model.model(ids, attention_mask=mask, output_hidden_states=True)
    # Padding attends to what is not padding from the first layer with Engram on, so only what goes into that can be compared.
    states = {}

    def keep(module, args, kwargs):
        states[at.engrams.enabled] = args[0]

    handle = at.model.model.layers[1].register_forward_pre_hook(keep, with_kwargs=True)
    for at.engrams.enabled in (False, True):
        at.model(ids, attention_mask=mask)
    handle.remove()
    padded = mask == 0
    assert torch.equal(states[True][padded], states[False][padded])
    moved = (states[True] != states[False]).any(dim=-1)
    assert bool(moved[~padded].all())
    assert not torch.equal(with_engram.last_hidden_state[~padded], base.last_hidden_state[~padded])


@pytest.mark.parametrize("kept", (caching, static))
def test_decoding_goes_on_behind_a_padded_prompt(checked, text, tokenizer, kept):
    at = checked("llama", "paper")
    whole = text(2, 12)
    padded = torch.cat((torch.full((2, 3), tokenizer.pad_token_id), whole), dim=1)
    padded[1, :3] = text(1, 3, seed=5)
    mask = torch.ones_like(padded)
    mask[0, :3] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)

    def steps():
        cache, found, start = kept(at.model), [], 0
        for size in (8, 1, 1, 3, 1, 1):
            end = start + size
            out = at.model(padded[:, start:end], attention_mask=mask[:, :end], position_ids=places[:, start:end], cache=cache)
            found, start = [*found, out.logits], end
        return torch.cat(found, dim=1)[:, 3:]

    at.same(lambda: at.model(padded, attention_mask=mask, position_ids=places).logits[:, 3:], steps)


def test_masks_of_every_kind_hide_the_same_tokens(checked, text):
    at, ids = checked("gemma2"), text(2, 7)
    at.model.config._attn_implementation = "eager"
    flat = torch.ones_like(ids)
    flat[1, :3] = 0
    square = torch.ones(7, 7, dtype=torch.bool).tril() & (flat == 1)[:, None, None, :]
    added = torch.where(square, 0.0, torch.finfo(torch.float32).min)
    expected = at.model(ids, attention_mask=flat).logits
    at.noted.taken()
    both = {"full_attention": added, "sliding_attention": added}
    padded = torch.nn.functional.pad(flat, (0, 4))  # longer than the text, as for a static cache
    for mask in (flat.bool(), flat.float(), added, both, padded[:, :7]):
        found = at.model(ids, attention_mask=mask).logits
        assert torch.equal(found[flat == 1], expected[flat == 1])
    assert all(torch.equal(calls[0], each) for calls in at.noted.calls.values() for each in calls)
    with pytest.raises(TinyEngramError, match=r"attention mask is \[2, 7, 7\].*pass the tokenizer's own"):
        at.model(ids, attention_mask=square[:, 0])


def test_a_mask_of_the_last_tokens_alone_hides_them_as_in_the_base(checked, text):
    at, ids = checked(), text(1, 8)
    cache = caching(at.model)
    at.model(ids[:, :6], cache=cache)
    at.model(ids[:, 6:], attention_mask=torch.ones(1, 2), cache=cache)
    history = history_of(cache)
    assert history is not None and history.ids is not None
    assert torch.equal(history.ids[0, :8], torch.tensor([*ids[0, :6].tolist(), -1, -1]))


def test_a_cropped_cache_reads_what_is_left(checked, text):
    at, ids, draft = checked(), text(2, 14), text(2, 5, seed=9)

    def cropped():
        cache = caching(at.model)
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
        cache = caching(at.model)
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
@pytest.mark.parametrize("kept", (caching, static))
def test_a_prefix_is_used_again_by_copies_of_its_cache(checked, text, copied, kept):
    at, ids = checked(), text(1, 8)
    cache = kept(at.model)
    at.model(ids, cache=cache)
    ends = [text(1, 6, seed=seed) for seed in (3, 4)]
    copies = [copied(cache) for _ in ends]
    assert type(copies[0]) is type(cache) and isinstance(copies[0], type(kept(at.model)))
    for end, each in zip(ends, copies, strict=True):
        expected = at.model(torch.cat((ids, end), dim=1)).logits[:, 8:]
        # Token by token and by turns, so that copies that shared something would mix.
        found = [at.model(end[:, t : t + 1], cache=each).logits for t in range(6)]
        assert difference(torch.cat(found, dim=1), expected) < 2e-5 * float(expected.abs().max())
    assert int(cache.get_seq_length()) == 8


@pytest.mark.parametrize("kept", (caching, static))
def test_rows_are_reordered_selected_and_repeated_with_their_cache(checked, text, kept):
    at, ids, end = checked(), text(3, 9), text(6, 3, seed=8)

    def moved(change, rows):
        cache = kept(at.model)
        at.model(ids, cache=cache)
        change(cache)
        at.noted.only(slice(0, 0))
        return at.model(end[: len(rows)], cache=cache).logits

    def whole(rows):
        logits = at.model(torch.cat((ids[rows], end[: len(rows)]), dim=1)).logits[:, 9:]
        at.noted.only(tokens=slice(9, None))
        return logits

    changes = [(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0])]
    if kept is caching:  # of static caches transformers does not do these
        changes += [
            (lambda cache: cache.batch_select_indices(torch.tensor([1, 2])), [1, 2]),
            (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
            (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        ]
    for change, rows in changes:
        at.same(lambda rows=rows: whole(rows), lambda change=change, rows=rows: moved(change, rows))


@pytest.mark.parametrize("kept", (caching, static))
def test_a_cache_that_was_reset_begins_anew(checked, text, kept):
    at, first, second = checked(), text(2, 9), text(2, 7, seed=4)
    cache = kept(at.model)
    at.model(first, cache=cache)

    def again():
        cache.reset()
        return in_parts(at.model, second, [1, 1, 4, 1], cache)

    at.same(lambda: at.model(second).logits, again)
    if kept is caching:
        cache.reset()
        assert at.model(first[:1], cache=cache).logits.shape[0] == 1  # another batch


def test_two_generations_take_turns(checked, text):
    at, ids = checked(), text(2, 12)
    caches = [caching(at.model) for _ in range(2)]
    found = [[], []]
    for t in range(12):
        for which in (0, 1):
            found[which].append(at.model(ids[which : which + 1, t : t + 1], cache=caches[which]).logits)
    for which in (0, 1):
        expected = at.model(ids[which : which + 1]).logits
        assert difference(torch.cat(found[which], dim=1), expected) < 2e-5 * float(expected.abs().max())


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

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


@pytest.mark.parametrize("form", ("paper", "v41"))
def test_blocked_tokens_keep_their_states_and_stop_n_grams(checked, text, tokenizer, form):
    image = tokenizer.convert_tokens_to_ids("<image>")
    at, ids = checked("llama", form, blocked_ids=(image,)), text(1, 13)
    ids[0, 4:7] = image
    # What stands before an image changes no hash behind it.
    at.same(lambda: at.model(ids).logits, lambda: in_parts(at.model, ids, [5, 1, 1, 2, 4], caching(at.model)))
    at.noted.taken()
    at.model(ids)
    first = at.noted.taken()
    other = ids.clone()
    other[0, :4] = text(1, 4, seed=77)
    at.model(other)
    for layer, rows in at.noted.taken().items():
        assert torch.equal(rows[0, 4:], first[layer][0, 4:]) and not torch.equal(rows[0, :4], first[layer][0, :4])


def test_one_readers_blocked_tokens_are_not_anothers(build, attach, text, note):
    model, ids = build(), text(1, 12)
    alone = attach(model, seed=2)
    noted = note(alone)
    expected, rows = model(ids).logits, noted.taken()
    other = attach(model, seed=3, blocked_ids=(int(ids[0, 5]),))
    assert not torch.equal(model(ids).logits, expected)
    assert all(torch.equal(found, rows[layer]) for layer, found in noted.taken().items())
    both = model(ids).logits
    steps = in_parts(model, ids, [3, 1, 1, 5, 2], caching(model))  # two convolutions at one layer, one cache
    assert difference(steps, both) < 2e-5 * float(both.abs().max())
    other.detach()
    assert torch.equal(model(ids).logits, expected)


def test_embeddings_with_their_ids(checked, text):
    at, ids = checked(), text(2, 11)
    embedded = at.model.get_input_embeddings()(ids)

    def by_embeddings():
        cache = caching(at.model)
        first = at.model(inputs_embeds=embedded[:, :6], engram_ids=ids[:, :6], cache=cache).logits
        second = at.model(inputs_embeds=embedded[:, 6:], engram_ids=ids, cache=cache).logits  # the whole text's: its last count
        return torch.cat((first, second), dim=1)

    at.same(lambda: at.model(ids).logits, by_embeddings)
    told = ids.clone()
    told[:, 3] = -1  # an embedding that is of no token
    at.noted.only(slice(0, 0))
    at.model(inputs_embeds=embedded, engram_ids=told)
    stopped = at.noted.taken()[1]
    at.model(ids)
    whole = at.noted.taken()[1]
    assert not torch.equal(stopped[:, 4], whole[:, 4]) and torch.equal(stopped[:, 6:], whole[:, 6:])
    with pytest.raises(TinyEngramError, match="pass engram_ids="):
        at.model(inputs_embeds=embedded)
    with pytest.raises(TinyEngramError, match=r"engram_ids are \[2, 10\]"):
        at.model(inputs_embeds=embedded, engram_ids=ids[:, 1:])


def test_ids_beyond_the_tokenizers(checked, text, tokenizer):
    at, ids = checked(), text(1, 10)
    ids[0, 4] = len(tokenizer) + 3  # the model has an embedding for it, no text does
    at.same(lambda: at.model(ids).logits, lambda: in_parts(at.model, ids, [4, 1, 1, 4], caching(at.model)))


@pytest.mark.parametrize("kept", (caching, static))
def test_calls_while_disabled_are_noted(checked, text, kept):
    at, ids = checked(), text(1, 14)
    cache = kept(at.model)
    at.model(ids[:, :5], cache=cache)
    if kept is caching:
        at.model(text(1, 6, seed=6), cache=cache)  # states that must not be read again
        cache.crop(-6)
    at.engrams.enabled = False
    at.model(ids[:, 5:9], cache=cache)
    at.engrams.enabled = True
    at.noted.taken()
    at.model(ids[:, 9:], cache=cache)
    rows = at.noted.taken()
    history = history_of(cache)
    assert history is not None and len(history.states) == 2
    for key, states in history.states.items():
        assert not bool(states[:, 5:9].any()), key
        assert bool(states[:, 4].any()) and bool(states[:, 9].any())
    at.model(ids)
    assert all(torch.equal(found[:, 9:], rows[layer]) for layer, found in at.noted.taken().items())


def test_a_cache_filled_in_inference_mode_goes_on_outside(checked, text):
    at, ids = checked(), text(2, 100)
    with torch.inference_mode():
        cache = caching(at.model)
        at.model(ids[:, :70], cache=cache)  # grown
        turned = copy.deepcopy(cache)
        turned.reorder_cache(torch.tensor([1, 0]))
    expected = at.model(ids).logits[:, 70:]
    found = at.model(ids[:, 70:], cache=cache).logits
    assert difference(found, expected) < 5e-5 * float(expected.abs().max())
    found = at.model(ids[[1, 0], 70:], cache=turned).logits
    assert difference(found, expected[[1, 0]]) < 5e-5 * float(expected.abs().max())


def test_caches_that_nobody_noted_are_refused(checked, text):
    at, ids = checked(), text(2, 6)
    at.engrams.detach()
    cache = caching(at.model)
    at.model(ids, cache=cache)
    engrams = at.engrams
    assert not at.model.model._forward_pre_hooks
    engrams._mount(at.model)
    with pytest.raises(TinyEngramError, match="holds 6 tokens from calls without Engram"):
        at.model(ids, cache=cache)
    cache = caching(at.model)
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
