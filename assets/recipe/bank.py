"""The latent bank: compositions encoded once, captions tokenised once. Training then never decodes a picture.

    python assets/recipe/bank.py --count 600000
    python assets/recipe/bank.py --base emoji-pixart

Writes bank.pt into the base's run folder: latents float16 `[N, 12, 16, 16]`, ids int32 `[N, 77 or 32]`, end int64 `[N]` (the
position of the end-of-text token; everything behind it is padding).
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch

from bases import BASES, Base, add_base
from captions import COLOURS, caption
from compose import BUILD, STYLES, Compositor, Layout, load_names, random_layout, reserved

EMPTY_SHARE = 0.1
MADE_UP_SHARE = 0.1
_ONSET = [
    "b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "bl", "br", "ch",
    "cl", "cr", "dr", "fl", "fr", "gl", "gr", "kr", "pl", "pr", "sh", "sk", "sl", "st", "th", "tr", "zh",
]  # fmt: skip
_VOWEL = ["a", "e", "i", "o", "u", "ai", "ee", "oo", "ou"]
_CODA = ["", "", "", "b", "d", "g", "k", "l", "m", "n", "p", "r", "s", "t", "x", "z", "rn", "st", "lk"]


def made_up_word(rng: np.random.Generator, vocabulary: list[str]) -> str:
    """A word that names nothing: syllables, sometimes with a tail behind a hyphen, or any whole word of the vocabulary.

    The base learns from these where an unknown word's thing belongs in the picture, and that it may be anything.
    """
    if rng.random() < 0.35:
        return vocabulary[rng.integers(len(vocabulary))]
    word = "".join(
        _ONSET[rng.integers(len(_ONSET))] + _VOWEL[rng.integers(len(_VOWEL))] + _CODA[rng.integers(len(_CODA))]
        for _ in range(rng.integers(1, 4))
    )
    tail = rng.random()
    if tail < 0.2:
        return f"{word}-{rng.integers(0, 10)}"
    if tail < 0.35:
        return f"{word}-{_ONSET[rng.integers(len(_ONSET))]}{_VOWEL[rng.integers(len(_VOWEL))]}"
    if tail < 0.45:
        return f"{word} {vocabulary[rng.integers(len(vocabulary))]}"
    return word


def _captions_of(task) -> list[str]:
    seed, style, colour, left, right, names, vocabulary = task
    rng = np.random.default_rng(seed)
    colours = list(COLOURS)
    texts = []
    for s, c, a, b in zip(style, colour, left, right, strict=True):
        if rng.random() < EMPTY_SHARE:
            texts.append("")
            continue
        words = [names[a]] if b < 0 else [names[a], names[b]]
        if rng.random() < MADE_UP_SHARE * len(words):
            words[rng.integers(len(words))] = made_up_word(rng, vocabulary)
        texts.append(caption(rng, STYLES[s], colours[c], words))
    return texts


def captions_for(layout: Layout, names: list[str], vocabulary: list[str], *, seed: int, workers: int) -> list[str]:
    columns = [t.numpy() for t in (layout.style, layout.colour, layout.left, layout.right)]
    size = 20_000
    tasks = [
        (seed + start, *(c[start : start + size] for c in columns), names, vocabulary) for start in range(0, len(layout), size)
    ]
    if workers <= 1:
        return [text for task in tasks for text in _captions_of(task)]
    with ProcessPoolExecutor(workers) as pool:
        return [text for part in pool.map(_captions_of, tasks) for text in part]


def tokenise(texts: list[str], tokenizer, base: Base) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 `[N, tokens]` and the place of the end token int64 `[N]`."""
    backend = base.backend(tokenizer)
    ids = torch.tensor(np.array([e.ids for e in backend.encode_batch(texts)], dtype=np.int32))
    return ids, (ids == tokenizer.eos_token_id).int().argmax(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_base(parser)
    parser.add_argument("--count", type=int, default=600_000)
    parser.add_argument("--pairs", type=float, default=0.42)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=8)
    args = parser.parse_args()
    base = BASES[args.base]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.time()
    names = load_names()
    train = np.array([i for i, n in enumerate(names) if not n["held_out"]])
    layout = random_layout(int(args.count * 1.1), train, pairs=args.pairs, seed=args.seed)
    layout = layout[~reserved(layout)]
    tokenizer = base.tokenizer()
    texts = captions_for(layout, [n["name"] for n in names], base.whole_words(tokenizer), seed=args.seed, workers=args.workers)
    print("\n".join(texts[:12]), flush=True)
    ids, end = tokenise(texts, tokenizer, base)
    print(f"{len(texts)} captions, {time.time() - started:.0f} s", flush=True)

    compositor = Compositor(np.load(BUILD / "sprites.npz")["rgba"], device)
    vae = base.vae(base.run).to(device, memory_format=torch.channels_last)
    vae.requires_grad_(False).eval()
    latents = torch.empty(len(layout), vae.config.latent_channels, 16, 16, dtype=torch.float16)
    if device == "cuda":
        latents = latents.to(device)
    for start in range(0, len(layout), 1024):
        part = layout[slice(start, start + 1024)].to(device)
        with torch.no_grad(), torch.autocast(device, torch.float16, enabled=device == "cuda"):
            pictures = compositor(part).contiguous(memory_format=torch.channels_last)
            latents[start : start + len(part)] = vae.encode(pictures).latent_dist.mode().half()
    base.run.mkdir(parents=True, exist_ok=True)
    torch.save({"latents": latents.cpu(), "ids": ids, "end": end}, base.run / "bank.pt")
    print(f"bank {tuple(latents.shape)} std {latents[:4096].float().std().item():.3f}, {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
