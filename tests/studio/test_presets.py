"""Presets and the checks of a job's settings: every preset is a sound recipe, nonsense is named, times say whether they were measured."""

import math

import pytest

from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.presets import DEFAULT_PRESET, PRESETS, check_fields, estimate, fields_of, measure, time_in_words
from tiny_engram.training.config import TrainConfig


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_whole_recipe(preset):
    fields = check_fields(fields_of(preset))
    made = TrainConfig(train_data_dir="pictures", trigger="zqx", **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    assert made.validation_prompts == ("a {trigger}",) and made.validation_steps and made.checkpointing_steps
    assert made.checkpoints_total_limit and made.checkpoints_total_limit >= 2, "one spare, should the newest be damaged"
    assert PRESETS[preset].title and PRESETS[preset].words.endswith(".")
    assert check_fields(fields) == fields, "JSON and back"


def test_the_balanced_one_is_the_documented_recipe():
    fields, default = fields_of(DEFAULT_PRESET), TrainConfig(train_data_dir="pictures", trigger="zqx")
    differ = {name for name, value in fields.items() if value != getattr(default, name)}
    assert differ == {"checkpointing_steps", "checkpoints_total_limit", "validation_steps", "validation_prompts"}


def test_an_unknown_preset_is_named():
    with pytest.raises(StudioError, match="preset 'fast', expected one of quick, balanced, best"):
        fields_of("fast")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_train_steps": 20_001}, "max_train_steps is 20,001, expected at most 20,000"),
        ({"max_train_steps": 0}, "max_train_steps is 0, expected a whole number from 1"),
        ({"max_train_steps": 2.5}, "max_train_steps is 2.5, expected a whole number"),
        ({"max_train_steps": "many"}, "max_train_steps is 'many', expected a number"),
        ({"max_train_steps": True}, "max_train_steps is 'True', expected a number"),
        ({"learning_rate": math.nan}, "learning_rate is 'nan', expected a number"),
        ({"learning_rate": None}, "learning_rate is 'None', expected a value"),
        ({"mounts": "input"}, "mounts is 'input', expected a list"),
        ({"lr_scheduler": 3}, "lr_scheduler is '3', expected a word"),
        ({"lr_scheduler": "sine"}, "lr_scheduler is 'sine', expected one of"),
        ({"output_dir": "/etc"}, "no setting 'output_dir' of teaching"),
        ({"train_data_dir": "/etc"}, "no setting 'train_data_dir' of teaching"),
        ({"resume_from_checkpoint": "/etc"}, "no setting 'resume_from_checkpoint'"),
        ({"validation_prompts": ["a hat"]}, r"the sample prompt 'a hat' does not hold \{trigger\}"),
        ({"caption_template": ["a hat"]}, "caption_template 'a hat' does not hold the trigger"),
        ({"companions": ["x" * 201]}, "companions has too much in it"),
        ({"validation_seeds": [0] * 65}, "validation_seeds has too much in it"),
        ({"validation_prompts": [7]}, "validation_prompts is"),
    ],
)
def test_nonsense_is_named(change, words):
    with pytest.raises(StudioError, match=words) as caught:
        check_fields(fields_of("quick") | change)
    assert "\n" not in str(caught.value)


def test_whole_numbers_of_a_browser_are_whole():
    fields = check_fields(fields_of("quick") | {"max_train_steps": 50.0, "mounts": ["span"], "resolution": 64.0, "snr_gamma": None})
    assert fields["max_train_steps"] == 50 and isinstance(fields["max_train_steps"], int) and isinstance(fields["resolution"], int)
    assert fields["mounts"] == ["span"] and fields["snr_gamma"] is None


def test_times_say_what_they_are():
    quick, best = (check_fields(fields_of(name)) for name in ("quick", "best"))
    told = estimate(quick, 5, None)
    assert not told.measured and told.seconds and "an estimate" in told.words
    longer = estimate(best, 5, None).seconds
    assert longer and longer > 4 * told.seconds
    measured = measure([(quick, 1.6), (quick, 0.8), (quick, 4.0)])
    assert measured and measured.jobs == 3 and measured.sample_seconds == pytest.approx(0.2)
    here = estimate(quick, 5, measured)
    samples = 4 * 25 * 2 / 3  # pictures, denoising steps, and what one costs as a share of a sample in a step
    assert here.measured and here.seconds == pytest.approx(10 + (800 + samples) * 0.2)
    assert here.words == "about 3 minutes (measured on this machine)"
    assert measure([]) is None
    unknown = estimate(quick, 5, None, embedded=False)
    assert unknown.seconds is None and "not known" in unknown.words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(1, "5 seconds"), (42, "40 seconds"), (58, "1 minute"), (260, "4 minutes"), (3600, "60 minutes"), (7100, "2 hours")],
)
def test_times_as_a_person_says_them(seconds, words):
    assert time_in_words(seconds) == words
