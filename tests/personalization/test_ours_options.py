"""Options of our method: what they share, cost and mean, and those that make no sense."""

import itertools

import pytest
import torch

from benchmarks.personalization.methods.ours import Ours
from benchmarks.personalization.methods.ours_options import Options

ALL = "input+layer-2+span+key+value"
LORA_R8 = 132_608 * 2  # bytes of LoRA r8 on this denoiser, float16


@pytest.fixture
def make(base, run):
    """Ours on the disc, untaught."""
    return lambda **options: Ours(base, [run("ours", **options)])


def test_sharing_follows_the_denoiser(make):
    assert make(share="stage").groups == [0, 0, 1, 2, 2, 2, 2]
    assert make(share="width").groups == [0, 1, 1, 1, 1, 0, 0]
    assert make(share="none").groups == list(range(7))


def test_payload_is_a_twentyfifth_of_lora(make):
    standard, most = make(), make(mounts=ALL)
    assert standard.payload(0) == 14 * 4 * (128 + 4 + 8)
    assert standard.payload(0) <= most.payload(0) <= LORA_R8 / 25
    assert standard.trainable() == 14 * 4 * (128 + 2)
    shared = make(gate_shared=True)
    assert shared.payload(0) == 14 * 4 * 132 + 4 * 8
    assert make(columns=2).payload(0) == 14 * 4 * (64 + 2 + 8)
    assert make(quantise=False).payload(0) == 14 * 4 * (256 + 8)


def test_class_last_leaves_the_first_tokens_alone(make):
    rows = make(init="class-last").held("rows", "key")[0]
    assert (rows[:, :3] == 0).all() and rows[:, 3].abs().sum() > 0


def test_options_that_make_no_sense_say_so(base, run, make):
    for options, words in (
        ({"mount": "span"}, "no option mount"),
        ({"mounts": "spam"}, "expected span, key, value, input, layer-k"),
        ({"mounts": "key+key"}, "each once"),
        ({"mounts": "layer-9"}, "4 layers"),
        ({"mounts": "span", "bands": 2}, "expected 1"),
        ({"mounts": "span", "key_lock": True}, "key among them"),
        ({"bands": 5}, "expected one of 1, 2, 3, 4"),
        ({"columns": 5}, "at most 4"),
        ({"rho": 0.0}, "above 0"),
        ({"ema": 1.0}, "below 1"),
    ):
        with pytest.raises(ValueError, match=words):
            make(**options)
    with pytest.raises(ValueError, match="rho, rho_deep"):
        Ours(base, [run("ours"), run("ours", share="all")])
    rows = base.rows(["a {0}"], [("rugo-bin-rugo",)], torch.tensor([[0]]))
    with pytest.raises(ValueError, match="one trigger per run"):
        make(mounts="span").states(base, rows)
    with pytest.raises(ValueError, match="one trigger per run"), make().attached(base, rows, rows.states):
        pass


def test_mounts_come_in_the_order_in_which_a_prompt_meets_them():
    for order in itertools.permutations(["input", "layer-0", "layer-2", "span", "key"]):
        assert Options(mounts="+".join(order)).kinds == ("input", "layer-0", "layer-2", "span", "key")
