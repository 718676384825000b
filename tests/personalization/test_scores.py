import dataclasses

import numpy as np
import pytest
import torch

from benchmarks.personalization import real
from benchmarks.personalization.prompts import prompts_for
from benchmarks.personalization.references import LENGTHS, ReferenceBank, chosen_views, named_colour, nearest_length
from benchmarks.personalization.scores import Case, Gallery, Judges, accuracy, ceilings
from benchmarks.personalization.subjects import load_subjects

LIKENESS = {"effnet_best", "effnet_all", "lpips_best", "lpips_all", "identity", "identity_lpips"}
PAIR = {"left", "right", "both", "left_lpips", "right_lpips", "both_lpips"}
FINAL = {subject.name: subject for subject in load_subjects("final")}
OWL, TEAPOT, MUG = FINAL["owl"], FINAL["teapot"], FINAL["red mug"]
GALLERY = Gallery((OWL, TEAPOT))
PROMPTS = {prompt.context: prompt for prompt in prompts_for(OWL)}


@pytest.fixture(scope="module")
def judges() -> Judges:
    return Judges.load()


def picture(*shown: real.Shown) -> np.ndarray:
    pictures = real.compose(shown, torch.device("cpu"), 0)
    return (pictures * 255).round().byte().permute(0, 2, 3, 1).numpy()


def of(prompt, *subjects, views=None) -> real.Shown:
    views = views or tuple(subject.styles.index(prompt.style or "3d") for subject in subjects)
    return real.Shown(prompt, subjects, views, (False,) * len(subjects))


def test_a_real_picture_has_all_that_was_asked(judges):
    prompt = PROMPTS["left"]
    (record,) = judges.score(picture(of(prompt, OWL)), [Case(prompt, (OWL,))], GALLERY)
    assert set(record) == LIKENESS | {"colour", "style", "companion", "position", "prompt"}
    assert all(record[field] == 1 for field in set(record) - {"effnet_best", "effnet_all", "lpips_best", "lpips_all"})
    assert 0.75 < record["effnet_all"] <= record["effnet_best"] <= 1 and 0.75 < record["lpips_all"] <= record["lpips_best"] <= 1


def test_another_subject_is_less_alike_and_is_found_out(judges):
    prompt = PROMPTS["taught"]
    shown = picture(of(prompt, OWL), of(prompt, TEAPOT))
    right, wrong = judges.score(shown, [Case(prompt, (OWL,))] * 2, GALLERY)
    assert (right["identity"], right["identity_lpips"]) == (1, 1) and (wrong["identity"], wrong["identity_lpips"]) == (0, 0)
    for field in ("effnet_best", "effnet_all", "lpips_best", "lpips_all"):
        assert wrong[field] < right[field] - 0.1
    assert right["prompt"] == wrong["prompt"] == 1


@pytest.mark.parametrize(
    ("context", "change", "lost"),
    [
        ("taught", {"colour": "green"}, {"colour"}),
        ("taught", {"style": "outlined"}, {"style"}),
        ("left", {"companion": "castle"}, {"companion"}),
        ("left", {"side": "right"}, {"position", "companion"}),
    ],
)
def test_what_the_prompt_did_not_get_is_said(judges, context, change, lost):
    made = PROMPTS[context]
    asked = dataclasses.replace(made, **change)
    assert made != asked
    (record,) = judges.score(picture(of(made, OWL)), [Case(asked, (OWL,))], GALLERY)
    parts = {field: record[field] for field in ("colour", "style", "companion", "position") if field in record}
    assert {field for field, value in parts.items() if value == 0} >= lost
    assert record["prompt"] == pytest.approx(sum(parts.values()) / len(parts)) and record["prompt"] < 1
    assert all(value == 1 for field, value in parts.items() if field not in lost | {"position"})


def test_the_bare_trigger_asks_for_nothing(judges):
    (record,) = judges.score(picture(of(PROMPTS["bare"], OWL)), [Case(PROMPTS["bare"], (OWL,))], GALLERY)
    assert set(record) == LIKENESS and record["identity"] == 1


def test_pairs_must_stand_on_their_own_sides(judges):
    ((prompt, _),) = real.pair_prompts((OWL, TEAPOT))
    shown = picture(of(prompt, OWL, TEAPOT))
    swapped, right = judges.score(np.concatenate([shown] * 2), [Case(prompt, (TEAPOT, OWL)), Case(prompt, (OWL, TEAPOT))], GALLERY)
    assert set(right) == LIKENESS | PAIR | {"colour", "style", "prompt"}
    assert all(right[field] == 1 for field in PAIR) and all(swapped[field] == 0 for field in PAIR)
    (half,) = judges.score(shown, [Case(prompt, (OWL, OWL))], GALLERY)
    assert (half["left"], half["right"], half["both"], half["identity"]) == (1, 0, 0, 0.5)


def test_an_objects_own_view_can_be_left_out(judges):
    prompt = prompts_for(MUG)[0]
    shown = picture(of(prompt, MUG, views=(3,)))
    gallery = Gallery((MUG,))
    inside, outside = (judges.score(shown, [Case(prompt, (MUG,), views)], gallery)[0] for views in (None, (3,)))
    assert outside["effnet_best"] < inside["effnet_best"] and outside["lpips_best"] < inside["lpips_best"]
    assert outside["effnet_best"] > 0.7


