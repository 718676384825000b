"""The product teaches what the bench's own method teaches: one step's loss and gradients, and where the rows start."""

import pytest
import torch

import tiny_engram
from benchmarks.personalization import teach as bench
from benchmarks.personalization.methods.ours import Ours
from tiny_engram.mount_names import context_name
from tiny_engram.training import loop, objective, trainer
from tiny_engram.training.cache import cache_captions
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.prepared import TrainingData
from tiny_engram.training.rows import ConceptRows

ROLE, SAMPLES = "clip_l", 8
PRODUCT = {"mounts": ("input", "value"), "share": "block", "bands": 2, "attention_rank": 2, "feedforward_rank": 1, "class_word": "ball"}
BENCH = {"mounts": "input+value", "bands": 2, "share": "block", "maps": "attention:2+feedforward:1", "deep_local": True, "init": "anchor"}
BLOCKS = ("down0", "down1", "mid", "up0", "up1")


def settings(**changes) -> TrainConfig:
    plain = {"share": "none", "bands": 1, "attention_rank": 0, "feedforward_rank": 0, "collages": 0}
    return TrainConfig(train_data_dir="none", trigger="rugo-bin", train_batch_size=SAMPLES, report_to="none", **plain | changes)


def paired(ours: Ours, module) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Views of the product's parameters, each beside that of the bench's: rows, gain and bias of each mount, factors of each map."""
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"rows": [], "gain": [], "bias": [], "maps": []}
    for k, mount in enumerate(module.mounts):
        name = context_name(mount)
        kind, at = mount, 0
        if name is not None:
            where = BLOCKS.index(name.where) if name.shared else int(name.where)
            kind, at = name.kind, where * name.bands + name.band
        for what in ("rows", "gain", "bias"):
            found[what].append((getattr(module, what)[k], ours.held(what, kind)[0, at]))
    if module.maps is not None:
        for name, (into, out) in module.factors(module.maps).items():
            key = name.replace(".", "-")
            found["maps"] += [(into, ours.maps.factors[f"{key}-in"][0]), (out, ours.maps.factors[f"{key}-out"][0])]
    return found


def gradients(ours: Ours, module):
    """`paired`, of the gradients."""
    with torch.no_grad():
        for p in (*ours.parameters(), *module.parameters()):
            p.copy_(p.grad)
    return paired(ours, module)


@pytest.fixture
def adapter(base):
    made = tiny_engram.attach(base.pipe)
    yield made
    made.detach()


@pytest.mark.parametrize(
    ("product", "options"),
    [
        (PRODUCT, BENCH),
        ({"mounts": ("input", "span"), "class_word": "ball"}, {"mounts": "input+span", "deep_local": True, "init": "anchor"}),
        ({"mounts": ("key", "value"), "bands": 3, "context_rho": 1.5}, {"mounts": "key+value", "bands": 3, "rho": 1.5}),
    ],
    ids=["input, shared values, maps", "input and span", "banded keys and values"],
)
def test_a_step_of_teaching_is_the_bench_s(base, adapter, run, taught, product, options):
    ours = Ours(base, [run("ours", "disc", **options)])
    config = settings(**product)
    start = trainer.untrained(adapter, config)
    module = trainer.masters_of(adapter, start, config)
    assert isinstance(module, ConceptRows)
    for what, pairs in paired(ours, module).items():
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3 if what == "maps" else 1e-5)
    assert module.rows[0].ne(0).any() == ("class_word" in product)

    with torch.no_grad():
        for k, p in enumerate(ours.parameters()):
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(k))
        for pairs in paired(ours, module).values():
            for mine, theirs in pairs:
                mine.copy_(theirs)

    data = taught["disc"]
    texts = [[text.replace("{0}", config.trigger) for text in captions] for captions in data.captions]
    captions = cache_captions(adapter, start, [text for each in texts for text in each])
    assert captions.onward == ("input" in product["mounts"])
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
    for what, pairs in gradients(ours, module).items():
        for mine, theirs in pairs:
            assert theirs.ne(0).any(), what
            assert (mine - theirs).norm() <= 2e-3 * theirs.norm(), what
