"""How pipelines prepare a prompt for a tokenizer, and how much of it they read. Functions about the user's own objects."""

import sys
from collections.abc import Callable
from typing import Any

from tiny_engram.pipelines.family import call_default, cleans_captions

__all__ = ["chat_window", "cleaned_by_module", "preprocessed", "sequence_window", "window_behind"]


def preprocessed(pipe: Any, text: str) -> str:
    """As PixArt and Sana do: in lower case, and cleaned where `pipe(...)` does that by default and the libraries for it are there."""
    clean = bool(call_default(pipe, "clean_caption")) and cleans_captions()
    return pipe._text_preprocessing(text, clean_caption=clean)[0]


def cleaned_by_module(pipe: Any, text: str) -> str:
    """As Wan does: by the function `prompt_clean` of the pipeline's own module."""
    owner = next(cls for cls in type(pipe).__mro__ if hasattr(sys.modules[cls.__module__], "prompt_clean"))
    return sys.modules[owner.__module__].prompt_clean(text)


def sequence_window(pipe: Any) -> int:
    """Tokens that `pipe(...)` reads of a prompt by default."""
    return int(call_default(pipe, "max_sequence_length"))


def window_behind(template: Callable[[Any], str]) -> Callable[[Any], int]:
    """The same, less those of a text that the pipeline puts in front: `template` gives it for a pipeline."""

    def window(pipe: Any) -> int:
        tokenizer = pipe.tokenizer
        alone, special = len(tokenizer(template(pipe)).input_ids), len(tokenizer("").input_ids)
        return sequence_window(pipe) - alone + special

    return window


def chat_window(options: dict[str, Any]) -> Callable[[Any], int]:
    """The same, less those of the tokenizer's chat template; `options` as the pipeline gives them to it."""

    def window(pipe: Any) -> int:
        tokenizer = getattr(pipe.tokenizer, "tokenizer", pipe.tokenizer)
        empty = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False, **options)
        return sequence_window(pipe) - len(tokenizer(empty, add_special_tokens=False).input_ids)

    return window
