"""Teaching with everything a concept can have: rows on token embeddings, rows by block and band, maps, a start at a class word."""

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
from tiny_engram.run_setup import frozen
from tiny_engram.training import loop, objective, train, trainer
from tiny_engram.training.data import scan_folder
from tiny_engram.training.prepared import prepare

ROLE = "clip_l"
ALL = {
    "mounts": ("input", "span", "value"),
    "share": "block",
    "bands": 2,
    "attention_rank": 2,
    "feedforward_rank": 1,
    "class_word": "lamp",
    "context_rho": 0.8,
}
PROMPTS = ("a {trigger}", "the {trigger} by night")


def teach(pipe, config, **options):
    return train(pipe, config, progress=False, **options)


def no_hooks(pipe) -> bool:
    embedding = pipe.text_encoder.get_input_embeddings()
    return not (embedding._forward_hooks or any(m._forward_pre_hooks or m._forward_hooks for m in pipe.unet.modules()))


def test_everything_is_taught_and_the_base_is_not(pipe, config, tmp_path):
    before = {name: p.clone() for part in (pipe.unet, pipe.text_encoder) for name, p in part.state_dict().items()}
    result = teach(pipe, config(**ALL))
    assert all(torch.equal(p, before[name]) for part in (pipe.unet, pipe.text_encoder) for name, p in part.state_dict().items())
    assert all(p.grad is None for part in (pipe.unet, pipe.text_encoder) for p in part.parameters()) and no_hooks(pipe)
    place = Concept.load(result.path).roles[ROLE]
    blocks = [f"context.{block}.value.{band}of2" for block in ("down1", "mid", "up0") for band in (1, 2)]
    assert set(place.mounts) == {"input", "span", *blocks}
    assert set(place.maps) == {f"{site}.{i}" for site in ("attention", "feedforward") for i in range(4)}
    tensors, _ = load_checkpoint(tmp_path / "out" / "checkpoint-4")
    assert set(name for name in tensors if name.startswith("master.")) == {f"master.{n}" for n in ("rows", "gain", "bias", "maps")}
    assert all(rows.ne(0).float().mean() > 0.9 for rows in tensors["master.rows"]) and tensors["master.gain"].ne(1).all()
    assert all(at.factors()[1].ne(0).any() for at in place.maps.values())
    recipe = result.concept.recipe
    assert recipe["class_word"] == "lamp" and recipe["map_learning_rate"] == 5.6e-3 and recipe["mounts"] == list(ALL["mounts"])
    assert result.concept.config == ConceptConfig(**{k: v for k, v in ALL.items() if k != "class_word"}, rho=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_denoiser_says_in_training_what_it_says_when_served(tiny, pipe, config, dtype, tmp_path):
    pipe = pipe if dtype == torch.float32 else tiny.build(dtype=dtype)
    options = config(**ALL)
    adapter = tiny_engram.attach(pipe)
    start = trainer.untrained(adapter, options)
    module = trainer.masters_of(adapter, start, options)
    with torch.no_grad():
        for k, parameter in enumerate(module.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k)) * 0.3)
    text = "a zqx and a zqx by night"
    examples = scan_folder(options.train_data_dir, ("zqx",), templates=(text.replace("zqx", "{trigger}"),)).examples
    data = prepare(pipe, adapter, start, options, examples)
    draws = [objective.draw(0, 0, sample, 2) for sample in range(2)]  # one in each band
    said: list[tuple] = []
    handle = pipe.unet.register_forward_hook(lambda module, args, output: said.append((args, output[0])))
    contexts = adapter.contexts[ROLE]
    with frozen(pipe.unet, pipe.text_encoder), contexts.held():
        loop.denoising_loss(pipe, module, contexts, data, draws, options).backward()
    handle.remove()
    assert all(p.grad is not None and p.grad.flatten(1).ne(0).any(1).all() for p in module.parameters())
    values = {name: p.detach() for name, p in module.named_parameters()}
    adapter.load_concept(module.concept(start, ROLE, values).save(tmp_path / "c.safetensors"))
    (noisy, timesteps, states), trained = said[0]
    served, _ = adapter.encode([text] * 2)
    assert timesteps.tolist()[0] < 500 <= timesteps.tolist()[1]
    with torch.no_grad():
        output = pipe.unet(noisy, timesteps, served).sample
        adapter.disable_concepts()
        plain_states, _ = adapter.encode([text] * 2)
        plain = pipe.unet(noisy, timesteps, plain_states).sample
    adapter.detach()

    def far(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one.detach() - other).float().norm() / other.float().norm())

    most = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert far(states, served) < most and far(trained, output) < most
    assert far(plain, output) > 2 * most and far(plain_states, served) > 2 * most and no_hooks(pipe)
    fired = torch.zeros(2, 77, dtype=torch.bool).index_put(data.captions.batch([0, 0]).parts[ROLE].spans.flat()[:2], torch.tensor(True))
    assert torch.equal(states[~fired], plain_states[~fired])


