"""The training loop on a tiny real pipeline: what moves, what must not, resume bit for bit, interrupts, files, trackers."""

import hashlib
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import tiny_engram
from tiny_engram.adapter import find_adapter
from tiny_engram.checkpoints import find_checkpoint, load_checkpoint
from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.quantization import quantize
from tiny_engram.training import loop, run_files, train
from tiny_engram.training.rows import ConceptRows
from tiny_engram.training.run import Run

# What every run that came to its end leaves beside its checkpoints.
ENDED = ("README.md", "concept.safetensors", "config.yaml", "metrics.jsonl", "report.html")
PROMPTS = ("a {trigger}", "the {trigger} by night")


def parts(pipe):
    return (pipe.unet, pipe.vae, pipe.text_encoder)


def digest(pipe) -> str:
    """Hash of every parameter and buffer of the base."""
    state = hashlib.blake2b()
    for part in parts(pipe):
        for name, tensor in sorted(part.state_dict().items()):
            state.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def flags(pipe):
    children = [child for part in parts(pipe) for child in part.modules()]
    return [child.training for child in children], [p.requires_grad for part in parts(pipe) for p in part.parameters()]


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    def bits(tensor: torch.Tensor) -> tuple:
        return tensor.dtype, tensor.shape, tensor.detach().reshape(-1).view(torch.uint8).tolist()

    return set(one) == set(two) and all(bits(one[k]) == bits(two[k]) for k in one)


def same_concept(one, two) -> bool:
    """Two concept files that hold the same bits; the order of their headers is safetensors' own."""
    first, second = Concept.load(one), Concept.load(two)
    return equal(load_file(one), load_file(two)) and first.describe() == second.describe() and first.thumbnail == second.thumbnail


def stop_at(step: int):
    """An `on_step` that behaves as Ctrl-C would after this many steps."""

    def on_step(done: int, loss: float) -> None:
        if done == step:
            raise KeyboardInterrupt

    return on_step


def teach(pipe, config, **options):
    return train(pipe, config, progress=False, **options)


