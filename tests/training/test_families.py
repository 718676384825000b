"""Teaching on every family that can be taught: what a step reads is what is served, every role's rows get gradients and are kept."""

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_engram
from tests.pipelines.conformance.cases import each_pipeline, family_named, teachable
from tests.pipelines.tiny.base import TinyPipeline
from tiny_engram.adapter import taught_families
from tiny_engram.checkpoints import load_checkpoint
from tiny_engram.concept import Concept
from tiny_engram.denoiser_call import _parameters
from tiny_engram.errors import TinyEngramError
from tiny_engram.run_setup import frozen
from tiny_engram.training import TrainConfig, loop, objective, train, trainer
from tiny_engram.training.data import scan_folder
from tiny_engram.training.prepared import prepare
from tiny_engram.training.role_rows import each_role

DEFAULT = ("stable-diffusion-2", "stable-diffusion-xl", "stable-diffusion-3", "flux:dev")
TEXT = "a photo of a zqx on a table, and the zqx"
MAPS = ("stable-diffusion-xl", "stable-diffusion-2")  # of those that are tried here


def taught(tiny: TinyPipeline) -> bool:
    """Those that test_loop and test_pixart do not teach at length."""
    return teachable(tiny) and tiny.name not in ("stable-diffusion-1", "pixart:alpha", "pixart:sigma")


@pytest.fixture
def tiny_case(request):
    return request.param


@pytest.fixture
def pipe(tiny_case):
    return tiny_case.build()


@pytest.fixture
def options(config, tiny_case):
    """Rows at everything that a step teaches."""
    rank = int(tiny_case.family in MAPS)
    whole: dict[str, Any] = {"mounts": ("input", "span", "key", "value"), "share": "block", "bands": 2, "context_rho": 0.8}
    if any(spec.pooled for spec in family_named(tiny_case).encoders):
        whole["mounts"] = ("pooled", *whole["mounts"])
    whole |= {"attention_rank": rank, "feedforward_rank": rank, "resolution": tiny_case.call["height"]}
    return lambda **changes: config(**{**whole, **changes})


def embeds_given(family: Any, call: dict[str, Any]) -> list[torch.Tensor]:
    given = family.given or {"encoder_hidden_states": "prompt_embeds"}
    values = [call[name] for name in (*given, "pooled_projections") if call.get(name) is not None]
    return [row.detach() for value in values for row in (value if isinstance(value, list) else [value])]


@each_pipeline(taught, default=DEFAULT)
def test_what_a_step_reads_is_what_is_served(tiny_case, pipe, options, tmp_path):
    check_step(tiny_case, pipe, options(timestep_shift=1.0), tmp_path)


