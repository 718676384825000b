"""Small classifiers trained on the real emoji: which thing is drawn, and in which style. They judge generated pictures.

    python assets/recipe/classifiers.py --steps 4000

Writes build/base/run/classifiers.safetensors (both networks, fp16). A classifier sees a window of 64 x 64 pixels in [-1, 1]: the whole
picture at half size for one thing, a full-size window around the left or the right place for a pair, so that a thing
has about the same size in both.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from compose import BUILD, STYLES, Compositor, Layout, load_names, random_layout
from models import build_vae

WINDOW = 64
PLACES = (34, 94)  # pixel columns of the two centres in a pair


class Classifier(nn.Module):
    """A plain residual network for 64 x 64 windows: `[B, 3, 64, 64]` -> logits `[B, classes]`."""

    def __init__(self, classes: int, width: int):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        blocks, channels = [], width
        for level in range(3):
            out = width * 2**level
            blocks.append(nn.ModuleList([
                nn.Conv2d(channels, out, 3, stride=2, padding=1), nn.GroupNorm(8, out),
                nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(8, out),
                nn.Conv2d(channels, out, 1),
            ]))  # fmt: skip
            channels = out
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, classes)

    def features(self, windows: torch.Tensor) -> torch.Tensor:
        """`[B, 3, 64, 64]` -> `[B, 4 * width]`, the input of the last linear layer."""
        x = self.stem(windows)
        for first, norm_1, second, norm_2, skip in self.blocks:
            y = F.silu(norm_1(first(x)))
            x = F.silu(norm_2(second(y)) + skip(F.avg_pool2d(x, 2)))
        return x.mean((2, 3))

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(windows))


def build_classifiers(names: int) -> dict[str, Classifier]:
    return {"object": Classifier(names, 64), "style": Classifier(len(STYLES), 16)}


def load_classifiers(path, names: int) -> dict[str, Classifier]:
    tensors = load_file(path)
    networks = build_classifiers(names)
    for role, network in networks.items():
        network.load_state_dict({k.removeprefix(f"{role}."): v.float() for k, v in tensors.items() if k.startswith(f"{role}.")})
        network.eval()
    return networks


def windows_of(pictures: torch.Tensor, side: str) -> torch.Tensor:
    """`[B, 3, 128, 128]` -> `[B, 3, 64, 64]` for side "whole", "left" or "right"."""
    if side == "whole":
        return F.avg_pool2d(pictures, 2)
    column = PLACES[side == "right"] - WINDOW // 2
    return pictures[:, :, 32 : 32 + WINDOW, column : column + WINDOW]


def labelled_windows(pictures: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every sprite's window with its name and style: a pair gives two."""
    pair = layout.right >= 0
    parts = [("whole", ~pair, layout.left), ("left", pair, layout.left), ("right", pair, layout.right)]
    windows = torch.cat([windows_of(pictures[chosen], side) for side, chosen, _ in parts])
    name = torch.cat([names[chosen] for _, chosen, names in parts])
    style = torch.cat([layout.style[chosen] for _, chosen, _ in parts])
    return windows, name, style


def disturb(pictures: torch.Tensor) -> torch.Tensor:
    """Blur on some, noise on some, a shift of a few pixels on all: generated pictures are not pixel-perfect."""
    count, device = len(pictures), pictures.device
    shift = torch.empty(count, 2, device=device).uniform_(-0.06, 0.06)
    theta = torch.eye(2, 3, device=device).repeat(count, 1, 1)
    theta[:, :, 2] = shift
    theta[:, :, :2] *= torch.empty(count, 1, 1, device=device).uniform_(0.93, 1.07)
    grid = F.affine_grid(theta, list(pictures.shape), align_corners=False)
    x = F.grid_sample(pictures, grid, padding_mode="border", align_corners=False)
    blurred = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    x = torch.where(torch.rand(count, 1, 1, 1, device=device) < 0.4, blurred, x)
    level = torch.rand(count, 1, 1, 1, device=device) * 0.12 * (torch.rand(count, 1, 1, 1, device=device) < 0.5)
    return x + torch.randn_like(x) * level


@torch.no_grad()
def accuracy(networks, pictures: torch.Tensor, layout: Layout) -> dict[str, float]:
    windows, name, style = labelled_windows(pictures, layout)
    right = [(networks["object"](w).argmax(1) == n) for w, n in zip(windows.split(512), name.split(512), strict=True)]
    styles = [(networks["style"](w).argmax(1) == s) for w, s in zip(windows.split(512), style.split(512), strict=True)]
    return {"object": torch.cat(right).float().mean().item(), "style": torch.cat(styles).float().mean().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.time()
    names = load_names()
    # held-out subjects are classes too: the bench asks which of all things a picture shows
    everything = np.arange(len(names))
    compositor = Compositor(np.load(BUILD / "sprites.npz")["rgba"], device)
    vae = build_vae().to(device)
    vae.load_state_dict(load_file(BUILD / "run" / "vae.safetensors"))
    vae.requires_grad_(False).eval()
    networks = {role: net.to(device) for role, net in build_classifiers(len(names)).items()}
    parameters = [p for net in networks.values() for p in net.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.02, fused=device == "cuda")
    for step in range(args.steps):
        layout = random_layout(args.batch, everything, pairs=0.4, seed=args.seed * 1_000_003 + step).to(device)
        pictures = compositor(layout)
        if step % 2:
            with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                pictures = vae.decode(vae.encode(pictures).latent_dist.mode()).sample.float()
        windows, name, style = labelled_windows(disturb(pictures), layout)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 100) * 0.5 * (1 + np.cos(np.pi * step / args.steps))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(networks["object"](windows).float(), name, label_smoothing=0.05)
            loss = loss + F.cross_entropy(networks["style"](windows).float(), style)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 500 == 0:
            print(f"classifiers step {step + 1}/{args.steps} loss {loss.item():.3f} {time.time() - started:.0f} s", flush=True)

    for network in networks.values():
        network.half().float().eval()
    scores = {}
    for kind, pairs in (("alone", 0.0), ("pairs", 1.0)):
        layout = random_layout(4000 if device == "cuda" else 64, everything, pairs=pairs, seed=99).to(device)
        with torch.no_grad():
            pictures = compositor(layout)
            seen = torch.cat([vae.decode(vae.encode(x).latent_dist.mode()).sample for x in pictures.split(128)])
        scores[kind] = {"real": accuracy(networks, pictures, layout), "autoencoded": accuracy(networks, seen, layout)}
    run = BUILD / "run"
    tensors = {f"{role}.{k}": v.half().cpu().contiguous() for role, net in networks.items() for k, v in net.state_dict().items()}
    save_file(tensors, run / "classifiers.safetensors")
    (run / "classifiers.json").write_text(json.dumps(scores | {"seconds": round(time.time() - started)}, indent=1))
    print(json.dumps(scores), flush=True)


if __name__ == "__main__":
    main()
