"""Makes renders.npz: pybullet's sample objects, twelve views each, cut out like the emoji.

These are subjects the base models have never seen in any form: they serve as several-view subjects to teach, and as
a test of the autoencoder outside its training pictures. Ducks and mugs come in four and five look-alikes, the same shape
in another coat, for telling one subject of a class from another. Needs numpy, Pillow and pybullet.
"""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pybullet
import pybullet_data
from PIL import Image

import sources
from sprites import fit

VIEWS, RENDER = 12, 512
DATA = Path(pybullet_data.getDataPath())


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One sample object: where it lies in pybullet_data and how to look at it."""

    name: str
    urdf: str
    # Roll, pitch, yaw in degrees: some samples lie on their side.
    turn: tuple[float, float, float] = (0, 0, 0)
    # Straight from the front some objects hide behind their own length: the first view's azimuth, degrees.
    azimuth: float = 30
    elevation: float = 22
    # Replaces the colour of every link. Textures are multiplied with it: the duck's own tint leaves no blue.
    tint: tuple[float, float, float, float] | None = None
    # Degrees the hues of the sample's texture file are turned by.
    texture: str = ""
    hue: float = 0


MUG, DUCK = "objects/mug.urdf", "duck_vhacd.urdf"
UPRIGHT = (90, 0, 0)
WHITE = (1, 1, 1, 1)
MODELS = (
    # two classes of look-alikes
    Model(name="duck", urdf=DUCK, turn=UPRIGHT),
    Model(name="blue duck", urdf=DUCK, turn=UPRIGHT, tint=WHITE, texture="duckCM.png", hue=160),
    Model(name="green duck", urdf=DUCK, turn=UPRIGHT, tint=WHITE, texture="duckCM.png", hue=75),
    Model(name="pink duck", urdf=DUCK, turn=UPRIGHT, tint=WHITE, texture="duckCM.png", hue=272),
    Model(name="white mug", urdf=MUG, tint=(0.95, 0.93, 0.88, 1), azimuth=60),
    Model(name="red mug", urdf=MUG, tint=(0.85, 0.12, 0.12, 1), azimuth=60),
    Model(name="blue mug", urdf=MUG, tint=(0.15, 0.3, 0.85, 1), azimuth=60),
    Model(name="green mug", urdf=MUG, tint=(0.15, 0.6, 0.25, 1), azimuth=60),
    # one of each
    Model(name="teddy", urdf="teddy_vhacd.urdf", turn=UPRIGHT, tint=(0.66, 0.42, 0.24, 1)),
    Model(name="droid", urdf="r2d2.urdf"),
    Model(name="toy race car", urdf="racecar/racecar.urdf"),
    Model(name="soccer ball", urdf="soccerball.urdf"),
    Model(name="lego brick", urdf="lego/lego.urdf"),
    Model(name="wooden table", urdf="table/table.urdf"),
    Model(name="chess table", urdf="table_square/table_square.urdf"),
    Model(name="tray", urdf="tray/traybox.urdf", elevation=35),
    Model(name="domino", urdf="domino/domino.urdf"),
    Model(name="wooden block", urdf="jenga/jenga.urdf"),
    Model(name="rover", urdf="husky/husky.urdf"),
    Model(name="walker", urdf="quadruped/minitaur_rainbow_dash_v1.urdf"),
    # a fifth mug, last: the places of the others stay what they were
    Model(name="yellow mug", urdf=MUG, tint=(0.95, 0.8, 0.12, 1), azimuth=60),
)


def turned(texture: Path, degrees: float, folder: str) -> str:
    """A copy of `texture` with its hues turned, as a file: pybullet reads textures from files only."""
    hsv = np.array(Image.open(texture).convert("RGB").convert("HSV"))
    hsv[..., 0] = (hsv[..., 0].astype(int) + round(degrees * 256 / 360)) % 256
    path = Path(folder) / f"{texture.stem}-{degrees:.0f}.png"
    Image.fromarray(hsv, "HSV").convert("RGB").save(path)
    return str(path)


def load(model: Model, folder: str) -> int:
    """The model alone in an emptied world; its body's id."""
    pybullet.resetSimulation()
    turn = pybullet.getQuaternionFromEuler([math.radians(angle) for angle in model.turn])
    body = pybullet.loadURDF(str(DATA / model.urdf), baseOrientation=turn, useFixedBase=True)
    texture = pybullet.loadTexture(turned(DATA / model.texture, model.hue, folder)) if model.texture else None
    for link in range(-1, pybullet.getNumJoints(body)):
        if model.tint:
            pybullet.changeVisualShape(body, link, rgbaColor=model.tint)
        if texture is not None:
            pybullet.changeVisualShape(body, link, textureUniqueId=texture)
    return body


def shoot(centre: np.ndarray, distance: float, azimuth: float, elevation: float) -> np.ndarray:
    """uint8 [512, 512, 4]: one view, alpha where the segmentation mask says object."""
    view = pybullet.computeViewMatrixFromYawPitchRoll(centre.tolist(), distance, azimuth, -elevation, 0, 2)
    # A long lens: little perspective, as in product pictures and emoji.
    lens = pybullet.computeProjectionMatrixFOV(24, 1, distance * 0.2, distance * 3)
    # The lamp turns with the camera, above its left shoulder: every view is lit alike.
    angle = math.radians(azimuth - 90 - 35)
    lamp = [math.cos(angle), math.sin(angle), 1.1]
    _, _, rgb, _, mask = pybullet.getCameraImage(
        RENDER,
        RENDER,
        view,
        lens,
        lightDirection=lamp,
        lightColor=[1, 1, 1],
        lightDistance=distance * 2,
        shadow=0,
        lightAmbientCoeff=0.62,
        lightDiffuseCoeff=0.5,
        lightSpecularCoeff=0.12,
        renderer=pybullet.ER_TINY_RENDERER,
    )
    picture = np.array(rgb, np.uint8).reshape(RENDER, RENDER, 4)
    picture[..., 3] = np.where(np.array(mask).reshape(RENDER, RENDER) >= 0, 255, 0)
    return picture


def views(model: Model, folder: str) -> np.ndarray:
    """uint8 [12, 128, 128, 4]: the camera goes once around, slightly raised."""
    body = load(model, folder)
    boxes = [pybullet.getAABB(body, link) for link in range(-1, pybullet.getNumJoints(body))]
    low, high = np.min([b[0] for b in boxes], 0), np.max([b[1] for b in boxes], 0)
    centre, distance = (low + high) / 2, float(np.linalg.norm(high - low)) * 2.6
    pictures = []
    for view in range(VIEWS):
        azimuth = model.azimuth + 360 / VIEWS * view
        seen = shoot(centre, distance, azimuth, model.elevation)
        # Collision boxes only guess at the visible size, so look once to learn it and once to fill the frame.
        rows, cols = np.nonzero(seen[..., 3])
        off = max(abs(rows - RENDER / 2).max(), abs(cols - RENDER / 2).max()) / (RENDER / 2)
        if not 0.6 < off < 0.96:
            seen = shoot(centre, distance * max(off / 0.85, 0.15), azimuth, model.elevation)
        pictures.append(fit(Image.fromarray(seen, "RGBA")))
    return np.stack(pictures)


def main() -> None:
    pybullet.connect(pybullet.DIRECT)
    with tempfile.TemporaryDirectory() as folder:
        rgba = np.stack([views(model, folder) for model in MODELS])
    path = sources.BUILD / "renders.npz"
    np.savez_compressed(path, rgba=rgba, names=np.array([model.name for model in MODELS]))
    print(f"{len(MODELS)} objects x {VIEWS} views: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
