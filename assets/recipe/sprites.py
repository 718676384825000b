"""Makes sprites.npz, names.json and extra.npz: every subject drawn in three styles, cut out, on 128 x 128 pixels.

`subjects.txt` lists the subjects and what to call them. A subject stays when all three sets draw it and no earlier
one looks the same; the held-out ones stay in the file, marked, for personalisation. Run `sources.py` first, or let
this do it. Needs numpy, Pillow and resvg_py.
"""

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

import sources
from captions import STYLES

SIZE, LONG_SIDE = 128, 124
# Vector drawings are rendered this large: their alpha box varies, and the fit must always shrink.
RENDER = 512
EXTRA_MOST = 1200
# Mean absolute distance (0..1) of 32 x 32 thumbnails under which two drawings count as one.
TWIN = 0.045


@dataclass(frozen=True, slots=True)
class Subject:
    """One line of subjects.txt, joined with what OpenMoji knows of it."""

    name: str
    code: str
    group: str
    annotation: str
    held_out: bool
    twin_of_held_out: bool


def key(code: str) -> str:
    """A code point sequence as all three sets can be asked for it: lower case, without variation selectors."""
    return "-".join(part for part in code.lower().split("-") if part != "fe0f")


def resample(rgba: np.ndarray, width: int, height: int) -> np.ndarray:
    """float32 [height, width, 4] in 0..1, PREMULTIPLIED, of straight-alpha uint8 `rgba` [H, W, 4].

    Premultiplied, so that edges do not pick up the colour that lies under transparent pixels.
    """
    planes = rgba.astype(np.float32) / 255
    planes[..., :3] *= planes[..., 3:]
    small = [
        Image.fromarray(np.ascontiguousarray(planes[..., c])).resize((width, height), Image.Resampling.LANCZOS)
        for c in range(4)
    ]
    out = np.clip(np.stack([np.asarray(plane) for plane in small], -1), 0, 1)
    # Lanczos overshoots: no colour may be brighter than its alpha.
    out[..., :3] = np.minimum(out[..., :3], out[..., 3:])
    return out


def fit(picture: Image.Image) -> np.ndarray:
    """uint8 [128, 128, 4], straight alpha: the drawing cropped to its alpha box, its longer side 124 pixels."""
    rgba = np.asarray(picture.convert("RGBA"))
    rows, cols = np.nonzero(rgba[..., 3] > 8)
    if not len(rows):
        raise ValueError("empty picture")
    rgba = rgba[rows.min() : rows.max() + 1, cols.min() : cols.max() + 1]
    scale = LONG_SIDE / max(rgba.shape[:2])
    height, width = (max(1, round(side * scale)) for side in rgba.shape[:2])
    small = resample(rgba, width, height)
    small[..., :3] /= np.maximum(small[..., 3:], 1e-6)
    out = np.zeros((SIZE, SIZE, 4), np.uint8)
    top, left = (SIZE - height) // 2, (SIZE - width) // 2
    out[top : top + height, left : left + width] = np.rint(np.clip(small, 0, 1) * 255)
    out[out[..., 3] == 0] = 0
    return out


