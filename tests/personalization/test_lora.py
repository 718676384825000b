"""The batched LoRA against peft's, set up as diffusers' scripts do, and against diffusers' loader."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

from benchmarks.personalization.bases import EMOJI_SD
from benchmarks.personalization.draw import draw
from benchmarks.personalization.methods import METHODS, RATES
from benchmarks.personalization.methods.lora import LoraBoth8, LoraUnet8
from benchmarks.personalization.teach import teach

SIZES = {"lora-unet-r4": 66_304, "lora-unet-r8": 132_608, "lora-text-r4": 16_384, "lora-text-r8": 32_768, "lora-both-r8": 165_376}


def config(part: str, rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=list(EMOJI_SD.adapted[part]))


def with_peft(pipe, adapters, index: int) -> list[torch.nn.Parameter]:
    """Real peft adapters in the parts of `pipe`, holding the values of one run; the parameters to train."""
    values = adapters.values(index)
    trained = []
    for part in adapters.parts:
        attribute = adapters.prefixes[part]
        module = getattr(pipe, attribute)
        inject_adapter_in_model(config(part, adapters.rank), module)
        mine = {name.removeprefix(f"{attribute}."): value for name, value in values.items() if name.startswith(f"{attribute}.")}
        theirs = get_peft_model_state_dict(module, adapter_name="default")
        assert {k: v.shape for k, v in mine.items()} == {k: v.shape for k, v in theirs.items()}
        set_peft_model_state_dict(module, {name: value.float() for name, value in mine.items()}, adapter_name="default")
        trained += [p for p in module.parameters() if p.requires_grad]
    return trained


def settle(adapters) -> None:
    """Give every factor a value that float16 holds, B too, so that files and modules say the same."""
    with torch.no_grad():
        noise = torch.randn(adapters.factors.shape, generator=torch.Generator().manual_seed(1)) * 0.1
        adapters.factors.copy_((adapters.factors + noise).half().float())


@pytest.mark.parametrize("name", SIZES)
def test_sizes(base, run, name):
    adapters = METHODS[name](base, [run(name)])
    assert adapters.trainable() == SIZES[name] and adapters.payload(0) == 2 * SIZES[name]


def test_starts_like_peft(base, run):
    adapters = LoraBoth8(base, [run("lora-both-r8", "disc"), run("lora-both-r8", "spot"), run("lora-both-r8", seed=1)])
    first, second, other = (adapters.values(i) for i in range(3))
    for name, value in first.items():
        assert torch.equal(value, second[name])
        if ".lora_B." in name:
            assert not value.any()
        else:
            assert not torch.equal(value, other[name])
    drawn = torch.cat([value.flatten().float() for name, value in first.items() if ".lora_A." in name])
    assert drawn.std().item() == pytest.approx(1 / 8, rel=0.01) and abs(drawn.mean().item()) < 1e-3


def test_training_equals_peft_run_by_run(base, taught, run, own_pipe, plain_batch):
    name = "lora-both-r8"
    runs = [run(name, "disc", factor=10), run(name, "spot", seed=2)]
    adapters = LoraBoth8(base, runs)
    settle(adapters)
    trained = with_peft(own_pipe, adapters, 1)
    losses = teach(base, adapters, [taught["disc"], taught["spot"]], steps=2, batch_size=1)
    adam = torch.optim.AdamW(trained, lr=RATES[name], weight_decay=1e-2)
    starts = [p.detach().clone() for p in trained]
    for step in range(2):
        texts, loss_of = plain_batch(taught["spot"], 2, step, 1)
        loss = loss_of(own_pipe.unet, own_pipe.text_encoder(base.tokenize(texts)[0])[0])
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adam.step()
        torch.testing.assert_close(losses[1, step], loss.detach(), rtol=1e-4, atol=1e-6)
    moved = [p.detach() - start for p, start in zip(trained, starts, strict=True)]
    mine = []
    pieces = adapters.factors[1].detach().split([size for t in adapters.targets for size in t.sizes(8)])
    for part in adapters.parts:
        flat = {}
        for target, down, up in zip(adapters.targets, pieces[::2], pieces[1::2], strict=True):
            if target.part == part:
                flat[f"{target.name}.lora_A.default.weight"] = down.view(-1, 8).T
                flat[f"{target.name}.lora_B.default.weight"] = up.view(8, -1).T
        mine += [flat[n] for n, p in getattr(own_pipe, adapters.prefixes[part]).named_parameters() if p.requires_grad]
    difference = torch.cat([(m - p.detach()).flatten() for m, p in zip(mine, trained, strict=True)])
    length = torch.cat([m.flatten() for m in moved])
    assert difference.norm() < 0.01 * length.norm() and length.abs().median() > RATES[name]


@pytest.mark.parametrize("name", ["lora-unet-r4", "lora-text-r8"])
def test_files_load_in_diffusers_and_draw_the_same(base, run, own_pipe, name):
    adapters = METHODS[name](base, [run(name, "disc"), run(name, "spot", seed=1)])
    settle(adapters)
    texts, words = ["a 3d {0} on red", "a flat {0}"], [("rugo-bin",), ("vex-lumo",)]
    drawn = draw(base, adapters, base.rows(texts, words, torch.tensor([[0], [1]])), [3, 3], steps=2)
    own_pipe.load_lora_weights(adapters.values(1))
    generator = torch.Generator().manual_seed(3)
    image = own_pipe("a flat vex-lumo", num_inference_steps=2, guidance_scale=4.0, generator=generator, output_type="np").images[0]
    assert abs(drawn[1] / 255 - image).max() < 2 / 255
    bare = draw(base, None, base.rows(texts[1:], words[1:], torch.tensor([[-1]])), [3], steps=2)
    assert abs(bare[0] / 255 - image).max() > 20 / 255


def test_two_subjects_add_up_and_none_is_none(base, run):
    adapters = LoraUnet8(base, [run("lora-unet-r8", "disc"), run("lora-unet-r8", "spot", seed=1)])
    settle(adapters)
    words = [("rugo-bin", "vex-lumo")] * 4
    rows = base.rows(["{0} and {1}"] * 4, words, torch.tensor([[0, 1], [1, 0], [0, -1], [-1, -1]]))
    latents = torch.randn(1, *base.latent_shape, generator=torch.Generator().manual_seed(0)).expand(4, -1, -1, -1)
    module = base.denoiser.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn2.to_k")
    seen = {}
    hook = module.register_forward_hook(lambda m, args, out: seen.update(x=args[0], plain=out))  # runs before the method's own
    read = module.register_forward_hook
    try:
        with torch.no_grad(), adapters.attached(base, rows, rows.states):
            last = read(lambda m, args, out: seen.update(out=out))
            base.denoiser(latents, torch.tensor([400]), rows.states)
            last.remove()
    finally:
        hook.remove()
    name = "unet.mid_block.attentions.0.transformer_blocks.0.attn2.to_k"
    values = [adapters.values(i) for i in range(2)]
    one, two = (seen["x"][0] @ v[f"{name}.lora_A.weight"].float().T @ v[f"{name}.lora_B.weight"].float().T for v in values)
    added = seen["out"] - seen["plain"]
    torch.testing.assert_close(added[0], one + two, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(added[1], one + two, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(added[2], one, rtol=1e-4, atol=1e-4)
    assert not added[3].any()


def test_a_run_that_diverged_reaches_no_other_row(base, run):
    adapters = LoraBoth8(base, [run("lora-both-r8", "disc"), run("lora-both-r8", "spot")])
    with torch.no_grad():
        adapters.factors[0] = float("nan")
    rows = base.rows(["a {0}"] * 3, [("rugo-bin",)] * 3, torch.tensor([[0], [1], [-1]]))
    states = adapters.states(base, rows)
    assert states[0].isnan().any() and states[1:].isfinite().all()
    states[1].sum().backward()
    assert adapters.factors.grad is not None and adapters.factors.grad[1].isfinite().all() and adapters.factors.grad[1].any()
