"""Collages: captions that still read right, pictures with both things in them, the same ones whenever a run is taken up; and teaching by
the default recipe, which shows them.
"""

import dataclasses
import importlib
import json

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from PIL import Image
from safetensors.torch import load_file

import tiny_engram
from tiny_engram import demo
from tiny_engram.adapter import find_adapter
from tiny_engram.checkpoints import load_checkpoint
from tiny_engram.concept import Concept
from tiny_engram.config import ConceptConfig
from tiny_engram.errors import ConfigError, TinyEngramError
from tiny_engram.training import loop, objective, prepared, train, trainer
from tiny_engram.training.collages import collage, draw_collages, rewritten
from tiny_engram.training.config import COMPANIONS, TrainConfig
from tiny_engram.training.data import DataError, scan_folder
from tiny_engram.training.prepared import prepare

ROLE = "clip_l"


@pytest.fixture
def of_the_comparison(repo_root, monkeypatch):
    """Modules of the comparison, which are imported from the root."""
    monkeypatch.syspath_prepend(repo_root)
    return lambda name: importlib.import_module(f"benchmarks.personalization.{name}")


def teach(pipe, config, **options):
    return train(pipe, config, progress=False, **options)


def collages_of(pipe, config, monkeypatch, **options):
    """What `train` draws, and what it makes of it."""
    seen = []

    def draw(*args, **keywords):
        seen.extend(draw_collages(*args, **keywords))
        return seen

    with monkeypatch.context() as patch:
        patch.setattr(prepared, "draw_collages", draw)
        result = teach(pipe, config, **options)
    return seen, result


# -- captions ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caption", "companion", "expected"),
    [
        ("a zqx", "key", ("a key", "a zqx next to a key", "a key next to a zqx")),
        ("A zqx by night", "owl", ("An owl by night", "A zqx next to an owl by night", "An owl next to a zqx by night")),
        ("3d ZQX, gray", "apple", ("3d apple, gray", "3d ZQX next to an apple, gray", "3d apple next to a ZQX, gray")),
        ("the  zqx", "bus", ("the  bus", "the  zqx next to a bus", "the  bus next to a zqx")),
        (
            "an outlined zqx, red",
            "egg",
            ("an outlined egg, red", "an outlined zqx next to an egg, red", "an outlined egg next to a zqx, red"),
        ),
        ("an owl  cat", "unicorn", ("a unicorn", "an owl  cat next to a unicorn", "a unicorn next to an owl  cat")),
        ("a zqx and a zqx", "key", None),
        ("a zqx's house", "key", None),
        ("a zqx-like thing", "key", None),
        ("some zqxes", "key", None),
        ("nothing of it", "key", None),
    ],
)
def test_captions_read_right_or_are_left_out(caption, companion, expected):
    assert rewritten(caption, ("zqx", "owl cat", "owl"), companion) == expected


# -- pictures ----------------------------------------------------------------------------------------------------------------


