"""The file of facts: one safetensors file, their rows beside a description of them, written whole or not at all and read with bounds.

Imports torch, concept_file, errors and neighbours.
"""

import json
from pathlib import Path
from typing import Any

import torch

from tiny_engram import concept_file
from tiny_engram.errors import TinyEngramError

from .fact_config import FactsConfig
from .fact_spelling import Fact, Spelled

__all__ = ["Saved", "read_facts", "write_facts"]

KIND = "facts"
FORMAT = 1
_MOST_KEYS, _MOST_IDS = 10_000, 64

Saved = tuple[Spelled, float, int]  # with the margin and the steps of its teaching


def write_facts(path: Path, config: FactsConfig, saved: list[Saved], payload: torch.Tensor, scale: torch.Tensor) -> Path:
    """payload float8_e4m3fn `[facts, layers, columns, head_dim]`, scale uint8 `[..., head_dim / 32]`, in the order of `saved`.

    Raises:
        ConceptFileError: it cannot be written, or is too large.
    """
    about = [
        {
            "trigger": each.fact.trigger,
            "answer": each.fact.answer,
            "prompt": each.fact.prompt,
            "aliases": list(each.fact.aliases),
            "owner": each.fact.owner,
            "ids": [list(key) for key in each.keys],
            "canonical": list(each.canonical),
            "margin": round(margin, 4),
            "steps": steps,
        }
        for each, margin, steps in saved
    ]
    # As a tensor: a header has bounds that a few thousand facts would pass.
    text = torch.frombuffer(bytearray(json.dumps(about, ensure_ascii=False, separators=(",", ":")).encode()), dtype=torch.uint8)
    described = {"format": FORMAT, "kind": KIND, "config": config.to_dict(), "facts": len(saved)}
    tensors = {"facts": text, "payload": payload.contiguous(), "scale": scale.contiguous()}
    return concept_file.write(path, tensors, {concept_file.KEY: json.dumps(described, separators=(",", ":")), "format": "pt"})


def read_facts(path: str | Path) -> tuple[FactsConfig, list[Saved], torch.Tensor, torch.Tensor]:
    """What `write_facts` wrote.

    Raises:
        TinyEngramError: no such file, a damaged one, or one of something else.
    """
    path = Path(path)
    tensors, described, _ = concept_file.read(path, "facts")
    if described.get("kind") != KIND:
        raise TinyEngramError(
            f"{path}: holds {described.get('kind', 'a concept')!r}, expected facts; it is for tiny-engram generate, perhaps"
        )
    try:
        config = FactsConfig.from_dict(described["config"])
        payload, scale = tensors["payload"], tensors["scale"]
        about = json.loads(bytes(tensors["facts"].tolist()))
        shape = (described["facts"], len(config.layers or ()), config.columns, config.head_dim)
        if tuple(payload.shape) != shape or payload.dtype != torch.float8_e4m3fn:
            raise ValueError(f"rows {list(payload.shape)} for {list(shape)}")
        if tuple(scale.shape) != (*shape[:-1], shape[-1] // 32) or scale.dtype != torch.uint8:
            raise ValueError(f"scales {list(scale.shape)} for rows {list(shape)}")
        if len(about) != shape[0]:
            raise ValueError(f"{len(about)} facts described, {shape[0]} held")
        saved = [_saved(each) for each in about]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise TinyEngramError(f"{path}: not a sound facts file ({' '.join(str(error).split())[:200]}); copy it again") from error
    return config, saved, payload, scale


def _saved(each: dict[str, Any]) -> Saved:
    fact = Fact(each["trigger"], each["answer"], each["prompt"], tuple(each["aliases"]), each["owner"])
    keys = tuple(tuple(key) for key in each["ids"])
    canonical = tuple(each["canonical"])
    sound = 0 < len(keys) <= _MOST_KEYS and all(0 < len(key) <= _MOST_IDS for key in (*keys, canonical))
    if not sound or not all(isinstance(i, int) and 0 <= i < 2**31 for key in (*keys, canonical) for i in key):
        raise ValueError(f"token ids of {fact.trigger!r}")
    return Spelled(fact, keys, canonical, ()), float(each["margin"]), int(each["steps"])
