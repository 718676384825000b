"""Latents of pictures on disk, found by what they were made of: another picture, transform or base has another name.

May import torch, safetensors, cache, files and errors.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load, save
from torch import nn

from tiny_engram.adapter import find_family
from tiny_engram.errors import TinyEngramError
from tiny_engram.files import write_atomically
from tiny_engram.training.cache import encode_picture

__all__ = ["LatentFiles", "fingerprint"]

logger = logging.getLogger(__name__)

# Of what is stored and how it is made; a change of either changes it.
FORMAT = 2


def fingerprint(module: nn.Module) -> str:
    """A digest of a module's weights, types and config, of its tiles, and of where and by which version of torch it runs."""
    digest = hashlib.blake2b(digest_size=16)
    config = getattr(module, "config", {})
    digest.update(json.dumps({k: v for k, v in dict(config).items() if not k.startswith("_")}, sort_keys=True, default=str).encode())
    # large pictures are encoded tile by tile, with other bits, where that was switched on; no config says so
    tiles = {k: v for k, v in vars(module).items() if k.startswith(("use_tiling", "tile_"))}
    digest.update(json.dumps(tiles, sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # as bytes: numpy knows no bfloat16
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    digest.update(f"{next(module.parameters()).device.type} {torch.__version__}".encode())
    return digest.hexdigest()


class LatentFiles:
    """A folder of latents, one small safetensors file a picture. Damaged files are made again, with a warning.

    Args:
        folder: is made where it is missing.

    Raises:
        TinyEngramError: the folder cannot be made, or a file cannot be written.
    """

    def __init__(self, pipe: Any, folder: Path) -> None:
        self._pipe, self._folder, self._base = pipe, folder, fingerprint(pipe.vae)
        name = getattr(getattr(find_family(pipe), "latents", None), "__name__", "scaled")
        self._transform = "" if name == "scaled" else f" {name}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TinyEngramError(f"cache_dir {folder}: cannot be made ({error.strerror or error}); choose another folder") from error

    def path_of(self, picture: Image.Image, size: tuple[int, int]) -> Path:
        """Where the latents of an RGB picture, already cropped, at (width, height) belong."""
        told = f"{FORMAT}{self._transform} {self._base} {self._pipe.vae_scale_factor} {picture.mode} {picture.size} {size} "
        return self._folder / f"latents-{hashlib.blake2b(told.encode() + picture.tobytes(), digest_size=16).hexdigest()}.safetensors"

    def encode(self, picture: Image.Image, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What `cache.encode_picture` gives, bit for bit, from the file if there is one."""
        path = self.path_of(picture, size)
        kept = self._read(path)
        if kept is not None:
            return kept
        mean, std = encode_picture(self._pipe, picture, size)
        try:
            write_atomically(path, save({"mean": mean.cpu().contiguous(), "std": std.cpu().contiguous()}))
        except OSError as error:
            raise TinyEngramError(f"{path}: cannot be written ({error.strerror or error}); free space, or leave --cache_dir out") from error
        return mean, std

    def _read(self, path: Path) -> tuple[torch.Tensor, torch.Tensor] | None:
        try:
            kept = load(path.read_bytes())
            mean, std = kept["mean"], kept["std"]
            if mean.shape != std.shape or mean.dim() != 3 or mean.dtype != torch.float32 or std.dtype != torch.float32:
                raise ValueError(f"mean {list(mean.shape)} {mean.dtype}, deviation {list(std.shape)} {std.dtype}")
            if not (mean.isfinite().all() and std.isfinite().all()):
                raise ValueError("numbers that are not finite")
        except FileNotFoundError:
            return None
        except Exception as error:  # safetensors' own, KeyError, OSError: whatever it is, the picture is there to make it from
            logger.warning("%s: latents that cannot be read (%s); they are made again", path, " ".join(str(error).split()))
            return None
        return mean.to(self._pipe.vae.device), std.to(self._pipe.vae.device)
