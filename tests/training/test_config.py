"""What a training run is told: what is refused and in which words, the schedule, JSON."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest

from tiny_engram.errors import ConfigError
from tiny_engram.training.config import TrainConfig


def make(**changes) -> TrainConfig:
    return TrainConfig(**{"train_data_dir": "pictures", "trigger": "zqx", **changes})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train_batch_size", 0),
        ("max_train_steps", -1),
        ("max_train_steps", 2.5),
        ("max_train_steps", True),
        ("gradient_accumulation_steps", 0),
        ("validation_inference_steps", 0),
        ("validation_steps", -1),
        ("checkpointing_steps", -1),
        ("lr_warmup_steps", -1),
        ("seed", -1),
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("gate_learning_rate", math.inf),
        ("map_learning_rate", 0.0),
        ("adam_beta2", 1.0),
        ("adam_beta2", "0.5"),
        ("max_grad_norm", -1.0),
        ("caption_dropout", 1.5),
        ("caption_dropout", math.nan),
        ("ema_decay", 1.0),
        ("rho", 0.0),
        ("context_rho", -1.0),
        ("mounts", ()),
        ("mounts", ("span", 1)),
        ("share", "width"),
        ("bands", 5),
        ("bands", 2.0),
        ("attention_rank", -1),
        ("feedforward_rank", 0.5),
        ("class_word", " "),
        ("collages", 8),
        ("collages", -1),
        ("collages", 0.5),
        ("companions", "key"),
        ("companions", (1,)),
        ("collage_pictures", 0),
        ("rho", math.nan),
        ("snr_gamma", -5.0),
        ("resolution", 4),
        ("lr_scheduler", "exponential"),
        ("mixed_precision", "fp8"),
        ("report_to", "mlflow"),
        ("report_to", "none,wandb"),
        ("report_to", ""),
        ("report_to", None),
        ("optimizer", "sgd"),
        ("adam_beta1", 1.0),
        ("adam_epsilon", 0.0),
        ("adam_weight_decay", -0.1),
        ("adam_weight_decay", 0.1),
        ("row_weight_decay", 0.1),
        ("lr_num_cycles", 0),
        ("lr_power", 0.0),
        ("lr_min_ratio", 1.0),
        ("lr_min_ratio", -0.1),
        ("noise_offset", -0.1),
        ("timestep_sampling", "cosmap"),
        ("timestep_shift", 0.0),
        ("logit_mean", math.nan),
        ("logit_std", 0.0),
        ("mode_scale", 1.8),
        ("validation_loss_steps", -1),
        ("validation_loss_samples", 0),
        ("early_stop_patience", 0),
        ("early_stop_patience", 2),
        ("validation_data_dir", "held"),
        ("subject_type", "thing"),
        ("caption_tag_dropout", 1.0),
        ("caption_tag_dropout", -0.1),
        ("unmasked_weight", 1.5),
        ("unmasked_weight", math.nan),
        ("bucket_steps", 0),
        ("bucket_steps", 64),
        ("bucket_no_upscale", True),
        ("cache_dir", " "),
        ("checkpoints_total_limit", 0),
        ("aliases", "zqxs"),
        ("caption_template", "a {trigger}"),
        ("validation_prompts", (1,)),
        ("validation_seeds", ("0",)),
    ],
)
def test_nonsense_is_refused_with_field_value_and_expectation(field, value):
    with pytest.raises(ConfigError, match=f"{field} is .*expected") as caught:
        make(**{field: value})
    assert repr(value) in str(caught.value) and "\n" not in str(caught.value)


def test_what_only_some_mounts_can_use_is_refused_with_others():
    with pytest.raises(ConfigError, match="class_word is 'lamp', expected None where mounts are neither 'input' nor 'span'"):
        make(mounts=("value",), class_word="lamp")
    with pytest.raises(ConfigError, match="context_rho is 0.5, expected None where mounts are at the encoder alone"):
        make(mounts=("span",), context_rho=0.5)
    none = {"attention_rank": 0, "feedforward_rank": 0}
    for mounts in (("input",), ("input", "span")):
        alone = make(mounts=mounts, class_word="lamp", **none)
        assert not alone.at_denoiser and make(mounts=mounts, **{**none, "attention_rank": 1}).at_denoiser
        assert (alone.concept_config.share, alone.concept_config.bands) == ("none", 1)
    assert make(mounts=("input", "value"), bands=4, share="block").at_denoiser


@pytest.mark.parametrize("field", ["caption_template", "validation_prompts"])
def test_templates_without_the_trigger_are_refused(field):
    with pytest.raises(ConfigError, match="'a photo' does not hold the trigger; write {trigger}"):
        make(**{field: ("a {trigger}", "a photo")})
    make(**{field: ("a {trigger}", "a photo of a zqx")})


def test_json_round_trip():
    config = make(aliases=("zqxs",), validation_seeds=(1, 2), rho=0.5)
    data = json.loads(json.dumps(config.to_dict()))
    assert TrainConfig.from_dict(data) == config and set(data) == {f.name for f in dataclasses.fields(TrainConfig)}


@pytest.mark.parametrize("name", ["constant", "cosine", "linear"])
def test_rate_warms_up_and_follows_the_schedule(name):
    config = make(lr_scheduler=name, lr_warmup_steps=4, max_train_steps=100)
    after = {"constant": 1.0, "linear": 0.5, "cosine": 0.5}[name]
    assert config.rate(50) == pytest.approx(after)
    assert config.rate(0) <= 0.25 < config.rate(2) < config.rate(3) <= 1
    end = config.rate(99)
    assert end == 1 if name == "constant" else 0 < end < 0.02


def test_config_is_light():
    code = "import sys, tiny_engram.training.config; print([n for n in ('torch', 'numpy', 'PIL', 'accelerate') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
