"""Trains the image autoencoder of the embedded base and writes build/base/run/vae.safetensors (fp32, EMA weights).

    python assets/recipe/train_vae.py --steps 6000

Pictures are composed on the fly; colours, light and contrast of the sprites are varied and backgrounds are not only the
named ones, so that rendered subjects, which are nobody's emoji, pass through it too.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch
from safetensors.torch import save_file

from compose import BUILD, Compositor, Layout, load_names, random_layout
from models import build_vae


def vary_colours(sprites: torch.Tensor) -> torch.Tensor:
    """Random gain per channel, gamma and a linear light gradient on half of the premultiplied sprites."""
    count, _, height, width = sprites.shape
    device = sprites.device
    rgb, alpha = sprites[:, :3], sprites[:, 3:]
    straight = (rgb / alpha.clamp(min=1e-3)).clamp(0, 1)
    gain = torch.empty(count, 3, 1, 1, device=device).uniform_(0.5, 1.25)
    gamma = torch.empty(count, 1, 1, 1, device=device).uniform_(0.7, 1.5)
    ramp = torch.linspace(-1, 1, width, device=device)
    slope = torch.empty(count, 2, 1, 1, device=device).uniform_(-0.35, 0.35)
    light = 1 + slope[:, :1] * ramp[None, None, None, :] + slope[:, 1:] * ramp[None, None, :, None]
    varied = ((straight + 1e-4) ** gamma * gain * light).clamp(0, 1)
    # some in another order of channels: colours that no emoji has
    order = torch.rand(count, 3, device=device).argsort(1)[:, :, None, None].expand_as(varied)
    swap = (torch.rand(count, 1, 1, 1, device=device) < 0.3)
    varied = torch.where(swap, varied.gather(1, order), varied)
    keep = torch.rand(count, 1, 1, 1, device=device) < 0.5
    return torch.where(keep, sprites, torch.cat([varied * alpha, alpha], 1))


def varied_backgrounds(count: int, palette: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
    """The named colours for 70 %, any colour or a gradient between two for the rest. `[count, 3, 128, 128]` in [0, 1]."""
    device = palette.device
    named = palette[colour][:, :, None, None].expand(-1, -1, 128, 128)
    ramp = torch.linspace(0, 1, 128, device=device)
    ends = torch.rand(2, count, 3, 1, 1, device=device)
    across = torch.where(torch.rand(count, 1, 1, 1, device=device) < 0.5, ramp[None, None, None, :], ramp[None, None, :, None])
    flat = torch.rand(count, 1, 1, 1, device=device) < 0.5
    other = torch.where(flat, ends[0], ends[0] * across + ends[1] * (1 - across))
    return torch.where(torch.rand(count, 1, 1, 1, device=device) < 0.7, named, other)


def reconstruction_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    error = output - target
    across = (output.diff(dim=3) - target.diff(dim=3)).abs().mean()
    down = (output.diff(dim=2) - target.diff(dim=2)).abs().mean()
    return error.abs().mean() + 0.5 * error.square().mean() + across + down


def psnr(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """dB per picture for values in [-1, 1]."""
    mse = ((output.clamp(-1, 1) - target) / 2).square().mean((1, 2, 3))
    return -10 * mse.clamp(min=1e-10).log10()


@torch.no_grad()
def evaluate(vae, compositor: Compositor, indices: np.ndarray) -> float:
    layout = random_layout(len(indices) * 6, indices, pairs=0.0, seed=7).to(compositor.full.device)
    pictures = compositor(layout)
    scores = [psnr(vae.decode(vae.encode(x).latent_dist.mode()).sample, x) for x in pictures.split(64)]
    return torch.cat(scores).mean().item()


@torch.no_grad()
def normalise_latents(vae, pictures: torch.Tensor) -> None:
    """Folds the latents' mean and deviation per channel into the 1x1 convolutions beside them: pipelines of the Stable
    Diffusion class know one scaling factor and no shift, and these latents need neither."""
    latents = torch.cat([vae.encode(x).latent_dist.mode() for x in pictures.split(128)])
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    channels = len(mean)
    quant, post = vae.quant_conv, vae.post_quant_conv
    post.bias += (post.weight[:, :, 0, 0] @ mean)
    post.weight *= std[None, :, None, None]
    quant.weight[:channels] /= std[:, None, None, None]
    quant.bias[:channels] = (quant.bias[:channels] - mean) / std
    quant.bias[channels:] -= 2 * std.log()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--minutes", type=float, help="choose the number of steps from the measured speed instead")
    parser.add_argument("--batch", type=int, default=160)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.time()

    names = load_names()
    rgba = np.load(BUILD / "sprites.npz")["rgba"]
    extra = np.load(BUILD / "extra.npz")["rgba"]
    # the extra pictures have no style: they stand three to a row
    extra = extra[: len(extra) // 3 * 3].reshape(-1, 3, *extra.shape[1:])
    train = np.array([i for i, n in enumerate(names) if not n["held_out"]] + list(range(len(names), len(names) + len(extra))))
    held_out = np.array([i for i, n in enumerate(names) if n["held_out"]])
    compositor = Compositor(np.concatenate([rgba, extra]), device)
    renders = np.load(BUILD / "renders.npz")["rgba"] if (BUILD / "renders.npz").exists() else None

    vae = build_vae().to(device, memory_format=torch.channels_last)
    parameters = list(vae.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.99), weight_decay=1e-3, fused=device == "cuda")
    average = [p.detach().clone() for p in parameters]

    def forward(pictures, noise):
        moments = vae.quant_conv(vae.encoder(pictures))
        mean, logvar = moments.float().chunk(2, 1)
        logvar = logvar.clamp(-20, 10)
        output = vae.decoder(vae.post_quant_conv(mean + noise * (logvar / 2).exp()))
        divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        return reconstruction_loss(output.float(), pictures) + 4e-4 * divergence

    step_forward = forward if args.no_compile else torch.compile(forward)
    steps = args.steps
    bank = random_layout(2_000_000 if device == "cuda" else 20_000, train, pairs=0.3, seed=args.seed).to(device)
    clock = None
    step = 0
    while step < steps:
        index = torch.randint(len(bank), (args.batch,), device=device)
        layout: Layout = bank[index]
        with torch.no_grad():
            backgrounds = varied_backgrounds(args.batch, compositor.palette, layout.colour)
            pictures = compositor(layout, background=backgrounds, augment=vary_colours)
            pictures = pictures.contiguous(memory_format=torch.channels_last)
            noise = torch.randn(args.batch, 12, 16, 16, device=device)
        warm, progress = min(1, (step + 1) / 200), step / steps
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm * 0.5 * (1 + np.cos(np.pi * progress))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = step_forward(pictures, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(average, [p.detach() for p in parameters], max(1e-3, 1 / (step + 1) ** 0.8))
        step += 1
        if step == 60 and device == "cuda":
            torch.cuda.synchronize()
            clock = time.time()
        if step == 160 and clock and args.minutes:
            torch.cuda.synchronize()
            steps = int((args.minutes * 60 - (time.time() - started)) / ((time.time() - clock) / 100)) + 160
            print(f"{(time.time() - clock) * 10:.1f} ms a step: {steps} steps in {args.minutes} minutes", flush=True)
        if step % 500 == 0 or step == steps:
            print(f"vae step {step}/{steps} loss {loss.item():.4f} {time.time() - started:.0f} s", flush=True)

    with torch.no_grad():
        for p, a in zip(parameters, average, strict=True):
            p.copy_(a)
    vae = vae.to(memory_format=torch.contiguous_format).eval()
    sample = compositor(random_layout(4096, train[train < len(names)], pairs=0.4, seed=3).to(device)) if device == "cuda" else pictures
    normalise_latents(vae, sample)
    # scores are those of the fp16 weights that are shipped
    vae.half().float()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    metrics = {"held_out_psnr": evaluate(vae, compositor, held_out), "train_psnr": evaluate(vae, compositor, train[:200])}
    if renders is not None:
        views = Compositor(renders[:, :3], device)
        metrics["renders_psnr"] = evaluate(vae, views, np.arange(len(renders)))
    metrics |= {"steps": steps, "batch": args.batch, "seconds": round(time.time() - started)}
    run = BUILD / "run"
    run.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous().cpu() for k, v in vae.state_dict().items()}, run / "vae.safetensors")
    (run / "vae.json").write_text(json.dumps(metrics, indent=1))
    print(json.dumps(metrics), flush=True)


if __name__ == "__main__":
    main()