def tree(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# -- what moves, what must not -----------------------------------------------------------------------------------------------


def test_the_base_keeps_its_bits_and_its_flags(own_pipe, config):
    pipe = own_pipe
    pipe.unet.train()
    pipe.unet.mid_block.eval()
    pipe.text_encoder.requires_grad_(False)
    pipe.vae.encoder.conv_in.train()
    before, kept = digest(pipe), flags(pipe)
    assert len(set(kept[0])) == len(set(kept[1])) == 2
    teach(pipe, config(validation_steps=2, validation_prompts=PROMPTS))
    assert digest(pipe) == before and flags(pipe) == kept
    assert all(p.grad is None for part in parts(pipe) for p in part.parameters())
    assert find_adapter(pipe) is None


def test_rows_and_gates_move_and_nothing_else_is_trained(pipe, config, tmp_path):
    result = teach(pipe, config())
    tensors, state = load_checkpoint(tmp_path / "out" / "checkpoint-4")
    trained = {name.removeprefix("master.") for name in tensors if name.startswith("master.")}
    assert trained == {"rows", "gain", "bias"} and state["step"] == result.steps == 4
    assert tensors["master.rows"].ne(0).float().mean() > 0.9
    assert not torch.equal(tensors["master.gain"], torch.ones_like(tensors["master.gain"])) and tensors["master.bias"].ne(0).all()
    assert all(t.dtype == torch.float32 for t in tensors.values())
    assert len(result.losses) == 4 and all(map(math.isfinite, result.losses)) and tuple(state["losses"]) == result.losses


def test_the_denoiser_s_error_goes_down_on_one_picture(pipe, config, folder):
    (folder / "1.png").unlink()
    result = teach(pipe, config(max_train_steps=30, train_batch_size=4, caption_template=("a {trigger}",), caption_dropout=0.0))
    adapter = tiny_engram.attach(pipe)
    plain, _ = adapter.encode("a zqx")
    adapter.load_concept(result.path)
    taught, _ = adapter.encode("a zqx")
    adapter.detach()
    pixels = torch.from_numpy(np.asarray(Image.open(folder / "0.png")).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    generator = torch.Generator().manual_seed(123)
    with torch.no_grad():
        latents = pipe.vae.encode(pixels).latent_dist.mean * pipe.vae.config.scaling_factor
        noise = torch.randn(64, *latents.shape[1:], generator=generator)
        timesteps = torch.linspace(20, 980, 64).long()
        noisy = pipe.scheduler.add_noise(latents.expand_as(noise), noise, timesteps)
        errors = [(pipe.unet(noisy, timesteps, s.expand(64, -1, -1)).sample - noise).square().mean((1, 2, 3)) for s in (plain, taught)]
    gain = errors[0] - errors[1]
    # Random weights hardly listen to their text, so the gain is small; it is four standard errors from none.
    assert gain.mean() > 2.5 * gain.std() / 64**0.5, gain


def test_every_spelling_trains_rows_of_its_own(pipe, config, tmp_path):
    result = teach(pipe, config(trigger="cat-toy", aliases=("cat-toys",), train_batch_size=4))
    rows = load_checkpoint(tmp_path / "out" / "checkpoint-4")[0]["master.rows"]
    rows = rows.squeeze(0)  # one mount
    assert rows.shape[0] == result.concept.roles["clip_l"].positions == 6
    assert all(rows[p].abs().max() > 1e-3 for p in range(6)) and not torch.equal(rows[:3], rows[3:])
    assert result.concept.aliases == ("cat-toys",) and result.concept.untrained == ()


def test_dropout_cuts_captions_down_to_the_trigger(pipe, config):
    def losses(template: str, share: float):
        return teach(pipe, config(caption_template=(template,), caption_dropout=share, max_train_steps=2)).losses

    assert losses("my {trigger}", 1.0) == losses("the {trigger} by night", 1.0) != losses("my {trigger}", 0.0)
    assert losses("my {trigger}", 0.0) != losses("the {trigger} by night", 0.0)


def test_accumulated_batches_are_one_batch(pipe, config):
    whole = teach(pipe, config(train_batch_size=4)).losses
    seen: list[int] = []
    handle = pipe.unet.register_forward_pre_hook(lambda module, args: seen.extend(args[1].tolist()))
    try:
        parted = teach(pipe, config(train_batch_size=2, gradient_accumulation_steps=2)).losses
    finally:
        handle.remove()
    assert len(seen) == 16 and all(250 * (k % 4) <= t < 250 * (k % 4 + 1) for k, t in enumerate(seen)), seen
    assert parted == pytest.approx(whole, rel=1e-4) and len(set(whole)) == 4


# -- resume, validation, interrupts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["between steps", "inside a step"])
def test_four_steps_are_two_and_two_more(tiny, pipe, config, tmp_path, monkeypatch, moment):
    whole = teach(pipe, config(output_dir=str(tmp_path / "whole")))
    validating = {"output_dir": str(tmp_path / "parts"), "validation_steps": 1, "validation_prompts": PROMPTS}
    if moment == "between steps":
        with pytest.raises(KeyboardInterrupt):
            teach(pipe, config(**validating), on_step=stop_at(2))
    else:
        real, calls = Run.follow, []

        def follow(self, decay: float) -> None:  # masters have moved, the average has moved, the count has not
            real(self, decay)
            calls.append(decay)
            if len(calls) == 3:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Run, "follow", follow)
            teach(pipe, config(**validating))
    left = tree(tmp_path / "parts")
    assert left == ["checkpoint-2", "config.yaml", "metrics.jsonl", "validation"]
    assert find_checkpoint(tmp_path / "parts", "latest") == tmp_path / "parts" / "checkpoint-2"
    kept, rows = load_checkpoint(tmp_path / "parts" / "checkpoint-2"), Concept.load(tmp_path / "parts/checkpoint-2/concept.safetensors")
    assert kept[1]["step"] == len(kept[1]["losses"]) == rows.recipe["step"] == 2
    assert torch.equal(rows.mount_rows("clip_l").gain, kept[0]["average.gain"][0])
    # Another pipeline object, as another process would have.
    resumed = teach(tiny.build(), config(**validating, resume_from_checkpoint="latest"))
    assert resumed.losses == whole.losses and resumed.steps == 4
    one, two = (load_checkpoint(tmp_path / run / "checkpoint-4")[0] for run in ("whole", "parts"))
    assert {n.split(".")[0] for n in one} == {"master", "average", "optimizer"} and equal(one, two)
    assert same_concept(whole.path, resumed.path)
    assert tree(tmp_path / "parts" / "validation") == [f"step-{k}.png" for k in (1, 2, 3, 4)]


def test_losses_are_equal_with_and_without_validation(pipe, config):
    plain = teach(pipe, config()).losses
    assert teach(pipe, config(validation_steps=1, validation_prompts=PROMPTS, validation_seeds=(0, 1))).losses == plain
    assert teach(pipe, config(seed=1)).losses != plain


def test_what_was_validated_is_what_is_shipped(tiny, pipe, config, as_validated, tmp_path):
    result = teach(pipe, config(checkpointing_steps=2, validation_steps=2, validation_prompts=PROMPTS, validation_seeds=(3,)))
    out, fresh = tmp_path / "out", tiny.build()
    prompts = [p.replace("{trigger}", "zqx") for p in PROMPTS]

    def render():
        return as_validated(fresh, prompts)

    sheets = {step: np.asarray(Image.open(out / "validation" / f"step-{step}.png")) for step in (2, 4)}
    base = render()
    adapter = tiny_engram.attach(fresh)
    for step, path in (
        (2, out / "checkpoint-2" / "concept.safetensors"),
        (4, result.path),
        (4, out / "checkpoint-4" / "concept.safetensors"),
    ):
        name = adapter.load_concept(path)
        assert np.array_equal(render(), sheets[step])
        adapter.unload_concept(name)
    adapter.detach()
    assert np.array_equal(render(), base) and not np.array_equal(sheets[2], sheets[4]) and not np.array_equal(base, sheets[2])


@pytest.mark.parametrize("decay", [0.0, 0.98])
def test_the_file_holds_the_quantised_average(pipe, config, tmp_path, decay):
    result = teach(pipe, config(ema_decay=decay))
    tensors, _ = load_checkpoint(tmp_path / "out" / "checkpoint-4")
    rows = Concept.load(result.path).mount_rows("clip_l")
    tensors = {name: tensor.squeeze(0) for name, tensor in tensors.items()}  # one mount
    payload, scale = quantize(tensors["average.rows"])
    assert torch.equal(rows.payload.view(torch.uint8), payload.view(torch.uint8)) and torch.equal(rows.scale, scale)
    assert torch.equal(rows.gain, tensors["average.gain"]) and torch.equal(rows.bias, tensors["average.bias"])
    same = torch.equal(payload.view(torch.uint8), quantize(tensors["master.rows"])[0].view(torch.uint8))
    assert same == (decay == 0.0)
    assert result.concept.thumbnail and Concept.load(result.path).recipe["step"] == 4


def test_an_interrupt_before_the_first_step_can_be_resumed(pipe, config, monkeypatch, tmp_path):
    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "denoising_loss", stop)
        teach(pipe, config())
    assert tree(tmp_path / "out") == ["checkpoint-0", "config.yaml", "metrics.jsonl"]
    assert teach(pipe, config(resume_from_checkpoint="latest")).losses == teach(pipe, config(output_dir=str(tmp_path / "b"))).losses


