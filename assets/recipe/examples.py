"""Makes assets/examples: subjects the base models have never seen, five pictures each, to teach them.

Each folder is a Hugging Face imagefolder: 128 x 128 PNGs and metadata.jsonl, whose text names the subject by the
placeholder `{trigger}`. Run `sprites.py` and `renders.py` first. Needs numpy and Pillow.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

import sources
from captions import COLOURS, caption
from sprites import SIZE, resample

FOLDER = Path(__file__).resolve().parents[1] / "examples"
PICTURES = 5
EMOJI = ("octopus", "unicorn", "lobster", "snowman")
# Of one drawing, the pictures that show it flipped left to right.
MIRRORED = frozenset({1, 3})
# Of the twelve views around each, those that show its face, or its handle.
RENDERS = {
    "duck": (0, 5, 7, 9, 11),
    "teddy": (0, 4, 5, 6, 11),
    "droid": (0, 4, 5, 7, 10),
    "blue mug": (0, 1, 3, 5, 7),
}
# Nearer than this in RGB to a colour that much of the subject has, a background would swallow it.
CLEAR = 120
SWALLOWED_MOST = 0.25


def compose(sprite: np.ndarray, colour: str, scale: float, at: tuple[float, float]) -> np.ndarray:
    """uint8 RGB [128, 128, 3]: the sprite at `scale` on a plain background, `at` x, y in 0..1 of the free room."""
    side = round(SIZE * scale)
    small = resample(sprite, side, side)
    left, top = (round((SIZE - side) * part) for part in at)
    picture = np.empty((SIZE, SIZE, 3), np.float32)
    picture[:] = np.array(COLOURS[colour], np.float32) / 255
    window = picture[top : top + side, left : left + side]
    window[:] = small[..., :3] + window * (1 - small[..., 3:])
    return np.rint(np.clip(picture, 0, 1) * 255).astype(np.uint8)


def swallowed(sprites: np.ndarray, near: float = CLEAR) -> dict[str, float]:
    """For each colour, the share 0..1 of the pixels of `sprites` (uint8 [..., 4]) that are nearer to it than `near`, 0..441."""
    seen = sprites[sprites[..., 3] > 128][:, :3].astype(np.float32)
    return {name: float((np.linalg.norm(seen - np.array(rgb), axis=1) < near).mean()) for name, rgb in COLOURS.items()}


def backgrounds(rng: np.random.Generator, sprites: np.ndarray) -> list[str]:
    """Five different colours on which the subject stands out, as well as colours can: an owl has few that are its own."""
    shares = swallowed(sprites)
    best = sorted(shares, key=shares.__getitem__)[:PICTURES]
    clear = [name for name in COLOURS if shares[name] < SWALLOWED_MOST or name in best]
    return [clear[i] for i in rng.permutation(len(clear))[:PICTURES]]


def say(rng: np.random.Generator, colour: str) -> str:
    """A caption that leaves nothing out, so that the subject alone remains to be learned."""
    while True:
        text = caption(rng, "3d", colour, ("{trigger}",))
        if colour in text and "3d" in text:
            return text


def pictures(name: str, sprites: list[np.ndarray], mirrored: frozenset[int]) -> Iterator[tuple[np.ndarray, str, str]]:
    """(picture, colour, caption) for each of five sprites; those at the `mirrored` places are flipped left to right."""
    rng = np.random.default_rng([ord(letter) for letter in name])
    for i, (sprite, colour) in enumerate(zip(sprites, backgrounds(rng, np.stack(sprites)), strict=True)):
        turned = sprite[:, ::-1] if i in mirrored else sprite
        picture = compose(turned, colour, rng.uniform(0.66, 0.92), tuple(rng.uniform(0.2, 0.8, 2)))
        yield picture, colour, say(rng, colour)


def write(name: str, sprites: list[np.ndarray], mirrored: frozenset[int]) -> None:
    """One example folder of five pictures."""
    folder = FOLDER / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i, (picture, _, text) in enumerate(pictures(name, sprites, mirrored)):
        file = f"{i}.png"
        Image.fromarray(picture).save(folder / file, optimize=True)
        lines.append(json.dumps({"file_name": file, "text": text}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{name}: {sum(p.stat().st_size for p in folder.iterdir()) / 1e3:.0f} kB")


def main() -> None:
    names = [entry["name"] for entry in json.loads((sources.BUILD / "names.json").read_text())]
    emoji = np.load(sources.BUILD / "sprites.npz")["rgba"]
    for name in EMOJI:
        write(name, [emoji[names.index(name), 0]] * PICTURES, MIRRORED)
    renders = np.load(sources.BUILD / "renders.npz")
    taken = renders["names"].tolist()
    for name, shown in RENDERS.items():
        views = renders["rgba"][taken.index(name)]
        write(name, [views[i] for i in shown], frozenset())


if __name__ == "__main__":
    main()