def thing(ground, colour, side: int) -> np.ndarray:
    picture = np.empty((side, side, 3), np.uint8)
    picture[:] = ground
    picture[side // 4 : -side // 4, side // 4 : -side // 4] = colour
    return picture


def test_on_equal_backgrounds_they_are_those_of_the_comparison(of_the_comparison):
    expected = of_the_comparison("priors").collage
    one, two = (thing((60, 90, 200), colour, 128) for colour in ((250, 10, 10), (10, 250, 10)))
    rngs = [np.random.default_rng(3) for _ in range(2)]
    for right in (False, True):
        made = collage(one, two, rngs[0], right=right)
        assert np.array_equal(made, expected((two, one) if right else (one, two), rngs[1]))


@pytest.mark.parametrize("side", [8, 63, 64, 96, 512])
@pytest.mark.parametrize("ground", [(60, 90, 200), (0, 0, 0), (255, 255, 255)])
def test_both_are_whole_on_the_taught_one_s_background(side, ground):
    taught, other = thing(ground, (250, 10, 10), side), thing((200, 200, 200), (10, 120, 30), side)
    for right in (False, True):
        made = collage(taught, other, np.random.default_rng(side), right=right).astype(int)
        assert made.shape == (side // 2 * 2, side // 2 * 2, 3) and np.abs(made[0, 0] - ground).max() <= 1
        red, green = (np.abs(made - colour).max(-1) < 3 for colour in ((250, 10, 10), (10, 120, 30)))
        size = (side // 4) ** 2
        assert all(0.6 * size <= part.sum() <= 1.3 * size for part in (red, green))
        assert (np.nonzero(red)[1].mean() > np.nonzero(green)[1].mean()) == right


def test_the_default_companions_are_known_and_stand_in_no_prompt_or_example_of_the_demo(repo_root, of_the_comparison):
    known = set(of_the_comparison("subjects").known_names())
    assert set(COMPANIONS) <= known and len(set(COMPANIONS)) == len(COMPANIONS)
    asked = " ".join([*demo.CONTEXTS.values(), *demo.WITHOUT, *(p.name for p in (repo_root / "assets/examples").iterdir())])
    assert not {word for name in COMPANIONS for word in name.split()} & set(asked.replace("-", " ").split())
    assert set(demo.CLASS_WORDS) == {p.name for p in (repo_root / "assets/examples").iterdir()}
    assert set(demo.CLASS_WORDS.values()) <= known


def test_each_picture_beside_things_that_the_base_draws(pipe, adapter, recipe, folder, monkeypatch):
    (folder / "0.txt").write_text("a {trigger} on black\na {trigger} and a {trigger}")
    (folder / "1.txt").write_text("3d {trigger}")
    asked = []
    config = recipe(collage_pictures=2, companions=("key", "owl", "bus"))
    monkeypatch.setattr("tiny_engram.training.collages.draw_pictures", lambda pipe, prompts, seeds, **how: spy(prompts, seeds, how))

    def spy(prompts, seeds, how):
        asked.append((prompts, seeds, how))
        return np.stack([thing((20, 20, 20), (0, 255, 0), 64)] * len(prompts))

    examples = scan_folder(folder, ("zqx",)).examples
    made = draw_collages(pipe, config, examples, 64, lambda text: "zqx" in text, progress=False)
    ((prompts, seeds, how),) = asked
    assert how == {"steps": 2, "guidance": 4.0} and len(set(seeds)) == 4
    # the second caption of the first picture holds the trigger twice, so that the first serves both times
    assert all(p.startswith(("a ", "an ")) and p.endswith(" on black") for p in prompts[:2]) and all(
        p.startswith("3d ") for p in prompts[2:]
    )
    assert len(set(prompts)) == 4 and not [p for p in prompts if "zqx" in p]
    assert len(made) == 8 and all(one.picture.size == (64, 64) and one.caption.count("zqx") == 1 for one in made)
    assert [one.caption.index("zqx") < one.caption.index("next to") for one in made] == [True, False] * 4
    for one in made:
        pixels = np.asarray(one.picture).astype(int)
        green = np.nonzero(np.abs(pixels - (0, 255, 0)).max(-1) < 30)[1].mean()
        assert (green > 32) == (one.caption.index("zqx") < one.caption.index("next to"))


def test_pictures_whose_captions_have_no_place_for_it_are_named(pipe, recipe, folder, monkeypatch, caplog):
    (folder / "0.txt").write_text("a {trigger} and a {trigger}")
    (folder / "1.txt").write_text("word " * 70 + "{trigger}\na {trigger}")
    with caplog.at_level("WARNING", "tiny_engram"):
        made, _ = collages_of(pipe, recipe(max_train_steps=1, collage_pictures=2), monkeypatch)
    assert caplog.text.count("no collages with 0.png:") == 1 and len(made) == 4
    # with a second thing, the trigger of the long caption would be cut off
    assert all(one.caption.startswith("a") for one in made)
    (folder / "1.png").unlink()
    with pytest.raises(DataError, match="collages is 2, but in no caption .*--collages 0"):
        teach(pipe, recipe())
    assert teach(pipe, recipe(collages=0, max_train_steps=1)).steps == 1


# -- what is shown when --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [0, 1, 7])
def test_shares_hold_for_any_batch_and_other_choices_stay(others):
    for samples in (1, 3, 8, 12):
        drawn = [objective.draw(0, step, i, samples, others=others) for step in range(240 // samples) for i in range(samples)]
        assert sum(one.other is not None for one in drawn) == 30 * others
        plain = [objective.draw(0, step, i, samples) for step in range(240 // samples) for i in range(samples)]
        assert [dataclasses.replace(one, other=None) for one in drawn] == plain


def test_a_sample_shows_a_taught_picture_or_a_collage_never_cut_down(pipe, recipe):
    config = recipe(collages=4, caption_dropout=1.0, collage_pictures=2)
    adapter = tiny_engram.attach(pipe)
    start = trainer.untrained(adapter, config)
    data = prepare(pipe, adapter, start, config, scan_folder(config.train_data_dir, ("zqx",)).examples)
    drawn = [objective.draw(0, step, i, 8, others=4) for step in range(40) for i in range(8)]
    shown = [data.picture(one) for one in drawn]
    assert data.collages == 8 and len(data.means) == len(data.choices) == 10
    assert {k for k, one in zip(shown, drawn, strict=True) if one.other is None} == {0, 1}
    assert {k for k, one in zip(shown, drawn, strict=True) if one.other is not None} == set(range(2, 10))
    assert all(" next to " in data.captions.texts[k] for (k,) in data.choices[2:])
    picked: list[list[int]] = []
    batch = type(data.captions).batch
    module = trainer.masters_of(adapter, start, config)
    with pytest.MonkeyPatch.context() as patch, adapter.contexts[ROLE].held():
        patch.setattr(type(data.captions), "batch", lambda self, picks: picked.append(picks) or batch(self, picks))
        loop.denoising_loss(pipe, module, adapter.contexts[ROLE], data, drawn[:8], config)
    adapter.detach()
    texts = [data.captions.texts[k] for k in picked[0]]
    assert [" next to " in text for text in texts] == [one.other is not None for one in drawn[:8]]
    assert [text == "zqx" for text in texts] == [one.other is None for one in drawn[:8]]


# -- the default recipe --------------------------------------------------------------------------------------------------------


def test_the_default_recipe_is_what_the_comparison_chose():
    config = TrainConfig(train_data_dir="pictures", trigger="zqx")
    assert config.concept_config == ConceptConfig(
        mounts=("input", "value"), share="block", bands=2, attention_rank=1, feedforward_rank=1, rho=2.5
    )
    rates = (config.learning_rate, config.gate_learning_rate, config.map_learning_rate, config.adam_beta2, config.ema_decay)
    assert rates == (1.4e-2, 1.4e-2, 5.6e-3, 0.95, 0.98) and config.rate(0) == config.rate(299) == 1.0
    assert (config.max_train_steps, config.train_batch_size, config.collages, config.class_word) == (300, 8, 2, None)


def test_it_is_taught_resumed_and_served_to_the_bit(tiny, pipe, recipe, tmp_path, monkeypatch):
    before = {name: p.clone() for part in (pipe.unet, pipe.text_encoder, pipe.vae) for name, p in part.state_dict().items()}
    drawn, whole = collages_of(pipe, recipe(output_dir=str(tmp_path / "whole")), monkeypatch)

    def stop(done: int, loss: float) -> None:
        if done == 2:
            raise KeyboardInterrupt

    validating = {"validation_steps": 4, "validation_prompts": ("a {trigger}", "a {trigger} next to a key"), "validation_seeds": (3,)}
    with pytest.raises(KeyboardInterrupt):
        teach(pipe, recipe(**validating), on_step=stop)
    assert all(torch.equal(p, before[n]) for part in (pipe.unet, pipe.text_encoder, pipe.vae) for n, p in part.state_dict().items())
    fresh = tiny.build()
    again, resumed = collages_of(fresh, recipe(**validating, resume_from_checkpoint="latest"), monkeypatch)
    assert len(drawn) == 4 and [one.caption for one in again] == [one.caption for one in drawn]
    assert all(np.array_equal(np.asarray(a.picture), np.asarray(b.picture)) for a, b in zip(again, drawn, strict=True))
    one, two = load_file(whole.path), load_file(resumed.path)
    assert resumed.losses == whole.losses and all(torch.equal(one[k].view(torch.uint8), two[k].view(torch.uint8)) for k in one)
    other, _ = collages_of(pipe, recipe(seed=1, max_train_steps=1, output_dir=str(tmp_path / "other")), monkeypatch)
    assert [one.caption for one in other] != [one.caption for one in drawn]
    assert Concept.load(resumed.path).recipe["collages"] == 2
    sheet = np.asarray(Image.open(tmp_path / "out" / "validation" / "step-4.png"))
    adapter = tiny_engram.attach(fresh)
    adapter.load_concept(resumed.path)
    prompts = [p.replace("{trigger}", "zqx") for p in validating["validation_prompts"]]
    images = demo.draw_pictures(fresh, prompts, [3, 3], steps=2, guidance=4.0)
    adapter.detach()
    assert np.array_equal(np.concatenate(list(images), 1), sheet)


def test_companions_are_drawn_with_other_concepts_silent(tiny, pipe, adapter, recipe, monkeypatch):
    config = recipe(companions=("bolo",), max_train_steps=1)
    alone, _ = collages_of(pipe, config, monkeypatch)
    adapter.load_concept(tiny.concept(adapter, "bolo", config=ConceptConfig(mounts=("span", "context"))))
    beside, _ = collages_of(pipe, config, monkeypatch)
    assert all(np.array_equal(np.asarray(a.picture), np.asarray(b.picture)) for a, b in zip(alone, beside, strict=True))
    assert adapter.strength("bolo") == 1.0


def test_accumulated_batches_show_the_same(pipe, recipe, tmp_path):
    whole = teach(pipe, recipe(max_train_steps=2, collages=4))
    parts = recipe(max_train_steps=2, collages=4, train_batch_size=2, gradient_accumulation_steps=2, output_dir=str(tmp_path / "parts"))
    assert teach(pipe, parts).losses == pytest.approx(whole.losses, rel=1e-4)


def test_progress_of_the_drawing_is_shown(pipe, recipe, capfd):
    teach(pipe, recipe(max_train_steps=1))
    assert "drawing companions" not in capfd.readouterr().err
    train(pipe, recipe(max_train_steps=1))
    assert "drawing companions: 100%" in capfd.readouterr().err


def test_another_resolution(pipe, recipe, monkeypatch):
    made, result = collages_of(pipe, recipe(resolution=48, max_train_steps=1), monkeypatch)
    assert all(one.picture.size == (48, 48) for one in made) and np.isfinite(result.losses).all()


def test_nothing_is_drawn_for_what_is_refused(pipe, recipe, monkeypatch):
    monkeypatch.setattr(prepared, "draw_collages", lambda *args, **options: pytest.fail("drew"))
    for changes, words in (
        ({"resume_from_checkpoint": "checkpoint-9"}, "is no checkpoint"),
        ({"class_word": "lamp " * 80}, "is not read as tokens of its own"),
        ({"caption_template": ("word " * 80 + "{trigger}",)}, "does not fire in it"),
    ):
        with pytest.raises(TinyEngramError, match=words):
            teach(pipe, recipe(**changes))


# -- what is refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"companions": ()}, r"collages is 2, but companions are \(\), expected a thing of another name.*--collages 0"),
        ({"companions": ("key", " ")}, "companions are .*expected names of things that the base knows"),
        ({"companions": ("a zqx toy",)}, "companion 'a zqx toy' holds the trigger 'zqx', expected a thing that the base knows"),
        ({"companions": ("Old Zqxs",), "aliases": ("zqxs",)}, "companion 'Old Zqxs' holds the trigger 'zqxs'"),
        ({"companions": ("polar bear",), "class_word": "bear"}, "companions are .*expected a thing of another name"),
    ],
)
def test_companions_that_cannot_be(recipe, changes, words):
    with pytest.raises(ConfigError, match=words) as caught:
        recipe(**changes)
    assert "\n" not in str(caught.value)
    recipe(**changes, collages=0)


def test_default_companions_make_room_for_the_trigger_and_the_class_word(recipe):
    config = recipe(trigger="red key", class_word="bell", aliases=("Bus",))
    assert set(COMPANIONS) - set(config.beside) == {"key", "bell", "bus"}


def test_a_pipeline_without_cross_attentions_is_told_the_way_out(own_pipe, recipe):
    pipe = own_pipe
    plain = ("block_out_channels", "norm_num_groups", "sample_size", "layers_per_block", "cross_attention_dim")
    pipe.unet = UNet2DConditionModel(
        **{name: pipe.unet.config[name] for name in plain},
        down_block_types=("DownBlock2D",) * 2,
        mid_block_type="UNetMidBlock2D",
        up_block_types=("UpBlock2D",) * 2,
    )
    with pytest.raises(TinyEngramError, match="no cross-attentions .*pass --mounts span --attention_rank 0 --feedforward_rank 0") as caught:
        teach(pipe, recipe())
    assert "\n" not in str(caught.value) and find_adapter(pipe) is None


def test_share_and_bands_say_nothing_of_a_concept_at_the_encoder_alone(pipe, recipe, tmp_path):
    """So that its file is as before, and a checkpoint of before they had these defaults is taken up."""
    alone = {"mounts": ("span",), "attention_rank": 0, "feedforward_rank": 0}
    result = teach(pipe, recipe(**alone, max_train_steps=1))
    assert list(result.concept.roles[ROLE].mounts) == ["span"] and result.concept.config == ConceptConfig()
    path = tmp_path / "out" / "checkpoint-1" / "state.json"
    state = json.loads(path.read_text())
    for field in ("share", "bands", "attention_rank", "feedforward_rank", "collages", "companions", "collage_pictures"):
        del state["config"][field]
    path.write_text(json.dumps(state))
    resumed = teach(pipe, recipe(**alone, max_train_steps=2, resume_from_checkpoint="latest"))
    assert resumed.steps == 2 and load_checkpoint(tmp_path / "out" / "checkpoint-2")[1]["step"] == 2
