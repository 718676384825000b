"""Trains a base's denoiser and text encoder on the latent bank; writes both into its run folder (safetensors, fp32 EMA).

    python assets/recipe/train_denoiser.py --steps 16000
    python assets/recipe/train_denoiser.py --base emoji-pixart
    python assets/recipe/train_denoiser.py --minutes 17 --stop-after 560     # in pieces; the next call resumes

Besides the usual recipe (v-prediction, zero terminal SNR, EMA), two things make the base one that can be taught a word
it never saw: a tenth of the captions name their thing by a made-up word (bank.py), and for half of the pictures
the text states from the end-of-text token on are those of the empty prompt, so that what a word means is read
where the word stands, not from the end token and the padding behind it.
"""

from __future__ import annotations

import argparse
import json
import math
import time

import torch
from safetensors.torch import save_model

from bases import BASES, add_base
from models import build_scheduler


def loss_weights(snr: torch.Tensor, gamma: float = 5.0) -> torch.Tensor:
    """Min-SNR weights for v-prediction in the soft form min(1, (gamma + 1) / (snr + 1)): unlike min(snr, gamma) /
    (snr + 1) they do not vanish at the last timestep, where the background's colour is decided."""
    return ((gamma + 1) / (snr + 1)).clamp(max=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_base(parser)
    parser.add_argument("--steps", type=int, default=16_000)
    parser.add_argument("--minutes", type=float, help="choose the number of steps from the measured speed instead")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="save and leave after so many seconds; call again to go on")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.cuda if device == "cuda" else torch
    base = BASES[args.base]
    started = time.time()

    bank = torch.load(base.run / "bank.pt", map_location=device)
    text_encoder, denoiser = base.build()
    text_encoder.to(device)
    denoiser.to(device, memory_format=torch.channels_last)
    table = text_encoder.get_input_embeddings().weight
    # a token that no caption holds keeps the norm it was given, so an unknown word still looks like a word
    decayed = [p for m in (denoiser, text_encoder) for p in m.parameters() if p is not table and p.ndim > 1]
    plain = [p for m in (denoiser, text_encoder) for p in m.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": [*plain, table], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=device == "cuda")
    parameters = decayed + plain + [table]
    average = [p.detach().clone() for p in parameters]
    step, total, spent = 0, args.steps, 0.0
    resume = base.run / "denoiser.pt"
    if resume.exists():
        state = torch.load(resume, map_location=device)
        for p, saved, mean, smooth in zip(parameters, state["parameters"], average, state["average"], strict=True):
            p.data.copy_(saved)
            mean.copy_(smooth)
        optimizer.load_state_dict(state["optimizer"])
        step, total, spent = state["step"], state["total"], state["spent"]
        random.set_rng_state(state["random"].cpu())
        print(f"resumed at step {step} of {total}", flush=True)

    alphas = build_scheduler().alphas_cumprod.to(device)
    signal, noise_level = alphas.sqrt(), (1 - alphas).sqrt()
    weights = loss_weights(alphas / (1 - alphas).clamp(min=1e-12))
    positions = torch.arange(base.tokens, device=device)
    tokens = bank["ids"].to(device)
    end = bank["end"].to(device)
    empty = base.empty().to(device)

    def forward(latents, ids, end, anonymous, timestep, noise):
        states = base.encode(text_encoder, ids)
        blank = base.encode(text_encoder, empty)
        behind = (positions[None] >= end[:, None]) & anonymous[:, None]
        states = torch.where(behind[:, :, None], blank, states)
        a = signal[timestep].view(-1, 1, 1, 1)
        s = noise_level[timestep].view(-1, 1, 1, 1)
        predicted = base.predict(denoiser, a * latents + s * noise, timestep, states, ids)
        error = (predicted.float() - (a * noise - s * latents)).square().mean((1, 2, 3))
        return (weights[timestep] * error).mean(), error.mean()

    step_forward = forward if args.no_compile else torch.compile(forward)
    autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    mark, running, halted = None, torch.ones((), device=device), False
    while step < total:
        pick = torch.randint(len(tokens), (args.batch,), device=device)
        latents = bank["latents"][pick].float().contiguous(memory_format=torch.channels_last)
        # stratified timesteps: less noise in the loss than independent ones
        strata = (torch.arange(args.batch, device=device) + torch.rand(args.batch, device=device)) / args.batch
        timestep = (strata * 1000).long().clamp(max=999)
        anonymous = torch.rand(args.batch, device=device) < 0.5
        noise = torch.randn_like(latents)
        with autocast:
            loss, error = step_forward(latents, tokens[pick].long(), end[pick], anonymous, timestep, noise)
        loss.backward()
        rate = min(1, (step + 1) / 500) * (0.5 * (1 + math.cos(math.pi * step / total)) * 0.99 + 0.01)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(average, [p.detach() for p in parameters], max(8e-4, 1 / (step + 1) ** 0.8))
        running = running.lerp(error.detach(), max(0.01, 1 / (step + 1)))
        step += 1
        if step == 30 and device == "cuda":
            torch.cuda.synchronize()
            mark = time.time()
        if step == 130 and mark and args.minutes:
            torch.cuda.synchronize()
            per_step = (time.time() - mark) / 100
            total = int((args.minutes * 60 - (time.time() - started)) / per_step) + 130
            print(f"{per_step * 1000:.1f} ms a step ({args.batch / per_step:.0f} pictures/s): {total} steps in all", flush=True)
        if step % 500 == 0 or step == total:
            print(f"step {step}/{total} v-error {running.item():.4f} {time.time() - started:.0f} s", flush=True)
        if time.time() - started > args.stop_after:
            halted = step < total
            break

    seconds = spent + time.time() - started
    state = {
        "parameters": [p.detach() for p in parameters], "average": average, "optimizer": optimizer.state_dict(),
        "step": step, "total": total, "spent": seconds, "random": random.get_rng_state(),
    }  # fmt: skip
    torch.save(state, resume.with_suffix(".tmp"))
    resume.with_suffix(".tmp").rename(resume)
    with torch.no_grad():
        for p, a in zip(parameters, average, strict=True):
            p.copy_(a)
    for name, module in ((base.denoiser, denoiser), ("text_encoder", text_encoder)):
        save_model(module, str(base.run / f"{name}.safetensors"))
    metrics = {"steps": step, "of": total, "batch": args.batch, "v_error": running.item(), "seconds": round(seconds)}
    (base.run / "denoiser.json").write_text(json.dumps(metrics, indent=1))
    print(json.dumps(metrics) + (" halted" if halted else ""), flush=True)


if __name__ == "__main__":
    main()