def test_what_was_validated_is_what_is_shipped(tiny, pipe, config, as_validated, tmp_path):
    result = teach(pipe, config(**ALL, validation_steps=4, validation_prompts=PROMPTS, validation_seeds=(3,)))
    sheet = np.asarray(Image.open(tmp_path / "out" / "validation" / "step-4.png"))
    fresh = tiny.build()
    adapter = tiny_engram.attach(fresh)
    adapter.load_concept(result.path)
    assert np.array_equal(as_validated(fresh, [p.replace("{trigger}", "zqx") for p in PROMPTS]), sheet)


def test_two_steps_and_two_more_are_four(pipe, config, tmp_path):
    def stop(done: int, loss: float) -> None:
        if done == 2:
            raise KeyboardInterrupt

    whole = teach(pipe, config(**ALL, output_dir=str(tmp_path / "whole")))
    with pytest.raises(KeyboardInterrupt):
        teach(pipe, config(**ALL, validation_steps=1, validation_prompts=PROMPTS), on_step=stop)
    others = {"share": "none", "bands": 3, "attention_rank": 1, "feedforward_rank": 0}
    for field, value in others.items():
        with pytest.raises(TinyEngramError, match=f"its {field} is {ALL[field]!r}, expected {value!r}; resume with what it was made for"):
            teach(pipe, config(**{**ALL, field: value}, resume_from_checkpoint="latest"))
    resumed = teach(pipe, config(**ALL, resume_from_checkpoint="latest"))
    one, two = load_file(whole.path), load_file(resumed.path)
    assert resumed.losses == whole.losses and set(one) == set(two)
    assert all(torch.equal(one[k].view(torch.uint8), two[k].view(torch.uint8)) for k in one)


def test_a_checkpoint_from_before_these_mounts_is_taken_up(pipe, config, tmp_path):
    teach(pipe, config(max_train_steps=2))
    path = tmp_path / "out" / "checkpoint-2" / "state.json"
    state = json.loads(path.read_text())
    for field in ("share", "bands", "attention_rank", "feedforward_rank", "class_word", "map_learning_rate"):
        del state["config"][field]
    path.write_text(json.dumps(state))
    assert teach(pipe, config(max_train_steps=3, resume_from_checkpoint="latest")).steps == 3
    with pytest.raises(TinyEngramError, match="its attention_rank is 0, expected 2"):
        teach(pipe, config(attention_rank=2, resume_from_checkpoint="latest"))


def test_samples_one_by_one_are_samples_together(pipe, config, tmp_path):
    together = teach(pipe, config(**ALL, max_train_steps=2))
    apart = config(**ALL, max_train_steps=2, train_batch_size=1, gradient_accumulation_steps=2, output_dir=str(tmp_path / "apart"))
    assert teach(pipe, apart).losses == pytest.approx(together.losses, rel=1e-4)