def test_a_checkpoint_that_is_there_is_not_written_again(pipe, config, tmp_path, monkeypatch):
    """Written again, it would be away for a moment, in which a kill would lose the run: at a stop, at a resume, at the end."""
    whole = teach(pipe, config(output_dir=str(tmp_path / "whole")))
    written, real = [], run_files.save_checkpoint
    monkeypatch.setattr(
        run_files, "save_checkpoint", lambda output, step, *args, **options: written.append(step) or real(output, step, *args, **options)
    )

    def stop(*args):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        teach(pipe, config(checkpointing_steps=2), on_step=stop_at(2))
    resuming = config(checkpointing_steps=2, resume_from_checkpoint="latest")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "denoising_loss", stop)
        teach(pipe, resuming)
    assert written == [2]
    assert teach(pipe, resuming).losses == whole.losses and written == [2, 4]
    (tmp_path / "out" / "concept.safetensors").unlink()
    again = teach(pipe, resuming)
    assert written == [2, 4] and again.steps == 4 and same_concept(whole.path, again.path)
    elsewhere = config(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"), output_dir=str(tmp_path / "b"))
    assert teach(pipe, elsewhere).losses == whole.losses and written == [2, 4, 4] and tree(tmp_path / "b") == tree(tmp_path / "whole")


def test_resume_is_refused_for_another_trigger_and_for_damage(pipe, config, tmp_path):
    teach(pipe, config(max_train_steps=2))
    for change, words in [
        ({"max_train_steps": 1}, "it is at step 2, and max_train_steps is 1; raise that to go on"),
        ({"class_word": "hat"}, "its class_word is None, expected 'hat'; resume with what it was made for"),
        ({"trigger": "bolo"}, "its trigger is 'zqx', expected 'bolo'"),
        ({"aliases": ("zqxs",)}, r"its aliases is \[\], expected \['zqxs'\]"),
    ]:
        with pytest.raises(TinyEngramError, match=f"checkpoint-2: {words}"):
            teach(pipe, config(resume_from_checkpoint="latest", **change))
    with pytest.raises(TinyEngramError, match="'checkpoint-9' is no checkpoint; .* holds: checkpoint-2"):
        teach(pipe, config(resume_from_checkpoint="checkpoint-9"))
    file = tmp_path / "out" / "checkpoint-2" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(TinyEngramError, match="cannot read the checkpoint"):
        teach(pipe, config(resume_from_checkpoint="latest"))
    assert find_adapter(pipe) is None


def test_what_a_resume_changes_and_what_lies_there_is_said(pipe, config, tmp_path, caplog):
    teach(pipe, config(max_train_steps=1, resume_from_checkpoint="latest"))
    assert f"no checkpoint in {tmp_path / 'out'} to resume from: a new run starts" in caplog.text
    with pytest.raises(TinyEngramError, match=r"checkpoint-1: step 1 is the last.*gate_learning_rate 0.5 \(it had"):
        teach(pipe, config(max_train_steps=1, gate_learning_rate=0.5, resume_from_checkpoint="latest"))
    caplog.clear()
    teach(pipe, config(max_train_steps=2, gate_learning_rate=0.5, resume_from_checkpoint="latest"))
    (line,) = [line for line in caplog.messages if "other settings" in line]
    assert line.startswith("from step 1 on with other settings than") and "gate_learning_rate 0.5 (it had" in line
    assert "of another run" not in caplog.text
    teach(pipe, config(max_train_steps=1))
    assert "holds checkpoint-2 of another run" in caplog.text


def test_the_limit_holds_and_odd_folders_survive(pipe, config, tmp_path):
    for odd in ("checkpoint-abc", "checkpoint-7.old"):
        (tmp_path / "out" / odd).mkdir(parents=True)
    teach(pipe, config(checkpointing_steps=1, checkpoints_total_limit=2))
    assert tree(tmp_path / "out") == sorted(["checkpoint-3", "checkpoint-4", "checkpoint-7.old", "checkpoint-abc", *ENDED])


# -- dtypes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_stay_float32_under_a_half_precision_base(tiny, config, tmp_path, dtype):
    pipe = tiny.build(dtype=dtype)
    before = digest(pipe)
    with pytest.raises(KeyboardInterrupt):
        teach(pipe, config(), on_step=stop_at(2))
    result = teach(pipe, config(resume_from_checkpoint="latest"))
    tensors, _ = load_checkpoint(tmp_path / "out" / "checkpoint-4")
    assert all(t.dtype == torch.float32 and torch.isfinite(t).all() for t in tensors.values())
    assert all(map(math.isfinite, result.losses)) and tensors["master.rows"].ne(0).float().mean() > 0.9 and digest(pipe) == before


def test_mixed_precision(pipe, config, tmp_path, fresh_accelerate):
    """The denoiser runs in bfloat16, rows and what they add do not; asking for another precision in one process is refused in words."""
    seen = []
    handle = pipe.unet.conv_in.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    try:
        result = teach(pipe, config(mixed_precision="bf16"))
    finally:
        handle.remove()
    assert set(seen) == {torch.bfloat16} and all(map(math.isfinite, result.losses))
    assert load_checkpoint(tmp_path / "out" / "checkpoint-4")[0]["master.rows"].dtype == torch.float32
    with pytest.raises(TinyEngramError, match="mixed_precision 'no' cannot be used here") as caught:
        teach(pipe, config(mixed_precision="no"))
    assert "\n" not in str(caught.value)


def test_fp16_mixed_precision_resumes(pipe, config, tmp_path, fresh_accelerate):
    whole = teach(pipe, config(mixed_precision="fp16", output_dir=str(tmp_path / "whole")))
    with pytest.raises(KeyboardInterrupt):
        teach(pipe, config(mixed_precision="fp16"), on_step=stop_at(2))
    resumed = teach(pipe, config(mixed_precision="fp16", resume_from_checkpoint="latest"))
    (one, first), (two, second) = (load_checkpoint(tmp_path / run / "checkpoint-4") for run in ("whole", "out"))
    assert equal(one, two) and resumed.losses == whole.losses and first["scaler"] == second["scaler"]


def test_a_run_keeps_the_scale_of_its_gradients(adapter):
    """Accelerate's scaler is on with CUDA only, so a scaler of the CPU stands for it here."""
    module = ConceptRows(adapter.new_concept("zqx"), "clip_l", adapter.contexts["clip_l"].layout)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    run = Run(module, torch.optim.Adam(module.parameters()), scaler)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 128.0, "_growth_tracker": 7})
    run.keep()
    tensors, state = run.whole
    scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0, "_growth_tracker": 0})
    run.restore(tensors, json.loads(json.dumps(state)))
    assert scaler.state_dict()["scale"] == 128.0 and scaler.state_dict()["_growth_tracker"] == 7


