"""Makes subjects.npz, the drawings and views of all subjects in one file.

    python -m benchmarks.personalization.make_subjects

Needs the data of assets/recipe: run its sources.py, sprites.py and renders.py first. The file holds two byte strings:
`sheet`, one lossless WebP picture of all sprites (row after row of 12), and `index`, JSON that says whose they are and
which names the judges know, in their order, with whether the base was trained on them.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.personalization.subjects import ASSET, EMOJI, KNOWN, OBJECTS, SIDE
from tiny_engram.files import write_atomically

BUILD = Path(__file__).resolve().parents[2] / "build" / "base"
COLUMNS = 12


def gather() -> tuple[dict[str, np.ndarray], dict[str, bool]]:
    """Sprites uint8 `[views, 128, 128, 4]` by name, and the judges' names with whether the base was trained on them."""
    missing = [name for name in ("sprites.npz", "names.json", "renders.npz") if not (BUILD / name).exists()]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not in {BUILD}: run sprites.py and renders.py of assets/recipe first")
    names = {entry["name"]: not entry["held_out"] for entry in json.loads((BUILD / "names.json").read_text())}
    with np.load(BUILD / "sprites.npz") as file:
        drawn = dict(zip(names, file["rgba"], strict=True))
    with np.load(BUILD / "renders.npz") as file:
        rendered = dict(zip(file["names"].tolist(), file["rgba"], strict=True))
    for entry in EMOJI:
        if names[entry.name]:
            raise SystemExit(f"{entry.name}: the base was trained on it; expected a name that is held out")
    for name in KNOWN:
        if not names[name]:
            raise SystemExit(f"{name}: held out from the base; expected a name that it was trained on")
    sprites = {name: drawn[name] for name in (*(entry.name for entry in EMOJI), *KNOWN)}
    return sprites | {entry.name: rendered[entry.name] for entry in OBJECTS}, names


def encode(cells: np.ndarray) -> bytes:
    """uint8 `[N, 128, 128, 4]` as one lossless picture, exact to the byte."""
    rows = -(-len(cells) // COLUMNS)
    full = np.zeros((rows * COLUMNS, *cells.shape[1:]), np.uint8)
    full[: len(cells)] = cells
    sheet = full.reshape(rows, COLUMNS, SIDE, SIDE, 4).swapaxes(1, 2).reshape(rows * SIDE, COLUMNS * SIDE, 4)
    blob = io.BytesIO()
    Image.fromarray(sheet).save(blob, format="WEBP", lossless=True, quality=100, method=6, exact=True)
    return blob.getvalue()


def main() -> None:
    sprites, names = gather()
    index = {"sprites": [[name, len(views)] for name, views in sprites.items()], "names": list(names.items())}
    print(f"packing {sum(map(len, sprites.values()))} sprites of {len(sprites)} subjects, half a minute", flush=True)
    blob = io.BytesIO()
    np.savez(
        blob,
        sheet=np.frombuffer(encode(np.concatenate(list(sprites.values()))), np.uint8),
        index=np.frombuffer(json.dumps(index, separators=(",", ":")).encode(), np.uint8),
    )
    write_atomically(ASSET, blob.getvalue())
    print(f"{ASSET.name}: {ASSET.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
