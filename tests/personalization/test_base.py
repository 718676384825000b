"""Prompts to rows and pictures to latents, against the pipeline's own way of doing both."""

import numpy as np
import pytest
import torch
from PIL import Image

from tiny_engram.training.cache import cache_latents
from tiny_engram.training.data import Example


def words_at(base, rows):
    return [base.tokenizer.decode(rows.ids[row, start : start + length]).strip() for row, _, start, length in rows.spans]


def test_cross_attentions_are_in_running_order_and_read_the_text(base):
    ran = []
    hooks = [
        m.register_forward_hook(lambda m, a, o: ran.append(m), always_call=True) for m in base.denoiser.modules() if hasattr(m, "to_k")
    ]
    try:
        base.denoiser(torch.zeros(1, 12, 16, 16), torch.tensor([500]), torch.zeros(1, 77, 128))
    finally:
        for hook in hooks:
            hook.remove()
    reading_text = [m for m in ran if m.to_k.in_features == 128]
    assert [name for name, _ in base.cross_attentions] == [f"context.{i}" for i in range(7)]
    assert all(mine is theirs for (_, mine), theirs in zip(base.cross_attentions, reading_text, strict=True))


def test_nothing_of_the_base_is_trained(base):
    assert not any(p.requires_grad for part in (base.denoiser, base.text_encoder, base.vae) for p in part.parameters())
    assert not any(m.training for part in (base.denoiser, base.text_encoder, base.vae) for m in part.modules())


def test_rows_are_what_the_pipeline_encodes(base):
    texts = ["a {0} left of {1} on red", "a 3d {0}"]
    rows = base.rows(texts, [("rugo-bin", "vex-lumo"), ("kelo-vin",)], torch.tensor([[0, 1], [2, -1]]))
    embeds, empty = base.pipe.encode_prompt(["a rugo-bin left of vex-lumo on red", "a 3d kelo-vin"], "cpu", 1, True)
    assert torch.equal(rows.states, embeds)
    assert torch.equal(base.empty(rows).states, empty[:1].expand(2, -1, -1))
    assert [place[:2] for place in rows.spans] == [(0, 0), (0, 1), (1, 0)]
    assert words_at(base, rows) == ["rugo - bin", "vex - lumo", "kelo - vin"]
    assert base.empty(rows).spans == () and torch.equal(base.empty(rows).run, rows.run)


def test_a_prompt_may_name_a_subject_twice_or_not_at_all(base):
    rows = base.rows(["a {0} on a {0}", "a red kite"], [("rugo-bin",), ()], torch.tensor([[0], [1]]))
    assert words_at(base, rows) == ["rugo - bin", "rugo - bin"] and {row for row, *_ in rows.spans} == {0}


def test_a_slot_without_a_run_gets_its_word_but_no_span(base):
    rows = base.rows(["a {0} and {1}"], [("owl", "rugo-bin")], torch.tensor([[-1, 3]]))
    assert words_at(base, rows) == ["rugo - bin"] and "owl" in base.tokenizer.decode(rows.ids[0])


def test_stand_ins_replace_triggers_only(base):
    rows = base.rows(["a {0} and {1}"] * 2, [("rugo-bin", "owl")] * 2, torch.tensor([[0, -1], [0, 1]]), vectors=1)
    assert [place[2:] for place in rows.spans] == [(2, 1), (2, 1), (4, 1)]
    assert len({int(rows.ids[row, start]) for row, _, start, _ in rows.spans}) == 1
    assert "owl" in base.tokenizer.decode(rows.ids[0]) and "rugo" not in base.tokenizer.decode(rows.ids[0])
    three = base.rows(["a {0} and {1}"], [("rugo-bin", "owl")], torch.tensor([[0, -1]]), vectors=3)
    assert three.spans == ((0, 0, 2, 3),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x " * 80 + "{0}", "cut off at 77 tokens"),
        ("x " * 73 + "{0}", "cut off at 77 tokens"),
        ("a{0}", "shares a token"),
        ("a {1}", "names subject {1}"),
    ],
)
def test_prompts_in_which_a_word_is_lost_are_refused(base, text, said):
    with pytest.raises(ValueError, match=said.replace("{", r"\{").replace("}", r"\}")):
        base.rows([text], [("rugo-bin",)], torch.tensor([[0]]))


def test_shapes_that_do_not_fit_are_refused(base):
    with pytest.raises(ValueError, match="expected \\[batch, slots\\] runs"):
        base.rows(["a {0}"], [("rugo-bin",)], torch.tensor([0]))
    with pytest.raises(ValueError, match="2 words, but 1 slots"):
        base.rows(["a {0} {1}"], [("rugo-bin", "owl")], torch.tensor([[0]]))
    with pytest.raises(ValueError, match="expected uint8"):
        base.latents(np.zeros((1, 128, 128, 3), np.float32))


def test_parts_and_joins_keep_spans_with_their_rows(base):
    run = torch.tensor([[0], [1], [2]])
    rows = base.rows(["a {0}", "an old {0} on {0}", "{0}"], [("rugo-bin",)] * 3, run)
    again = rows.part(0, 1).joined(rows.part(1, 3))
    assert again.spans == rows.spans and torch.equal(again.ids, rows.ids) and torch.equal(again.run, rows.run)
    assert rows.part(1, 2).spans == tuple((0, *place[1:]) for place in rows.spans if place[0] == 1)
    assert rows.part(2, 9).spans == ((0, *rows.spans[-1][1:]),)


def test_positions_spell_the_spans_out(base):
    rows = base.rows(["a {0} on {1}", "{0}"], [("rugo-bin", "owl"), ("kelo-vin", "")], torch.tensor([[5, 7], [6, -1]]))
    found = rows.positions()
    wanted = [(row, start + i, i, int(rows.run[row, slot])) for row, slot, start, length in rows.spans for i in range(length)]
    assert list(zip(*(t.tolist() for t in (found.row, found.place, found.offset, found.run)), strict=True)) == wanted
    assert len(base.empty(rows).positions().row) == 0


def test_latents_are_those_that_the_product_caches(base, shown, tmp_path):
    images = [picture.image for picture in shown]
    examples = []
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
        examples.append(Example(tmp_path / f"{i}.png", ("a x",)))
    means, stds = base.latents(np.stack(images))
    want_means, want_stds = cache_latents(base.pipe, examples, 128)
    assert means.shape == (2, *base.latent_shape)
    assert torch.equal(means, want_means) and torch.equal(stds, want_stds)


def test_an_unknown_subject_is_named(base):
    assert base.subject("disc").trigger == "rugo-bin"
    with pytest.raises(ValueError, match="'walrus' is not known; expected one of disc, spot, dot"):
        base.subject("walrus")