@each_pipeline(teachable, default=("stable-diffusion-1", "pixart:sigma", "stable-diffusion-3", "flux:dev"))
def test_what_a_step_reads_inside_the_encoders_is_what_is_served(tiny_case, pipe, options, tmp_path):
    """Beside rows inside, those at the token embeddings, whose pass reads the others too."""
    more = {"timestep_shift": 1.0, "context_rho": None, "bands": 1, "attention_rank": 0, "feedforward_rank": 0}
    config = options(**more, mounts=("deep", "input", "span"))
    if tiny_case.family in ("stable-diffusion-xl", "stable-diffusion-3"):
        with pytest.raises(TinyEngramError, match="mount 'deep.1' of clip_[lg] moves the encoder's pooled vector too, .*use other mounts"):
            train(pipe, config, progress=False)
        return
    check_step(tiny_case, pipe, config, tmp_path, local=False)
    if tiny_case.family not in ("chroma", "hunyuandit"):
        again = check_step(tiny_case, tiny_case.build(), replace(config, gradient_checkpointing=True), tmp_path, local=False)
        for one, other in zip(check_step(tiny_case, tiny_case.build(), config, tmp_path, local=False), again, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def check_step(tiny_case: TinyPipeline, pipe: Any, config: TrainConfig, tmp_path: Path, *, local: bool = True) -> list[torch.Tensor]:
    """The states of a step are those of the concept that it makes, which gets gradients at all of its rows: these are returned."""
    family = family_named(tiny_case)
    adapter = tiny_engram.attach(pipe)
    start = trainer.untrained(adapter, config)
    module = trainer.masters_of(adapter, start, config)
    with torch.no_grad():
        for k, parameter in enumerate(module.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k)) * 0.3)
    examples = scan_folder(config.train_data_dir, ("zqx",), templates=(TEXT.replace("zqx", "{trigger}"),)).examples
    data = prepare(pipe, adapter, start, config, examples)
    draws = [objective.draw(0, 0, sample, 2) for sample in range(2)]  # one in each band
    denoiser = getattr(pipe, family.denoiser)
    seen: list[tuple[dict[str, Any], Any]] = []

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.append((dict(zip(_parameters(type(module)), args, strict=False)) | kwargs, output[0]))

    handle = denoiser.register_forward_hook(hook, with_kwargs=True)
    with frozen(denoiser, *(mount.module for mount in adapter.mounts.values())), ExitStack() as held:
        for contexts in adapter.contexts.values():
            held.enter_context(contexts.held())
        loop.denoising_loss(pipe, module, adapter.contexts, data, draws, config).backward()
    assert {role for role in start.roles} == set(adapter.mounts)
    for one in each_role(module):
        for name, p in one.named_parameters():
            assert p.grad is not None and p.grad.isfinite().all() and p.grad.ne(0).any(), name
        assert one.rows.grad is not None and one.rows.grad.flatten(1).ne(0).any(1).all()
    values = {name: p.detach() for name, p in module.named_parameters()}
    adapter.load_concept(module.concept(start, next(iter(start.roles)), values).save(tmp_path / "c.safetensors"))
    (given, trained), *_ = seen
    seen.clear()

    @torch.no_grad()
    def said() -> list[torch.Tensor]:
        embeds = family.embeds(pipe, [TEXT] * 2)
        names = {parameter: embeds[name] for parameter, name in (family.given or {"encoder_hidden_states": "prompt_embeds"}).items()}
        if "pooled_projections" in given and given["pooled_projections"] is not None:
            names["pooled_projections"] = embeds["pooled_prompt_embeds"]
        call = {**given, **names}
        denoiser(**call)
        return embeds_given(family, call)

    mine, served = embeds_given(family, given), said()
    adapter.disable_concepts()
    plain = said()
    adapter.detach()
    handle.remove()
    pooled = any(spec.pooled for spec in family.encoders)
    for one, other, without in zip(mine, served, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        states = one.dim() == 3 or tiny_case.family == "z-image"
        # vectors that are pooled behind states are the base's, served and taught
        assert not states and not pooled and torch.equal(other, without) or (other - without).abs().max() > 1e-2
        if states and local:
            assert (one == without).all(-1).any()  # all that is not the trigger's keeps its bits
    (_, output), (_, without) = seen
    stack = torch.stack if isinstance(output, list) else lambda x: x
    trained, output, without = (stack(x).detach() for x in (trained, output, without))
    torch.testing.assert_close(trained, output, rtol=1e-4, atol=1e-4)
    assert 20 * (trained - output).norm() < (output - without).norm()
    return [p.grad for p in module.parameters() if p.grad is not None]


@each_pipeline(taught, default=DEFAULT)
def test_a_run_lowers_the_loss_and_is_taken_up_exactly(tiny_case, pipe, options, tmp_path):
    more = {"max_train_steps": 18, "train_batch_size": 4, "rho": 4.0, "context_rho": 4.0, "mounts": ("input", "value"), "bands": 1}
    more |= {"validation_loss_steps": 6, "validation_loss_samples": 4, "gate_learning_rate": 5e-2, "learning_rate": 5e-2}
    before = {name: p.clone() for name, p in getattr(pipe, family_named(tiny_case).denoiser).state_dict().items()}
    whole = train(pipe, options(**more, output_dir=str(tmp_path / "whole")), progress=False)
    assert all(torch.equal(p, before[name]) for name, p in getattr(pipe, family_named(tiny_case).denoiser).state_dict().items())
    made = Concept.load(whole.path)
    assert all(at.rows().ne(0).any() for role in made.roles.values() for at in role.mounts.values())
    names, state = load_checkpoint(tmp_path / "whole" / "checkpoint-18")
    (_, first), *_, (_, last) = state["measured"]
    assert last < first
    masters = {name.removeprefix("master.") for name in names if name.startswith("master.")}
    assert masters >= ({"rows", "gain", "bias"} if len(made.roles) == 1 else {f"{role}.rows" for role in made.roles})

    def stop(done: int, loss: float) -> None:
        if done == 2:
            raise KeyboardInterrupt

    own = {**more, "max_train_steps": 4, "validation_loss_steps": 0, "validation_loss_samples": 32, "lr_scheduler": "constant"}
    four = train(pipe, options(**own, output_dir=str(tmp_path / "four")), progress=False)
    with pytest.raises(KeyboardInterrupt):
        train(pipe, options(**own), progress=False, on_step=stop)
    resumed = train(pipe, options(**own, resume_from_checkpoint="latest"), progress=False)
    assert resumed.losses == four.losses
    one, two = (load_checkpoint(run.path.parent / "checkpoint-4")[0] for run in (four, resumed))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@each_pipeline(taught, default=("stable-diffusion-3",))
def test_blocks_that_are_computed_again_read_the_same(tiny_case, pipe, options, tmp_path):
    more = {"max_train_steps": 2, "timestep_shift": 1.0}
    if tiny_case.family in ("chroma", "hunyuandit"):
        with pytest.raises(TinyEngramError, match="gradient_checkpointing is True, but .*; leave it out"):
            train(pipe, options(gradient_checkpointing=True, **more), progress=False)
        return
    plain = train(pipe, options(**more), progress=False)
    again = train(pipe, options(gradient_checkpointing=True, **more, output_dir=str(tmp_path / "again")), progress=False)
    assert again.losses == pytest.approx(plain.losses, rel=1e-4)
    one, two = (load_checkpoint(run.path.parent / "checkpoint-2")[0] for run in (plain, again))
    for name in (name for name in one if name.endswith("exp_avg")):
        torch.testing.assert_close(two[name], one[name], rtol=1e-2, atol=1e-2 * float(one[name].abs().max()))


@each_pipeline(lambda tiny: family_named(tiny).predicts is None, default=("cogvideox",))
def test_families_that_cannot_be_taught_say_why_and_which_can(tiny_case, pipe, config):
    with pytest.raises(TinyEngramError) as told:
        train(pipe, config(), progress=False)
    family, line = family_named(tiny_case), str(told.value)
    assert family.untaught in line and "stable-diffusion-xl, stable-diffusion-3, flux-1, chroma" in line
    assert not any(f", {other}," in line for other in ("wan", "ltx-video", "cogvideox"))


def test_the_guide_names_the_families_that_can_be_taught(repo_root):
    page = (repo_root / "docs" / "pipelines.md").read_text()
    rows = page.split("<!-- taught -->")[1].split("<!-- /taught -->")[0]
    assert re.findall(r"^\| `([\w.-]+)`", rows, re.MULTILINE) == taught_families()
