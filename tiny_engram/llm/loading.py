"""A causal LM and its tokenizer by a name: a folder, a GGUF file or a hub's id; and the device that they go to.

Imports tiny_engram.errors, and torch and transformers where used.
"""

from pathlib import Path
from typing import Any

from tiny_engram.errors import TinyEngramError

__all__ = ["check_device", "load_causal_lm"]


def check_device(name: Any) -> Any:
    """The torch.device of a name, once a tensor can be made there.

    Raises:
        TinyEngramError: no such device, or none that this build of torch can use.
    """
    import torch

    usable = "cpu, or cuda" if torch.cuda.is_available() else "cpu: torch finds no CUDA device here"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise TinyEngramError(f"device {str(name)!r} is none that torch knows; expected {usable}") from error
    try:
        torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        raise TinyEngramError(f"device {str(name)!r} cannot be used ({reason}); expected {usable}") from error
    return device


def load_causal_lm(name: str | Path, *, dtype: str = "float32", device: Any = "cpu") -> tuple[Any, Any]:
    """A frozen causal LM in eval mode, and its tokenizer.

    Args:
        name: a transformers folder, a .gguf file (its rows are read into `dtype`), or a hub's id; with HF_HUB_OFFLINE=1 in the
            environment only what was downloaded before.
        dtype: of the weights: float32, float16 or bfloat16.

    Raises:
        TinyEngramError: nothing of that name, a model that transformers cannot read, no such device, or the package gguf is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = check_device(device)
    path = Path(name)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(name)}
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise TinyEngramError(f"{path}: no such file; expected a causal LM's GGUF file")
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    elif not path.exists() and (path.is_absolute() or len(path.parts) > 2 or str(name)[:1] in ("~", ".")):
        raise TinyEngramError(f"{name}: no such folder; expected a transformers causal LM's, a .gguf file or a hub id (owner/name)")
    elif path.is_dir() and not (path / "config.json").is_file():
        raise TinyEngramError(f"{path}: no config.json in it; expected the folder of a transformers causal LM, or a .gguf file")
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
    except ImportError as error:
        if "gguf" not in where.get("gguf_file", "") and "gguf" not in str(error).lower():
            raise
        raise TinyEngramError(f"{path}: the package gguf, which reads it, is not installed; run: pip install gguf") from error
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise TinyEngramError(f"{name}: cannot be loaded ({reason}); expected a causal LM's folder, .gguf file or hub id") from error
    return model.to(device).eval().requires_grad_(False), tokenizer