def test_gradient_checkpoints_read_the_same(tiny, pipe, config, tmp_path):
    plain = teach(pipe, config(**ALL, max_train_steps=2))
    other = tiny.build()
    runs: list[int] = []
    projection = other.unet.down_blocks[1].attentions[0].transformer_blocks[0].attn2.to_k
    projection.register_forward_pre_hook(lambda module, args: runs.append(len(args[0])))
    kept = teach(other, config(**ALL, max_train_steps=2, output_dir=str(tmp_path / "kept"), gradient_checkpointing=True))
    assert runs.count(2) == 4  # each of two steps runs it again in the backward pass
    assert not any(getattr(module, "gradient_checkpointing", False) for module in other.unet.modules())
    assert kept.losses == pytest.approx(plain.losses, rel=1e-4)
    a, b = (load_checkpoint(p.path.parent / "checkpoint-2")[0] for p in (plain, kept))
    torch.testing.assert_close(a["optimizer.rows.exp_avg"], b["optimizer.rows.exp_avg"], rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(a["optimizer.maps.exp_avg"], b["optimizer.maps.exp_avg"], rtol=1e-2, atol=1e-5)


def test_a_denoiser_that_cannot_compute_again_is_told(pipe, config, monkeypatch):
    monkeypatch.setattr(type(pipe.unet), "_supports_gradient_checkpointing", False)
    with pytest.raises(TinyEngramError, match="gradient_checkpointing is True, but UNet2DConditionModel cannot compute its blocks again"):
        teach(pipe, config(**ALL, gradient_checkpointing=True))


def test_mixed_precision(pipe, config, tmp_path, fresh_accelerate):
    result = teach(pipe, config(**ALL, mixed_precision="bf16"))
    tensors, _ = load_checkpoint(tmp_path / "out" / "checkpoint-4")
    assert np.isfinite(result.losses).all() and all(tensors[f"master.{n}"].dtype == torch.float32 for n in ("rows", "maps"))
    assert all(at.ne(0).any() for at in tensors["master.rows"]) and all(at.ne(0).any() for at in tensors["optimizer.maps.exp_avg"])


def test_rows_of_one_band_alone(pipe, config):
    result = teach(pipe, config(mounts=("context.up0.value.2of2",)))
    assert list(result.concept.roles[ROLE].mounts) == ["context.up0.value.2of2"] and np.isfinite(result.losses).all()


def test_two_mounts_at_one_place_are_refused(pipe, config):
    with pytest.raises(
        TinyEngramError, match="mounts 'context.3.value' and 'context.up0.value' of clip_l, which both add to what context.3.value reads"
    ):
        teach(pipe, config(mounts=("context.up0.value", "context.3.value")))


def test_the_command_line_takes_all_of_it(saved_pipe, folder, tmp_path, capsys):
    from tiny_engram.cli import main

    out = tmp_path / "cli"
    begin = ["train", "--model", str(saved_pipe), "--train_data_dir", str(folder), "--trigger", "zqx", "--output_dir", str(out)]
    begin += ["--max_train_steps", "1", "--train_batch_size", "1", "--report_to", "none", "--caption_template", "a {trigger}"]
    begin += ["--collage_pictures", "1", "--companions", "key", "bus", "--validation_inference_steps", "2"]
    chosen = ["--mounts", "input", "value", "--share", "block", "--bands", "2", "--attention_rank", "2", "--feedforward_rank", "1"]
    assert main([*begin, *chosen, "--class_word", "lamp", "--map_learning_rate", "1e-3"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(out / "concept.safetensors"), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    maps = about["roles"][ROLE]["maps"]
    assert len(maps) == 8 and maps["attention.0"] == {"rank": 2, "channels": 32, "bytes": 2 * 2 * 33}
    assert main(["inspect", str(out / "concept.safetensors")]) == 0
    said = capsys.readouterr().out
    total = Concept.load(out / "concept.safetensors").nbytes
    assert "clip_l, input, 3 shared values in 2 bands, 4 attention maps, 4 feedforward maps: 56 rows over 2 positions" in said
    assert f", {total:,} bytes" in said
    assert main([*begin, "--class_word", "lamp", "--mounts", "value"]) == 2
    assert "class_word is 'lamp', expected None where mounts are neither 'input' nor 'span'" in capsys.readouterr().err
