"""Controls: each takes out the part that it names, and nothing else."""

import pytest
import torch

from benchmarks.personalization.methods import LABELS, METHODS
from benchmarks.personalization.methods.controls import DRAWN, TRAINED, GatesOnly, TrainableBasis
from benchmarks.personalization.methods.ours import Ours
from benchmarks.personalization.teach import teach
from tiny_engram.residual import Spans, apply_concept


@pytest.fixture
def stack(base, run):
    """Three runs on two subjects, filled."""
    ours = Ours(base, [run("ours", name, seed=seed) for name, seed in (("disc", 0), ("disc", 1), ("spot", 0))])
    with torch.no_grad():
        for i, p in enumerate(ours.parameters()):
            p += torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.1
    return ours


def trained_control(base, run, name: str, mounts: str = "span", **options) -> Ours:
    return TRAINED[name](base, [run(name, mounts=mounts, **options)])


def fired(base, ours, text="a 3d {0} on a red background"):
    return base.rows([text], [(base.subject(ours.runs[0].subject).trigger,)], torch.tensor([[0]]))


def rows_of(ours, kind="value"):
    return ours.held("rows", kind).detach()


def test_every_control_is_listed_and_labelled():
    assert set(TRAINED) < set(METHODS) and not set(DRAWN) & set(METHODS)
    assert set(TRAINED) | set(DRAWN) < set(LABELS)


@torch.no_grad()
@pytest.mark.parametrize(("name", "gate"), [("ours-gate-fixed", 0.5), ("ours-gate-removed", 1.0)])
def test_gates_without_a_say(base, run, name, gate):
    ours = trained_control(base, run, name, rho=2.0)
    ours.held("rows", "span")[:] = 1.0  # far beyond the bound, so that the value has length 1
    rows = fired(base, ours)
    ((row, _, start, length),) = rows.spans
    change = (ours.states(base, rows) - rows.states)[row, start : start + length].norm(dim=1)
    norm = rows.states[row, start : start + length].norm(dim=1).mean()
    torch.testing.assert_close(change, (2.0 * gate * norm).expand(length), rtol=1e-4, atol=1e-4)
    assert all(not n.startswith(("gain", "bias")) for n, _ in ours.named_parameters())


@torch.no_grad()
def test_unquantised_rows_go_in_as_they_are(base, run):
    ours = trained_control(base, run, "ours-no-fp8")
    ours.held("rows", "span").normal_(generator=torch.Generator().manual_seed(0)).mul_(0.05)
    rows = fired(base, ours)
    spans = Spans.of((row, start, length, 0) for row, _, start, length in rows.spans)
    masters = ours.held("rows", "span")[0, 0]
    expected = apply_concept(rows.states, spans, masters, torch.ones(4), torch.zeros(4), rho=ours.options.rho)
    assert torch.equal(ours.states(base, rows), expected)
    assert ours.values(0)["span.rows"].dtype == torch.float16


def test_trainable_projections_start_as_the_fixed_ones_and_learn(base, run, taught):
    fixed = Ours(base, [run("ours", name, mounts="span+value") for name in ("disc", "spot")])
    free = TrainableBasis(base, [run("ours-trainable-basis", name, mounts="span+value") for name in ("disc", "spot")])
    with torch.no_grad():
        for kind in ("span", "value"):
            fixed.held("rows", kind).normal_(generator=torch.Generator().manual_seed(1)).mul_(0.2)
            free.held("rows", kind).copy_(fixed.held("rows", kind))
        words = [(base.subject(name).trigger,) for name in ("disc", "spot")]
        rows = base.rows(["a {0}", "flat {0}"], words, torch.tensor([[0], [1]]))
        torch.testing.assert_close(free.states(base, rows), fixed.states(base, rows), rtol=1e-5, atol=1e-5)
    learned = [p for name, p in free.named_parameters() if name.endswith("_basis")]
    start = [p.detach().clone() for p in learned]
    teach(base, free, [taught["disc"], taught["spot"]], steps=1, batch_size=1)
    assert len(learned) == 2
    for now, then in zip(learned, start, strict=True):
        assert ((now - then).flatten(1) != 0).float().mean() > 0.9
    assert free.payload(0) == fixed.payload(0) + 2 * 128 * 128 * 2
    with pytest.raises(ValueError, match="projections"):
        free.concept(base, 0)


def test_gates_alone_learn(base, run, taught):
    ours = GatesOnly(base, [run("ours-gates-only", name) for name in ("disc", "spot")])
    before = rows_of(ours).clone()
    torch.testing.assert_close(before.flatten(3).norm(dim=-1), torch.ones(2, 7, 4))
    teach(base, ours, [taught["disc"], taught["spot"]], steps=1, batch_size=1)
    assert torch.equal(rows_of(ours), before)
    assert ours.trainable() == 14 * 4 * 2
    assert (ours.held("bias", "value") != 0).all()
    anchored = GatesOnly(base, [run("ours-gates-only", init="class")])
    assert torch.equal(rows_of(anchored), rows_of(Ours(base, [run("ours", init="class")])))


@torch.no_grad()
def test_off_is_the_base(base, stack):
    rows = fired(base, stack)
    off = DRAWN["ours-off"](stack)
    latents, at = torch.ones(1, *base.latent_shape), torch.tensor([500])
    assert off.states(base, rows) is rows.states
    with off.attached(base, rows, rows.states):
        drawn = base.denoiser(latents, at, rows.states)[0]
    bare = base.denoiser(latents, at, rows.states)[0]
    assert torch.equal(drawn, bare)
    with stack.attached(base, rows, rows.states):
        assert not torch.equal(base.denoiser(latents, at, rows.states)[0], bare)


def test_donor_rows_come_from_another_subject(stack):
    before = {name: p.detach().clone() for name, p in stack.named_parameters()}
    donor = DRAWN["ours-donor"](stack)
    assert torch.equal(rows_of(donor), rows_of(stack)[[2, 2, 0]])
    assert torch.equal(donor.held("gain", "value"), stack.held("gain", "value"))
    assert all(torch.equal(p, before[name]) for name, p in stack.named_parameters())


def test_donor_needs_another_subject(base, run):
    with pytest.raises(ValueError, match="two subjects"):
        DRAWN["ours-donor"](Ours(base, [run("ours", seed=seed) for seed in (0, 1)]))


def test_shuffled_rows_are_the_same_rows_elsewhere(stack):
    shuffled = DRAWN["ours-shuffled"](stack)
    old, new = (rows_of(x)[1].flatten(0, 2) for x in (stack, shuffled))
    assert not torch.equal(old, new)
    order, again = (sorted(map(tuple, x.tolist())) for x in (old, new))
    assert order == again


def test_random_rows_keep_their_norms(stack):
    old, new = rows_of(stack), rows_of(DRAWN["ours-random"](stack))
    torch.testing.assert_close(old.norm(dim=-1), new.norm(dim=-1))
    cosine = torch.nn.functional.cosine_similarity(old, new, dim=-1)
    assert cosine.abs().mean() < 0.3


def test_locked_keys_are_shuffled_too(base, run):
    ours = Ours(base, [run("ours", key_lock=True)])
    assert not torch.equal(rows_of(DRAWN["ours-random"](ours), "key"), rows_of(ours, "key"))
