"""One full forward is the truth: the same text in steps, in chunks, padded, in batches gives the same hash ids and logits."""

import pytest
import torch

from tiny_engram.errors import TinyEngramError
from tiny_engram.llm.history import history_of

pytestmark = pytest.mark.usefixtures("no_gradients")

KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
FORMS = (("paper", 1), ("paper", 2), ("v41", 1), ("v41", 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form, branches", FORMS)
def test_token_by_token_and_in_chunks(checked, text, kind, form, branches):
    at, ids = checked(kind, form, branches), text(2, 19)
    for sizes in ([1] * 19, [7, 4, 1, 1, 6], [18, 1]):
        at.same(lambda: at.model(ids).logits, lambda sizes=sizes: at.in_parts(ids, sizes, at.cache()))


@pytest.mark.parametrize("kind", ("llama", "mistral", "gemma2", "gemma3_text"))
@pytest.mark.parametrize("form, branches", (("paper", 2), ("v41", 1)))
def test_a_static_cache(checked, text, kind, form, branches):
    at, ids = checked(kind, form, branches), text(2, 19)
    for sizes in ([1] * 19, [7, 4, 1, 1, 6]):
        at.same(lambda: at.model(ids).logits, lambda sizes=sizes: at.in_parts(ids, sizes, at.cache("static")))


@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("kind, form", (("llama", "paper"), ("mistral", "v41"), ("gemma3_text", "paper")))
@pytest.mark.parametrize("kept", (None, "dynamic", "static"))
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
            cache = at.cache(kept) if kept else None
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


@pytest.mark.parametrize("kept", ("dynamic", "static"))
def test_decoding_goes_on_behind_a_padded_prompt(checked, text, tokenizer, kept):
    at = checked("llama", "paper")
    whole = text(2, 12)
    padded = torch.cat((torch.full((2, 3), tokenizer.pad_token_id), whole), dim=1)
    padded[1, :3] = text(1, 3, seed=5)
    mask = torch.ones_like(padded)
    mask[0, :3] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)

    def steps():
        cache, found, start = at.cache(kept), [], 0
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
    cache = at.cache()
    at.model(ids[:, :6], cache=cache)
    at.model(ids[:, 6:], attention_mask=torch.ones(1, 2), cache=cache)
    history = history_of(cache)
    assert history is not None and history.ids is not None
    assert torch.equal(history.ids[0, :8], torch.tensor([*ids[0, :6].tolist(), -1, -1]))


@pytest.mark.parametrize("form", ("paper", "v41"))
def test_blocked_tokens_keep_their_states_and_stop_n_grams(checked, text, tokenizer, form):
    image = tokenizer.convert_tokens_to_ids("<image>")
    at, ids = checked("llama", form, blocked_ids=(image,)), text(1, 13)
    ids[0, 4:7] = image
    # What stands before an image changes no hash behind it.
    at.same(lambda: at.model(ids).logits, lambda: at.in_parts(ids, [5, 1, 1, 2, 4], at.cache()))
    at.noted.taken()
    at.model(ids)
    first = at.noted.taken()
    other = ids.clone()
    other[0, :4] = text(1, 4, seed=77)
    at.model(other)
    for layer, rows in at.noted.taken().items():
        assert torch.equal(rows[0, 4:], first[layer][0, 4:]) and not torch.equal(rows[0, :4], first[layer][0, :4])


def test_one_readers_blocked_tokens_are_not_anothers(checked, attach, text):
    at, ids = checked(seed=2), text(1, 12)
    model, noted = at.model, at.noted
    expected, rows = model(ids).logits, noted.taken()
    other = attach(model, seed=3, blocked_ids=(int(ids[0, 5]),))
    assert not torch.equal(model(ids).logits, expected)
    assert all(torch.equal(found, rows[layer]) for layer, found in noted.taken().items())
    both = model(ids).logits
    steps = at.in_parts(ids, [3, 1, 1, 5, 2], at.cache())  # two convolutions at one layer, one cache
    assert at.near(steps, both)
    other.detach()
    assert torch.equal(model(ids).logits, expected)


def test_embeddings_with_their_ids(checked, text):
    at, ids = checked(), text(2, 11)
    embedded = at.model.get_input_embeddings()(ids)

    def by_embeddings():
        cache = at.cache()
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
    at.same(lambda: at.model(ids).logits, lambda: at.in_parts(ids, [4, 1, 1, 4], at.cache()))
