"""Prompts that do not name the subject: ours leaves them alone to the last bit, in the bench and in the product; others are measured."""

import itertools
import re

import pytest
import torch

from benchmarks.personalization.methods import METHODS
from benchmarks.personalization.plan import Settings
from benchmarks.personalization.subjects import known_names
from benchmarks.personalization.trigger_free import TriggerFree, difference, near_misses, prompts

TRIGGER = "rugo-bin"
SETTINGS = Settings(steps=1, main=1, checkpoints=(1,), drawing_steps=2)


def disturbed(base, run, method):
    """A method that was not taught, but moved away from where it starts."""
    adapters = METHODS[method](base, (run(method),))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in adapters.parameters():
            p += 0.05 * torch.randn(p.shape, generator=generator)
    return adapters


@pytest.fixture(scope="module")
def untriggered(base):
    texts = prompts(known_names(), TRIGGER, 10)
    return TriggerFree(base, texts, [any(word in text for word in near_misses(TRIGGER)) for text in texts], SETTINGS, pictures=1)


def test_a_thousand_different_prompts_without_the_trigger():
    texts = prompts(known_names(), TRIGGER, 1000)
    assert len(set(texts)) == 1000 and not any(re.search(rf"\b{TRIGGER}\b", text) for text in texts)
    near = [text for text in texts if any(word in text for word in near_misses(TRIGGER))]
    assert 100 <= len(near) <= 150 and all(any(word in text for text in near) for word in near_misses(TRIGGER))
    assert sum(" left of " in text or " beside " in text for text in texts) > 100
    with pytest.raises(ValueError, match="give more names"):
        prompts(known_names()[:2], TRIGGER, 1000)


def test_differences_over_several_tensors():
    pairs = [([1.0, 2.0], [1.0, 5.0]), ([0.0], [-1.0]), ([], [])]
    assert difference((torch.tensor(one), torch.tensor(other)) for one, other in pairs) == {"max": 3.0, "mean": pytest.approx(4 / 3)}
    assert difference([]) == {"max": 0.0, "mean": 0.0}


def test_ours_changes_nothing(base, run, untriggered):
    adapters = disturbed(base, run, "ours")
    row = base.rows(["a {0}"], [(TRIGGER,)], torch.zeros(1, 1, dtype=torch.long))
    states = adapters.states(base, row)
    with torch.no_grad(), adapters.attached(base, row, states):
        moved = untriggered._denoised(states, row.ids)
    assert not torch.equal(moved, untriggered._denoised(row.states, row.ids)), "what is loaded does something where its trigger stands"
    for found in (untriggered.changed_by(adapters), untriggered.changed_by_product(adapters.concept(base, 0))):
        assert found["prompts"] == 10 and found["drawn"] == 1
        assert all(found[name] == {"max": 0.0, "mean": 0.0} for name in ("conditioning", "near", "denoiser", "pictures"))


def test_the_product_is_taken_off_again(base, run, untriggered):
    assert not list(itertools.chain(*(m._forward_pre_hooks.values() for _, m in base.denoiser.named_modules())))
    assert torch.equal(untriggered._encoded().states, untriggered.rows.states)


def test_what_is_loaded_everywhere_is_seen(base, run, untriggered):
    lora = untriggered.changed_by(disturbed(base, run, "lora-both-r8"))
    for name in ("conditioning", "near", "denoiser"):
        assert lora[name]["max"] > lora[name]["mean"] > 1e-4
    assert lora["pictures"]["max"] > 1
    published = untriggered.changed_by(disturbed(base, run, "after-tiny-engram"))
    # parts of the trigger fire in near misses alone
    assert published["near"]["mean"] > published["conditioning"]["mean"] > 0
