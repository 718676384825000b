"""Context mounts in transformer denoisers, which project the text states or mix them with time: what each projection reads."""

import pytest
import torch

import tiny_engram
from tests.pipelines.stream_cases import PLAIN, PROMPT, STREAMS, TRIGGER, TRUE_GUIDANCE, TWO_CALLS, expected, place_of, reads, spans_of
from tests.pipelines.tiny.base import picture
from tests.pipelines.tiny.every import cases
from tiny_engram.config import ConceptConfig

SIDES = ConceptConfig(mounts=("context",))
BANDS = ConceptConfig(mounts=("context",), share="block", bands=4)


@pytest.fixture(scope="module", params=cases(STREAMS.values()))
def built(request):
    """One of the tiny pipelines with an adapter, and what it draws without a concept."""
    entry = request.param
    pipe = entry.build()
    guided = {"negative_prompt": "a house"} if entry.family != "flux-2" else {}
    guided |= {"true_cfg_scale": TRUE_GUIDANCE[entry.family]} if entry.family in TRUE_GUIDANCE else {}
    guided = {} if entry.family == "flux-2-klein" else guided
    base = {prompt: picture(entry, pipe, prompt, **guided) for prompt in (PROMPT, PLAIN)}
    return entry, pipe, tiny_engram.attach(pipe), guided, base


@pytest.fixture
def adapted(built, tiny):
    """The same with a concept of random rows at all context mounts; unloaded at the end."""
    entry, pipe, adapter, guided, base = built
    concept = tiny.concept(adapter, TRIGGER, name="vortex", config=SIDES)
    adapter.load_concept(concept)
    yield entry, pipe, adapter, concept, guided, base
    adapter.unload_concept()


def test_each_place_adds_its_own_rows_at_the_trigger_and_nowhere_else(adapted):
    entry, pipe, adapter, concept, guided, _ = adapted
    adapter.set_strength("vortex", 0.7)
    with reads(adapter) as seen:
        picture(entry, pipe, PROMPT, **guided)
    spans = spans_of(adapter, concept, PROMPT, entry)
    assert spans and all(spans.values()) and len(seen) >= 4
    for name, calls in seen.items():
        changed = [pair for pair in calls if not torch.equal(*pair)]
        halved = entry.family in TWO_CALLS and entry.family != "flux-2"
        assert len(changed) == (len(calls) // 2 if halved else len(calls)) > 0
        for before, after in changed:
            (row,) = (before != after).flatten(1).any(1).nonzero().flatten().tolist()
            assert row == (0 if entry.family == "z-image" else len(before) - 1)
            assert torch.equal(after, expected(adapter, concept, name, before, row, spans, place_of(entry), 0.7))


def test_without_the_trigger_and_without_strength_the_base_draws(adapted):
    entry, pipe, adapter, _, guided, base = adapted
    assert torch.equal(picture(entry, pipe, PLAIN, **guided), base[PLAIN])
    ours = picture(entry, pipe, PROMPT, **guided)
    assert not torch.equal(ours, base[PROMPT]) and ours.isfinite().all()
    adapter.set_strength("vortex", 0.0)
    assert torch.equal(picture(entry, pipe, PROMPT, **guided), base[PROMPT])
    adapter.set_strength("vortex", 1.0)
    assert torch.equal(picture(entry, pipe, PROMPT, **guided), ours)


def test_a_band_is_that_of_the_scheduler_and_a_part_of_the_layers_shares_its_rows(built, tiny):
    entry, pipe, adapter, guided, base = built
    adapter.load_concept(concept := tiny.concept(adapter, TRIGGER, name="vortex", config=BANDS))
    try:
        with reads(adapter) as seen:
            picture(entry, pipe, PROMPT, **guided)
        timesteps = [float(t) for t in pipe.scheduler.timesteps]
        spans, total = spans_of(adapter, concept, PROMPT, entry), pipe.scheduler.config.num_train_timesteps
        for name, calls in seen.items():
            changed = [pair for pair in calls if not torch.equal(*pair)]
            # Of two denoisers each has one of the two steps.
            mine = timesteps if len(changed) == len(timesteps) else timesteps[1:] if "/" in name else timesteps[:1]
            for t, (before, after) in zip(mine, changed, strict=True):
                row = 0 if entry.family == "z-image" else len(before) - 1
                band = f".{min(int(t * 4 / total), 3) + 1}of4"
                assert torch.equal(after, expected(adapter, concept, name, before, row, spans, place_of(entry), band=band))
        assert torch.equal(picture(entry, pipe, PLAIN, **guided), base[PLAIN])
    finally:
        adapter.unload_concept()
