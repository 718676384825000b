"""Training of many runs at once, against `tiny_engram train` and against each run alone."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks.personalization.base import Base, Taught
from benchmarks.personalization.methods import METHODS
from benchmarks.personalization.methods.method import Adapters
from benchmarks.personalization.priors import Extra, half_masks
from benchmarks.personalization.runs import Run
from benchmarks.personalization.teach import teach
from tiny_engram.quantization import fake_quantize
from tiny_engram.residual import Spans, apply_spans
from tiny_engram.training import TrainConfig, train


class SpanRows(Adapters):
    """The product's concept at the encoder's output alone, with its optimiser's settings."""

    betas, schedule, warmup, ema_decay = (0.9, 0.99), "cosine", 2, 0.98

    def __init__(self, base, runs):
        super().__init__(base, runs)
        self.rows = nn.Parameter(torch.zeros(len(runs), 4, 4, 32))
        self.gain = nn.Parameter(torch.ones(len(runs), 4))
        self.bias = nn.Parameter(torch.zeros(len(runs), 4))

    def states(self, base, rows):
        at = rows.positions()
        spans = Spans.of((row, start, length, 0) for row, _, start, length in rows.spans)
        stored = fake_quantize(self.rows)[at.run, at.offset]
        scale = torch.full((len(at.run),), 1.5)
        return apply_spans(rows.states, spans, stored, self.gain[at.run, at.offset], self.bias[at.run, at.offset], scale, basis_seed=0)


def bits(module: nn.Module) -> list[torch.Tensor]:
    return [t.clone() for t in module.state_dict().values()]


@pytest.fixture
def inversions(base, run):
    """Three textual inversions that share nothing but the method."""

    def make(*which: int):
        runs = [run("inversion-t", "disc"), run("inversion-t", "spot", seed=1, factor=10), run("inversion-t", "dot", factor=0.1)]
        return METHODS["inversion-t"](base, [runs[i] for i in which])

    return make