def test_an_objects_style_is_measured_against_its_own_views(judges):
    """A mug as it is, and the same mug in one colour with a black outline."""
    prompt = prompts_for(MUG)[0]
    as_it_is = picture(of(prompt, MUG, views=(3,)))
    background = torch.tensor(as_it_is[0, 0, 0], dtype=torch.float32)
    mask = (torch.tensor(as_it_is[0], dtype=torch.float32) - background).abs().amax(2) > 25
    inner = -torch.nn.functional.max_pool2d(-mask[None, None].float(), 9, 1, 4)[0, 0] > 0
    drawn = as_it_is.copy()
    drawn[0][mask.numpy()] = 0
    drawn[0][inner.numpy()] = (210, 40, 40)
    for style, expected in (("3d", [1, 0]), ("outlined", [0, 1])):
        asked = dataclasses.replace(prompt, style=style)
        records = judges.score(np.concatenate([as_it_is, drawn]), [Case(asked, (MUG,), (3,))] * 2, Gallery((MUG,)))
        assert [record["style"] for record in records] == expected


def test_verdicts_do_not_depend_on_the_company(judges):
    prompts = [PROMPTS[context] for context in ("taught", "left")]
    shown = picture(*(of(prompt, OWL) for prompt in prompts))
    cases = [Case(prompt, (OWL,)) for prompt in prompts]
    together = judges.score(shown, cases, GALLERY)
    alone = [judges.score(shown[i : i + 1], cases[i : i + 1], GALLERY)[0] for i in range(2)]
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert judges.score(torch.from_numpy(shown), cases, GALLERY) == together


def test_mistakes_are_named(judges):
    shown, prompt = picture(of(PROMPTS["left"], OWL)), PROMPTS["left"]
    with pytest.raises(ValueError, match="1 pictures and 2 cases"):
        judges.score(shown, [Case(prompt, (OWL,))] * 2, GALLERY)
    with pytest.raises(ValueError, match="'red mug'.*gallery"):
        judges.score(shown, [Case(prompt, (MUG,))], GALLERY)
    with pytest.raises(ValueError, match="companion 'unheard of'"):
        judges.score(shown, [Case(dataclasses.replace(prompt, companion="unheard of"), (OWL,))], GALLERY)


def test_references_follow_the_style_that_is_asked():
    assert chosen_views(OWL, "flat") == ((1, False), (1, True))
    assert chosen_views(OWL, None) == chosen_views(OWL, "3d") == ((0, False), (0, True))
    assert chosen_views(MUG, "outlined") == chosen_views(MUG, None) == tuple((view, False) for view in range(12))


def test_sizes_and_colours_come_from_short_lists():
    assert [nearest_length(x) for x in (20.0, 50.0, 60.0, 100.0, 128.0)] == [LENGTHS[i] for i in (0, 1, 1, 2, 2)]
    assert named_colour((0.8, 0.15, 0.15)) == pytest.approx((210 / 255, 40 / 255, 40 / 255))
    assert named_colour((0.21, 0.97, 0.38)) == pytest.approx((0.2, 1.0, 0.4))


def test_references_are_made_once_and_the_oldest_go_first():
    made = []

    def networks(crops: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made.append(len(crops))
        return torch.ones(len(crops), 4), torch.ones(len(crops), 8), torch.ones(len(crops), 3)

    bank = ReferenceBank(networks, lambda pictures: pictures, torch.device("cpu"), kept_bytes=200)
    first = bank.of((OWL, MUG), "3d", 56.0, (1.0, 1.0, 1.0))
    assert made == [14] and [len(found.views) for found in first] == [2, 12]
    assert bank.of((MUG,), "flat", 56.0, (1.0, 1.0, 1.0))[0] is first[1] and made == [14]
    bank.of((OWL,), "flat", 56.0, (1.0, 1.0, 1.0))
    assert made == [14, 2] and bank.nbytes <= 200
    assert bank.of((OWL,), "flat", 56.0, (1.0, 1.0, 1.0)) and made == [14, 2]
    assert bank.of((MUG, OWL), "3d", 56.0, (1.0, 1.0, 1.0)) and made[2:] in ([12, 2], [14])


def test_judges_are_judged_on_real_pictures(judges):
    found = accuracy(judges.vae, (OWL, TEAPOT), judges=judges, samples=1, contexts=("taught", "left"))
    assert set(found) == {"final"} and set(found["final"]) == {"real", "autoencoded"}
    for figures in found["final"].values():
        assert figures["identity, whole picture"] == figures["identity, half"] == figures["background, all"] == 1
        assert figures["both identities, pairs"] == figures["style, emoji"] == 1 and figures["companion, beside a subject"] >= 0.5


def test_the_ceilings_of_whole_and_half_are_near_each_other(judges):
    reached = ceilings(judges.vae, (OWL,), judges=judges, samples=1, contexts=("taught", "right", "bare"))
    assert tuple(reached) == ("taught", "right", "bare") and "prompt" not in reached["bare"]
    assert all(0.8 < found["effnet_best"] <= 1 and found["identity"] == 1 for found in reached.values())
    assert reached["right"]["effnet_best"] > 0.9 * reached["taught"]["effnet_best"]
