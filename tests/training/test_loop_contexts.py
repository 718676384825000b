"""Teaching concepts with context mounts: what moves, what is shipped, and that the denoiser really reads what is taught."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import tiny_engram
from tiny_engram.checkpoints import load_checkpoint
from tiny_engram.concept import Concept
from tiny_engram.config import ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.hooks import MountError
from tiny_engram.run_setup import frozen
from tiny_engram.training import loop, objective, train
from tiny_engram.training.data import scan_folder
from tiny_engram.training.prepared import prepare
from tiny_engram.training.rows import ConceptRows

BOTH = ("span", "context")
PROMPTS = ("a {trigger}", "the {trigger} by night")


def teach(pipe, config, **options):
    return train(pipe, config, progress=False, **options)


def no_hooks(pipe) -> bool:
    return not any(m._forward_pre_hooks or m._forward_hooks for m in pipe.unet.modules())


@pytest.mark.parametrize("mounts", [BOTH, ("value",)], ids=["span and context", "values"])
def test_rows_of_every_mount_are_taught_and_the_base_is_not(pipe, config, tmp_path, mounts):
    before = {name: p.clone() for name, p in pipe.unet.state_dict().items()}
    result = teach(pipe, config(mounts=mounts, context_rho=0.5))
    tensors, state = load_checkpoint(tmp_path / "out" / "checkpoint-4")
    names = tuple(result.concept.roles["clip_l"].mounts)
    assert len(names) == {2: 9, 1: 4}[len(mounts)] == len(tensors["master.rows"]) == len(tensors["master.gain"])
    assert all(rows.ne(0).float().mean() > 0.9 for rows in tensors["master.rows"]) and tensors["master.bias"].ne(0).all()
    assert all(torch.equal(p, before[name]) for name, p in pipe.unet.state_dict().items())
    assert all(p.grad is None for p in pipe.unet.parameters()) and no_hooks(pipe)
    saved = Concept.load(result.path)
    assert saved.recipe["mounts"] == list(mounts) == state["config"]["mounts"]
    assert [rows.rho for rows in saved.roles["clip_l"].mounts.values()] == [1.0 if name == "span" else 0.5 for name in names]
    for k, name in enumerate(names):
        assert torch.equal(saved.mount_rows("clip_l", name).gain, tensors["average.gain"][k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_denoiser_says_in_training_what_it_says_when_served(tiny, pipe, config, dtype, tmp_path):
    """Bit for bit: the saved file in a pipeline against the module in the loop's own forward pass."""
    pipe = pipe if dtype == torch.float32 else tiny.build(dtype=dtype)
    options = config(mounts=BOTH, context_rho=0.8)
    adapter = tiny_engram.attach(pipe)
    start = adapter.new_concept("zqx", config=ConceptConfig(mounts=BOTH, rho=1.0, context_rho=0.8))
    module = ConceptRows(start, "clip_l", adapter.contexts["clip_l"].layout)
    with torch.no_grad():
        for k, parameter in enumerate(module.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k)) * 0.3)
    examples = scan_folder(options.train_data_dir, ("zqx",), templates=("a {trigger} and a {trigger} by night",)).examples
    data = prepare(pipe, adapter, start, options, examples)
    draws = [objective.draw(0, 0, sample, 2) for sample in range(2)]
    said: list[tuple] = []
    handle = pipe.unet.register_forward_hook(lambda module, args, output: said.append((args, output[0])))
    contexts = adapter.contexts["clip_l"]
    with frozen(pipe.unet), contexts.held():
        loop.denoising_loss(pipe, module, contexts, data, draws, options).backward()
    handle.remove()
    assert all(p.grad is not None and p.grad.flatten(1).ne(0).any(1).all() for p in module.parameters())
    made = start
    for k, mount in enumerate(module.mounts):
        made = made.with_rows("clip_l", module.rows[k], module.gain[k], module.bias[k], mount=mount)
    adapter.load_concept(made.save(tmp_path / "c.safetensors"))
    (noisy, timesteps, _), trained = said[0]
    served, _ = adapter.encode(["a zqx and a zqx by night"] * 2)
    with torch.no_grad():
        output = pipe.unet(noisy, timesteps, served).sample
        adapter.disable_concepts()
        plain = pipe.unet(noisy, timesteps, adapter.encode(["a zqx and a zqx by night"] * 2)[0]).sample
    adapter.detach()
    assert torch.equal(trained.detach(), output) and not torch.equal(plain, output) and no_hooks(pipe)


def test_what_was_validated_is_what_is_shipped(tiny, pipe, config, as_validated, tmp_path):
    result = teach(pipe, config(mounts=BOTH, validation_steps=4, validation_prompts=PROMPTS, validation_seeds=(3,)))
    sheet = np.asarray(Image.open(tmp_path / "out" / "validation" / "step-4.png"))
    fresh = tiny.build()
    adapter = tiny_engram.attach(fresh)
    adapter.load_concept(result.path)
    assert np.array_equal(as_validated(fresh, [p.replace("{trigger}", "zqx") for p in PROMPTS]), sheet)


