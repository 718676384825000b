"""README.md of a taught adapter: what it is, what it was taught from, what was measured, how it is loaded. Imports no torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny_engram.model_card import front_matter

from .config import LMTrainConfig
from .texts import counted
from .validation import Measured

__all__ = ["model_card"]

# Where things lie for the one who taught is nobody else's business.
_OF_A_MACHINE = ("train_file", "validation_file", "output_dir", "resume_from_checkpoint")


def model_card(
    config: LMTrainConfig, base: str | None, steps: int, tokens: int, measured: Sequence[Measured], sizes: dict[str, Any]
) -> str:
    """Markdown with the front matter that model hubs read.

    Args:
        base: name or folder of the base model; a hub's id is named in the front matter too, of a folder its own name alone.
        tokens: of the text that was taught.
        sizes: "rows" and "bytes" of all tables, "dense" parameters beside them.
    """
    hub = base if base and not Path(base).exists() else None
    head = front_matter(
        {
            "library_name": "tiny-engram",
            "pipeline_tag": "text-generation",
            "tags": ["engram", "adapter"],
            "base_model": hub,
            "base_model_relation": "adapter" if hub else None,
        }
    )
    name = hub or (Path(base).name if base else "BASE_MODEL")
    first, last = (measured[0], measured[-1]) if measured else (None, None)
    lines = [head, f"# Engram layers for {name if base else 'a base model without a name'}", ""]
    lines += [
        f"Tables read by n-grams of up to {config.max_ngram} tokens in front of layers {', '.join(map(str, config.layers))}"
        f" (Engram, arXiv 2601.07372, form {config.form}): {sizes['rows']:,} rows of {config.head_dim} values, {sizes['bytes']:,} bytes"
        f" in FP8, and {sizes['dense']:,} parameters beside them. The base model is not changed.",
        "",
        f"Taught for {counted(steps, 'step')} from a text of {counted(tokens, 'token')}"
        f" ({', '.join(Path(path).name for path in config.train_file)}), in windows of {config.block_size}.",
    ]
    if first and last:
        held = "text of its own" if config.validation_file else "windows held out"
        lines += ["", f"On {last.tokens:,} tokens of {held}:", "", "| step | loss | perplexity |", "|---|---|---|"]
        lines += [f"| {each.step} | {each.loss:.4f} | {each.perplexity:.2f} |" for each in measured]
    lines += [
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "from tiny_engram.llm import EngramLayers",
        "",
        f"base = {json.dumps(name)}" + ("" if hub else "  # a folder on the machine where it was taught: write where yours is"),
        "model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)",
        'EngramLayers.from_pretrained(model, "THIS_FOLDER", tokenizer)',
        "```",
        "",
        "The settings of the run:",
        "",
        "```json",
        json.dumps({name: value for name, value in config.to_dict().items() if name not in _OF_A_MACHINE}, indent=1),
        "```",
        "",
    ]
    return "\n".join(lines)
