"""Built-in captions by what is taught, and tags that are dropped or come in another order."""

import pytest

import tiny_engram
from tiny_engram.training import train, trainer
from tiny_engram.training.config import SUBJECT_TYPES
from tiny_engram.training.data import DEFAULT_TEMPLATES, SUBJECT_TEMPLATES, scan_for, varied
from tiny_engram.training.data.captions import VARIANTS
from tiny_engram.training.prepared import prepare

TAGS = "red hat, a zqx on grass, morning, blue sky, far away"


def vary(*captions: str, seed: int = 0, dropout: float = 0.0, shuffle: bool = False) -> tuple[str, ...]:
    return varied(captions, ("zqx", "zzyx"), seed=seed, dropout=dropout, shuffle=shuffle)


def test_every_kind_of_subject_has_captions_of_its_own():
    assert set(SUBJECT_TEMPLATES) == set(SUBJECT_TYPES) and SUBJECT_TEMPLATES["object"] is DEFAULT_TEMPLATES
    assert len(set(SUBJECT_TEMPLATES.values())) == len(SUBJECT_TYPES)
    for texts in SUBJECT_TEMPLATES.values():
        assert len(set(texts)) == len(texts) == 5 and all(text.count("{trigger}") == 1 for text in texts)


@pytest.mark.parametrize("kind", SUBJECT_TYPES)
def test_built_in_captions_fire_and_own_ones_win(adapter, recipe, folder, kind):
    (folder / "0.txt").write_text("my {trigger}")
    concept = adapter.new_concept("zqx")
    own, built_in = scan_for(recipe(subject_type=kind)).examples
    assert own.captions == ("my zqx",) and built_in.captions == tuple(t.replace("{trigger}", "zqx") for t in SUBJECT_TEMPLATES[kind])
    assert all(adapter.spans(concept, _ids(adapter, built_in.captions), "clip_l").batch.unique().tolist() == [0, 1, 2, 3, 4] for _ in "1")
    assert scan_for(recipe(subject_type=kind, caption_template=("the {trigger}",))).examples[1].captions == ("the zqx",)


def _ids(adapter, texts):
    from tiny_engram.training.reading import read_texts

    return read_texts(adapter, "clip_l", list(texts)).ids


def test_tags_are_dropped_at_their_share_and_never_the_trigger_s():
    made = [text for seed in range(1000) for text in vary(TAGS, seed=seed, dropout=0.3)]
    tags = TAGS.split(", ")
    assert len(made) == 1000 * VARIANTS and all("a zqx on grass" in text for text in made)
    for tag in tags[:1] + tags[2:]:
        assert sum(tag in text.split(", ") for text in made) / len(made) == pytest.approx(0.7, abs=0.02)
    assert all([tag for tag in tags if tag in text.split(", ")] == text.split(", ") for text in made), "in their order"


def test_tags_come_in_any_order_and_the_trigger_s_keeps_its_place():
    made = [text.split(", ") for seed in range(20) for text in vary(TAGS, seed=seed, shuffle=True)]
    assert all(sorted(tags) == sorted(TAGS.split(", ")) and tags[1] == "a zqx on grass" for tags in made)
    assert {tags[0] for tags in made} == {tag for tag in TAGS.split(", ") if "zqx" not in tag}


def test_both_at_once_leave_every_tag_once():
    for text in vary(TAGS, seed=3, dropout=0.5, shuffle=True):
        tags = text.split(", ")
        assert len(set(tags)) == len(tags) and set(tags) <= set(TAGS.split(", ")) and "a zqx on grass" in tags


def test_what_is_drawn_depends_on_the_seed_and_the_caption_alone():
    alone = vary(TAGS, dropout=0.5)
    assert vary("a zqx, old", TAGS, dropout=0.5)[VARIANTS:] == alone != vary(TAGS, seed=1, dropout=0.5)
    assert len(set(alone)) > 1


@pytest.mark.parametrize("text", ["a zqx", "two ZZYX by night", "what, no such word, here", ""])
def test_captions_without_tags_keep_their_share_of_the_samples(text):
    assert vary(text, dropout=0.9, shuffle=True) == (text,) * VARIANTS


def test_a_trigger_with_a_comma_in_it_is_never_cut():
    assert varied(["red, a zq, x, blue"], ("zq, x",), seed=0, dropout=0.9, shuffle=True) == ("red, a zq, x, blue",) * VARIANTS


def test_a_run_draws_among_all_variants(pipe, config, folder, tmp_path):
    for k in range(2):
        (folder / f"{k}.txt").write_text("red hat, a {trigger} on grass, morning, blue sky, far away")

    def losses(name: str, **options):
        return train(pipe, config(output_dir=str(tmp_path / name), max_train_steps=2, **options), progress=False).losses

    plain, dropped = losses("a"), losses("b", caption_tag_dropout=0.5)
    assert dropped != plain != losses("c", shuffle_tags=True) and losses("d", caption_tag_dropout=0.5) == dropped
    options = config(caption_tag_dropout=0.5)
    adapter = tiny_engram.attach(pipe)
    try:
        data = prepare(pipe, adapter, trainer.untrained(adapter, options), options, scan_for(options).examples)
    finally:
        adapter.detach()
    assert [len(each) for each in data.choices] == [VARIANTS, VARIANTS] and len(set(data.choices[0])) > 2
