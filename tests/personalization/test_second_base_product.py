"""On the second base too, the product teaches what the bench's own method teaches: one step's loss and gradients, and where rows start."""

import pytest
import torch

import tiny_engram
from benchmarks.personalization import teach as bench
from benchmarks.personalization.bases import EMOJI_PIXART
from benchmarks.personalization.methods.ours import Ours
from tests.personalization.conftest import pictures
from tiny_engram.mount_names import context_name
from tiny_engram.training import loop, objective, trainer
from tiny_engram.training.cache import cache_captions
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.prepared import TrainingData
from tiny_engram.training.rows import ConceptRows

ROLE, SAMPLES = "t5", 4
PARTS = ("part0", "part1", "part2", "part3")


def paired(ours, module):
    """Views of the product's parameters beside the bench's, which holds no rows for spellings that no caption shows."""
    own, found = ours.positions[0], []
    for k, mount in enumerate(module.mounts):
        name = context_name(mount)
        kind, at = (mount, 0) if name is None else (name.kind, PARTS.index(name.where) * name.bands + name.band)
        for what in ("rows", "gain", "bias"):
            theirs = ours.held(what, kind)[0, at]
            # of the product's columns, those beyond what the mount's width needs are never read
            mine = getattr(module, what)[k][:own]
            found.append((mine[:, : theirs.shape[1]] if what == "rows" else mine, theirs))
    if module.maps is not None:
        for name, (into, out) in module.factors(module.maps).items():
            key = name.replace(".", "-")
            found += [(into, ours.maps.factors[f"{key}-in"][0]), (out, ours.maps.factors[f"{key}-out"][0])]
    return found


@pytest.mark.parametrize(
    ("product", "options"),
    [
        ({"mounts": ("input", "span")}, {"mounts": "input+span"}),
        (
            {"mounts": ("input", "value"), "share": "block", "bands": 2, "attention_rank": 1, "feedforward_rank": 1},
            {"mounts": "input+value", "share": "block", "bands": 2, "maps": "attention:1+feedforward:1"},
        ),
    ],
    ids=["input and span", "ours by default"],
)
def test_a_step_of_teaching_is_the_bench_s(subjects, run, product, options):
    from benchmarks.personalization.base import Base, Taught

    base = Base.load(spec=EMOJI_PIXART)
    base.subjects = subjects
    ours = Ours(base, [run("ours", "disc", deep_local=True, init="anchor", **options)])
    plain = {"share": "none", "bands": 1, "attention_rank": 0, "feedforward_rank": 0, "collages": 0, "report_to": "none"}
    given = plain | product | {"train_data_dir": "none", "trigger": "rugo-bin", "class_word": "ball", "train_batch_size": SAMPLES}
    config = TrainConfig(**given)
    adapter = tiny_engram.attach(base.pipe)
    start = trainer.untrained(adapter, config)
    module = trainer.masters_of(adapter, start, config)
    assert isinstance(module, ConceptRows)
    for mine, theirs in paired(ours, module):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)
    assert module.rows[0].ne(0).any()
    with torch.no_grad():
        for k, p in enumerate(ours.parameters()):
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(k))
        for mine, theirs in paired(ours, module):
            mine.copy_(theirs)

    data = Taught.of(base, subjects["disc"], pictures(0, count=2, captions=1))
    texts = [[text.replace("{0}", config.trigger) for text in each] for each in data.captions]
    captions = cache_captions(adapter, start, [text for each in texts for text in each])
    choices = [[captions.texts.index(text) for text in each] for each in texts]
    contexts = adapter.contexts[ROLE]
    draws = [objective.draw(0, 0, i, SAMPLES) for i in range(SAMPLES)]
    with contexts.held():
        held = TrainingData(data.means, data.stds, captions, choices, [], adapter.family)
        loss = loop.denoising_loss(base.pipe, module, contexts, held, draws, config)
        loss.backward()

    plan = bench._Plan.of(base, ours, [data], 1, SAMPLES)
    noise = bench._noise(0, 0, 1, SAMPLES, base.latent_shape)[0]
    expected = bench._losses(base, ours, plan, 0, slice(0, 1), noise, None)
    expected.sum().backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        for p in (*ours.parameters(), *module.parameters()):
            p.copy_(p.grad)
    for mine, theirs in paired(ours, module):
        assert theirs.ne(0).any() and (mine - theirs).norm() <= 2e-3 * theirs.norm()