def test_losses_are_those_of_the_product(base, shown, tmp_path):
    lines = []
    for i, picture in enumerate(shown):
        Image.fromarray(picture.image).save(tmp_path / f"{i}.png")
        lines += [{"file_name": f"{i}.png", "text": text.replace("{0}", "{trigger}")} for text in picture.captions]
    (tmp_path / "metadata.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    settings: dict[str, Any] = {
        "train_batch_size": 2,
        "max_train_steps": 3,
        "learning_rate": 2e-2,
        "gate_learning_rate": 2e-2,
        "lr_warmup_steps": 2,
    }
    settings |= {"mounts": ("span",), "attention_rank": 0, "feedforward_rank": 0, "collages": 0}
    settings |= {"lr_scheduler": "cosine", "adam_beta2": 0.99}
    config = TrainConfig(
        train_data_dir=str(tmp_path), trigger="rugo-bin", output_dir=str(tmp_path / "out"), rho=1.5, seed=7, report_to="none", **settings
    )
    theirs = train(base.pipe, config, progress=False)
    adapters = SpanRows(base, [Run(method="span", subject="disc", seed=7, learning_rate=2e-2)])
    losses = teach(base, adapters, [Taught.of(base, base.subject("disc"), shown)], steps=3, batch_size=2)
    assert losses.shape == (1, 3)
    torch.testing.assert_close(losses[0], torch.tensor(theirs.losses), rtol=1e-4, atol=1e-6)
    # what would be saved, the running average: of the gates, since rows are rounded to 8 bits in the file
    mount = theirs.concept.mount_rows("clip_l")
    torch.testing.assert_close(adapters.gain[0].detach(), mount.gain, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(adapters.bias[0].detach(), mount.bias, rtol=1e-3, atol=1e-4)
    assert (mount.gain - 1).abs().max() > 1e-3


def test_runs_side_by_side_are_each_run_alone(base, taught, inversions):
    alone = inversions(1)
    mine = teach(base, alone, [taught["spot"]], steps=2, batch_size=2)
    # two runs in a pass and then one, all three
    for limit in (4, 64):
        stacked = inversions(0, 1, 2)
        start = stacked.embeddings.detach().clone()
        losses = teach(base, stacked, [taught["disc"], taught["spot"], taught["dot"]], steps=2, batch_size=2, limit=limit)
        torch.testing.assert_close(losses[1:2], mine, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(stacked.embeddings[1], alone.embeddings[0], rtol=1e-4, atol=1e-5)
        # rates of 1, 10 and 0.1 times the default
        moved = (stacked.embeddings.detach() - start).abs().amax((1, 2))
        assert moved[1] > 5 * moved[0] > 25 * moved[2] > 0


@pytest.mark.parametrize("name", ["inversion-t", "lora-both-r8", "after-v-engram", "ours", "ours-trainable-basis"])
def test_a_run_that_diverged_stays_alone(base, taught, run, name):
    adapters = METHODS[name](base, [run(name, "disc"), run(name, "spot")])
    with torch.no_grad():
        for p in adapters.parameters():
            p[0] = torch.nan
    losses = teach(base, adapters, [taught["disc"], taught["spot"]], steps=2, batch_size=1)
    assert losses[0].isnan().all() and all(p[0].isnan().any() for p in adapters.parameters())
    assert losses[1].isfinite().all() and all(p[1].isfinite().all() for p in adapters.parameters())


def test_equal_seeds_draw_alike_and_others_do_not(base, taught, run):
    runs = [run("inversion-t", "disc", seed=seed, factor=factor) for seed, factor in ((0, 1), (0, 10), (1, 1))]
    losses = teach(base, METHODS["inversion-t"](base, runs), [taught["disc"]] * 3, steps=2, batch_size=1)
    torch.testing.assert_close(losses[0, 0], losses[1, 0])
    assert abs(losses[0, 1] - losses[1, 1]) > 1e-6 and abs(losses[0, 0] - losses[2, 0]) > 1e-4


def test_checkpoints_show_what_would_be_saved_and_leave_no_trace(base, taught, inversions):
    plain, watched = inversions(0), inversions(0)
    watched.ema_decay = plain.ema_decay = 0.9
    seen = {}
    done = []

    def on_checkpoint(step):
        seen[step] = watched.embeddings.detach().clone()
        torch.rand(3)

    one = teach(base, plain, [taught["disc"]], steps=3, batch_size=1)
    two = teach(base, watched, [taught["disc"]], steps=3, batch_size=1, at=(1, 3), on_checkpoint=on_checkpoint, on_step=done.append)
    assert torch.equal(one, two) and torch.equal(plain.embeddings, watched.embeddings)
    assert list(seen) == [1, 3] and done == [1, 2, 3]
    assert torch.equal(seen[3], watched.embeddings) and not torch.equal(seen[1], seen[3])


def test_the_base_keeps_its_bits(base, taught, run):
    parts = (base.denoiser, base.text_encoder, base.vae)
    before = [bits(part) for part in parts]
    for method in ("lora-both-r8", "inversion-1", "full"):
        teach(base, METHODS[method](base, [run(method)]), [taught["disc"]], steps=1, batch_size=1)
    for part, old in zip(parts, before, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(bits(part), old, strict=True))
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in part.modules())
        weights = [p for module in part.modules() for p in module._parameters.values() if p is not None]
        assert all(isinstance(p, nn.Parameter) and not p.requires_grad for p in weights)


def test_low_precision_stays_near(base, taught, inversions):
    exact = teach(base, inversions(0), [taught["disc"]], steps=1, batch_size=2)
    rough = teach(base, inversions(0), [taught["disc"]], steps=1, batch_size=2, autocast=torch.bfloat16)
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(exact, rough, rtol=5e-2, atol=0)


def test_mismatches_are_refused(base, taught, inversions, run):
    with pytest.raises(ValueError, match="3 runs, 1 subjects"):
        teach(base, inversions(0, 1, 2), [taught["disc"]], steps=1)
    with pytest.raises(ValueError, match="a run of 'disc' was given the pictures of 'dot'"):
        teach(base, inversions(0), [taught["dot"]], steps=1)
    with pytest.raises(ValueError, match="one run at a time, not 2"):
        METHODS["full"](base, [run("full"), run("full", seed=1)])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "options"),
    [("inversion-t", {}), ("lora-both-r8", {}), ("after-v-engram", {}), ("ours", {}), ("ours", {"prior": 4}), ("ours-trainable-basis", {})],
)
def test_a_step_on_a_gpu_waits_for_nothing_and_equals_the_cpu(base, subjects, taught, run, name, options):
    there = Base.load("cuda")
    there.subjects = subjects
    runs = [run(name, "disc", **options), run(name, "spot", seed=1, **options)]
    dots = taught["dot"]
    beside = Extra(dots.means[:2], dots.stds[:2], dots.captions[:2], half_masks(*dots.means.shape[-2:]))
    shown = [dataclasses.replace(taught[name], extras={"prior": beside}) for name in ("disc", "spot")]
    beside = Extra(beside.means.cuda(), beside.stds.cuda(), beside.captions, half_masks(*dots.means.shape[-2:]).cuda())
    moved = [dataclasses.replace(d, means=d.means.cuda(), stds=d.stds.cuda(), extras={"prior": beside}) for d in shown]

    def on_step(done: int) -> None:
        # the first step may allocate; what follows must not synchronise, or it raises
        torch.cuda.set_sync_debug_mode("error" if done < 4 else "default")

    try:
        losses = teach(there, METHODS[name](there, runs), moved, steps=4, batch_size=2, on_step=on_step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = teach(base, METHODS[name](base, runs), shown, steps=4, batch_size=2)
    torch.testing.assert_close(losses, wanted, rtol=1e-3, atol=1e-4)
