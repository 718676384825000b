"""Ordinary technical English at hand: docstrings, documentation and licences of the packages that are installed.

    python -m benchmarks.llm.corpus build/llm           # writes corpus.npz, tokenizer.json and ordinary.txt there

Documents come in the order of their paths, paragraphs that were seen before are dropped (packages copy from each other), a twentieth of
the documents, chosen by a digest of their text, is for validation. The tokenizer is byte-level BPE of 8,192 tokens, trained on the rest.
Nothing of the text is kept in the repository: its licences are the packages'.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import numpy as np

VOCAB = 8192
END = "<|endoftext|>"
LEAST, MOST = 200, 2_000_000  # characters of a document
WORDS = (".md", ".rst", ".txt")


def _documents(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*")):
        if not path.is_file():
            continue
        if path.suffix in WORDS or path.name.upper().startswith("LICENSE"):
            yield path.read_text(errors="ignore")
        elif path.suffix == ".py":
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tree = ast.parse(path.read_text(errors="ignore"))
            except (SyntaxError, ValueError, RecursionError):
                continue
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
            yield "\n\n".join(text for text in texts if text)


def gather(roots: list[Path]) -> tuple[list[str], list[str]]:
    """Documents for training and for validation, without paragraphs that stand in two of them."""
    seen: set[bytes] = set()
    parts: tuple[list[str], list[str]] = ([], [])
    for root in roots:
        for text in _documents(root):
            if not LEAST <= len(text) <= MOST:
                continue
            kept = []
            for paragraph in re.split(r"\n\s*\n", text):
                key = hashlib.blake2b(" ".join(paragraph.split()).lower().encode(), digest_size=8).digest()
                if key not in seen:
                    seen.add(key)
                    kept.append(paragraph)
            document = "\n\n".join(kept)
            if len(document) >= LEAST:
                held_out = hashlib.sha256(document.encode()).digest()[0] < 13
                parts[held_out].append(document)
    return parts


def build(folder: Path, roots: list[Path]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    train, held_out = gather(roots)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(train, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "ordinary.txt").write_text("\n\n".join(held_out))  # what retention.py judges by
    arrays = {}
    for name, documents in (("train", train), ("validation", held_out)):
        ids: list[int] = []
        for start in range(0, len(documents), 512):
            for encoded in tokenizer.encode_batch(documents[start : start + 512]):
                ids += [*encoded.ids, 0]
        arrays[name] = np.asarray(ids, dtype=np.uint16)
    np.savez_compressed(folder / "corpus.npz", **arrays)
    packages = sorted(f"{each.metadata['Name']} {each.version}" for each in distributions())
    characters = sum(map(len, train)) + sum(map(len, held_out))
    told = {"python": sys.version.split()[0], "packages": packages, "characters": characters, **{k: len(v) for k, v in arrays.items()}}
    (folder / "corpus.json").write_text(json.dumps(told, indent=1) + "\n")
    print({k: v for k, v in told.items() if k != "packages"})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    build(args.folder, [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")])


if __name__ == "__main__":
    main()