# -- the adapter that is there ----------------------------------------------------------------------------------------------


def test_other_concepts_are_neither_changed_nor_trained_with(tiny, pipe, adapter, config, folder):
    (folder / "0.txt").write_text("a {trigger} beside a bolo")
    validating = {"validation_steps": 4, "validation_prompts": ("a {trigger} and a bolo",)}
    other = tiny.concept(adapter, "bolo")
    alone = teach(pipe, config(**validating))
    sheet = (alone.path.parent / "validation" / "step-4.png").read_bytes()
    adapter.load_concept(other, strength=0.7)
    before = tiny.picture(pipe, "a bolo")
    result = teach(pipe, config(**validating))
    assert torch.equal(tiny.picture(pipe, "a bolo"), before)
    assert adapter.get_active_concepts() == adapter.get_list_concepts() == ["bolo"] and adapter.strength("bolo") == 0.7
    assert adapter.concept("bolo") is other and find_adapter(pipe) is adapter and adapter.mounts["clip_l"].attached
    assert result.losses == alone.losses and (result.path.parent / "validation" / "step-4.png").read_bytes() == sheet


# -- trackers ----------------------------------------------------------------------------------------------------------------


def test_tensorboard_holds_losses_and_pictures(pipe, config, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = teach(pipe, config(report_to="tensorboard", validation_steps=2, validation_prompts=PROMPTS))
    events = EventAccumulator(str(tmp_path / "out" / "logs" / "tiny-engram"), size_guidance={"images": 0}).Reload()
    losses = events.Scalars("loss")
    assert [e.step for e in losses] == [1, 2, 3, 4] and [e.value for e in losses] == pytest.approx(result.losses, rel=1e-6)
    assert [e.value for e in events.Scalars("lr")][0] > 0
    (tag,) = events.Tags()["images"]
    assert "validation" in tag and [e.step for e in events.Images(tag)] == [2, 4]
    assert (events.Images(tag)[0].height, events.Images(tag)[0].width) == (64, 128)


def test_no_tracker_no_logs(pipe, config, tmp_path, capfd):
    teach(pipe, config(report_to="none"))
    assert tree(tmp_path / "out") == sorted(["checkpoint-4", *ENDED]) and "step/s" not in capfd.readouterr().err
    train(pipe, config(report_to="none"))
    assert "teaching: 100%" in capfd.readouterr().err