def over(sprite: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """float32 RGB in 0..1 of straight-alpha `sprite` [..., 4] on a plain background."""
    alpha = sprite[..., 3:].astype(np.float32) / 255
    return alpha * (sprite[..., :3].astype(np.float32) / 255) + (1 - alpha) * (np.array(colour, np.float32) / 255)


class Drawings:
    """The three sets, asked by code point."""

    def __init__(self) -> None:
        fluent = sources.fetch("fluent") / "assets"
        openmoji = sources.fetch("openmoji")
        noto = sources.fetch("noto")
        self.icons = json.loads((noto / "icons.json").read_text())
        chars = json.loads((noto / "chars.json").read_text())
        self.fluent = {key(p.stem): p for p in sorted(fluent.glob("*.webp"))}
        self.noto = {key(code): name for code, name in chars.items() if name in self.icons["icons"]}
        self.openmoji = {key(p.stem): p for p in sorted((openmoji / "color" / "svg").glob("*.svg"))}
        self.entries = json.loads((openmoji / "data" / "openmoji.json").read_text())

    def has(self, style: str, code: str) -> bool:
        return code in {"3d": self.fluent, "flat": self.noto, "outlined": self.openmoji}[style]

    def picture(self, style: str, code: str) -> Image.Image:
        if style == "3d":
            return Image.open(self.fluent[code])
        if style == "flat":
            icon = self.icons["icons"][self.noto[code]]
            width = icon.get("width", self.icons.get("width", 128))
            height = icon.get("height", self.icons.get("height", 128))
            view = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
            svg = (
                '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
                f'viewBox="{view}" width="{width}" height="{height}">{icon["body"]}</svg>'
            )
        else:
            svg = self.openmoji[code].read_text()
        # Here and not above: who imports this module for its picture arithmetic needs no SVG renderer.
        import resvg_py

        png = resvg_py.svg_to_bytes(svg_string=svg, width=RENDER, height=RENDER)
        return Image.open(io.BytesIO(bytes(png)))


def read_subjects(drawings: Drawings) -> list[Subject]:
    """subjects.txt in its own order, less the subjects one of the sets does not draw."""
    entries = {}
    for entry in drawings.entries:
        if not entry["skintone"]:
            entries.setdefault(entry["annotation"], entry)
    subjects = []
    for line in (Path(__file__).parent / "subjects.txt").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        marks = {mark for mark in "!~" if line.endswith(f" {mark}")}
        annotation, _, name = line.rstrip("!~ ").partition(" = ")
        entry = entries[annotation]
        code = key(entry["hexcode"])
        absent = [style for style in STYLES if not drawings.has(style, code)]
        if absent:
            print(f"not drawn in {', '.join(absent)}: {annotation}")
            continue
        subjects.append(Subject(name or annotation, code, entry["group"], annotation, "!" in marks, "~" in marks))
    names = [s.name for s in subjects]
    wrong = [n for n in names if names.count(n) > 1 or not n.replace(" ", "").isalpha() or n != n.lower()]
    if wrong:
        raise ValueError(f"subjects.txt: names must be unique, letters and spaces, lower case; got {wrong}")
    return subjects


def thumbnail(sprite: np.ndarray) -> np.ndarray:
    """float32 [32, 32, 4]: RGB on mid gray and alpha, slightly blurred by the averaging."""
    flat = np.concatenate([over(sprite, (140, 140, 140)), sprite[..., 3:].astype(np.float32) / 255], -1)
    return flat.reshape(32, 4, 32, 4, 4).mean((1, 3))


def twins(thumbs: np.ndarray, near: float = TWIN) -> Iterable[tuple[int, int, np.ndarray]]:
    """Pairs (earlier, later, distance by style) that look the same in at least two of the three styles."""
    for later in range(1, len(thumbs)):
        distance = np.abs(thumbs[:later] - thumbs[later]).mean((2, 3, 4))
        for earlier in np.nonzero((distance < near).sum(1) >= 2)[0]:
            yield int(earlier), later, distance[earlier]


def sprites(drawings: Drawings) -> tuple[np.ndarray, list[Subject]]:
    """uint8 [N, 3, 128, 128, 4] and its N subjects, near-duplicates and twins of held-out subjects dropped."""
    subjects = [s for s in read_subjects(drawings) if not s.twin_of_held_out]
    rgba = np.stack([[fit(drawings.picture(style, s.code)) for style in STYLES] for s in subjects])
    thumbs = np.stack([[thumbnail(sprite) for sprite in three] for three in rgba])
    dropped: set[int] = set()
    for earlier, later, distance in twins(thumbs):
        if earlier in dropped or later in dropped or subjects[later].held_out:
            continue
        dropped.add(later)
        print(f"dropped {subjects[later].name}: looks like {subjects[earlier].name} {np.round(distance, 3)}")
    keep = [i for i in range(len(subjects)) if i not in dropped]
    return rgba[keep], [subjects[i] for i in keep]


def extra(drawings: Drawings, subjects: list[Subject]) -> np.ndarray:
    """uint8 [M, 128, 128, 4]: further drawings of the three sets, for the image autoencoder alone."""
    shown = {s.code for s in read_subjects(drawings)}
    words = {word for s in subjects if s.held_out for word in s.annotation.lower().replace("-", " ").split()}
    words -= {"o", "bear"}
    found = []
    for entry in drawings.entries:
        code = key(entry["hexcode"])
        said = set(f"{entry['annotation']} {entry['tags']}".lower().replace(",", " ").replace("-", " ").split())
        # Skin tones repeat one drawing in five tints: no use to the autoencoder.
        if code in shown or entry["skintone"] or said & words:
            continue
        found += [(style, code) for style in STYLES if drawings.has(style, code)]
    order = np.random.default_rng(0).permutation(len(found))
    pictures = []
    for style, code in (found[i] for i in order):
        if len(pictures) == EXTRA_MOST:
            break
        try:
            pictures.append(fit(drawings.picture(style, code)))
        except ValueError as error:
            print(f"left out of extra: {style} {code}: {error}")
    return np.stack(pictures)


def main() -> None:
    drawings = Drawings()
    rgba, subjects = sprites(drawings)
    np.savez_compressed(sources.BUILD / "sprites.npz", rgba=rgba)
    names = [{"name": s.name, "codepoint": s.code, "group": s.group, "held_out": s.held_out} for s in subjects]
    (sources.BUILD / "names.json").write_text(json.dumps(names, indent=0) + "\n")
    held = [s.name for s in subjects if s.held_out]
    print(f"{len(names)} names, {len(held)} held out: {', '.join(held)}")
    more = extra(drawings, subjects)
    np.savez_compressed(sources.BUILD / "extra.npz", rgba=more)
    print(f"{len(more)} further pictures")
    for file in ("sprites.npz", "extra.npz"):
        print(f"{file}: {(sources.BUILD / file).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