def test_two_steps_and_two_more_beside_another_concept(tiny, pipe, config, tmp_path):
    def stop(done: int, loss: float) -> None:
        if done == 2:
            raise KeyboardInterrupt

    whole = teach(pipe, config(mounts=BOTH, output_dir=str(tmp_path / "whole")))
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, "bolo", config=ConceptConfig(mounts=("context",))))
    try:
        parts = config(mounts=BOTH, validation_steps=1, validation_prompts=PROMPTS)
        with pytest.raises(KeyboardInterrupt):
            teach(pipe, parts, on_step=stop)
        with pytest.raises(TinyEngramError, match=r"its mounts is \['span', 'context'\], expected \['span'\]"):
            teach(pipe, config(resume_from_checkpoint="latest"))
        resumed = teach(pipe, config(mounts=BOTH, resume_from_checkpoint="latest"))
        assert adapter.get_active_concepts() == ["bolo"] and adapter.contexts["clip_l"].hooks
    finally:
        adapter.detach()
    one, two = load_file(whole.path), load_file(resumed.path)
    assert resumed.losses == whole.losses and set(one) == set(two)
    assert all(torch.equal(one[k].view(torch.uint8), two[k].view(torch.uint8)) for k in one)


def test_gradient_checkpoints_read_the_same(tiny, config, tmp_path):
    pipe = tiny.build()
    plain = teach(pipe, config(mounts=("context",), max_train_steps=2))
    pipe.unet.enable_gradient_checkpointing()
    runs: list[int] = []
    projection = pipe.unet.down_blocks[1].attentions[0].transformer_blocks[0].attn2.to_k
    projection.register_forward_pre_hook(lambda module, args: runs.append(len(args[0])))
    kept = teach(pipe, config(mounts=("context",), max_train_steps=2, output_dir=str(tmp_path / "kept")))
    assert runs.count(2) == 4  # each of two steps runs it again in the backward pass
    assert kept.losses == pytest.approx(plain.losses, rel=1e-5)
    a, b = (load_checkpoint(p.path.parent / "checkpoint-2")[0]["master.rows"] for p in (plain, kept))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_denoiser_that_reads_something_else_is_told(tiny, config, tmp_path):
    pipe = tiny.build()
    handle = pipe.unet.register_forward_pre_hook(lambda module, args: (*args[:2], args[2] * 1.0))
    with pytest.raises(MountError, match="UNet2DConditionModel reads other text states than training gave it"):
        teach(pipe, config(mounts=("context",)))
    handle.remove()
    pipe.fuse_qkv_projections(vae=False)
    with pytest.raises(MountError, match="ran without reading through context.0.key, "):
        teach(pipe, config(mounts=("context",)))
    pipe.unfuse_qkv_projections(vae=False)
    with pytest.raises(TinyEngramError, match="mount 'nowhere' is unknown at clip_l"):
        teach(pipe, config(mounts=("span", "nowhere")))
    assert no_hooks(pipe) and not (tmp_path / "out" / "concept.safetensors").exists()


def test_mixed_precision(pipe, config, tmp_path, fresh_accelerate):
    result = teach(pipe, config(mounts=BOTH, mixed_precision="bf16"))
    rows = load_checkpoint(tmp_path / "out" / "checkpoint-4")[0]["master.rows"]
    assert rows.dtype == torch.float32 and all(at.ne(0).any() for at in rows) and np.isfinite(result.losses).all()


def test_the_command_line_takes_mounts(saved_pipe, folder, tmp_path, capsys):
    from tiny_engram.cli import main

    out = tmp_path / "cli"
    options = ["--max_train_steps", "1", "--train_batch_size", "1", "--report_to", "none", "--caption_template", "a {trigger}"]
    begin = ["train", "--model", str(saved_pipe), "--train_data_dir", str(folder), "--trigger", "zqx", "--output_dir", str(out)]
    options += ["--share", "none", "--bands", "1", "--attention_rank", "0", "--feedforward_rank", "0", "--collages", "0"]
    assert main([*begin, *options, "--mounts", "span", "value", "--context_rho", "0.5"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(out / "concept.safetensors"), "--json"]) == 0
    mounts = json.loads(capsys.readouterr().out)["roles"]["clip_l"]["mounts"]
    assert list(mounts) == ["span", *(f"context.{i}.value" for i in range(4))] and mounts["context.1.value"]["rho"] == 0.5
    assert main(["inspect", str(out / "concept.safetensors")]) == 0
    assert "  clip_l, span, 4 values: 40 rows over 2 positions, width 128, 1,400 bytes\n" in capsys.readouterr().out
    assert main([*begin, *options, "--mounts", "keys"]) == 2
    assert "mount 'keys' is unknown at clip_l; expected a group (context, key, value, deep) or one of: span, " in capsys.readouterr().err
