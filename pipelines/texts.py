"""How pipelines prepare a prompt for a tokenizer, and how much of it they read. Functions about the user's own objects."""

import sys
from collections.abc import Callable
from typing import Any

from tiny_engram.pipelines.family import call_default, cleans_captions

__all__ = [
    "behind_system_message",
    "chat_window",
    "cleaned_by_module",
    "cropped_window",
    "preprocessed",
    "sequence_window",
    "window_behind",
]

PROMPT = "\u2042prompt\u2042"  # stands in no template


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


def asked_by_user(pipe: Any, text: str) -> list[dict[str, Any]]:
    """The messages of a chat of one question."""
    return [{"role": "user", "content": text}]


def behind_system_message(pipe: Any, text: str) -> list[dict[str, Any]]:
    """As FLUX.2 does: its system message, then the prompt."""
    said = {"system": pipe.system_message, "user": text}
    return [{"role": role, "content": [{"type": "text", "text": words}]} for role, words in said.items()]


def chat_window(options: dict[str, Any], messages: Callable[[Any, str], list[dict[str, Any]]] = asked_by_user) -> Callable[[Any], int]:
    """The same, less what the tokenizer's chat template puts in front of a prompt; of a long one, what it puts behind is cut off first.

    `options` as the pipeline gives them to the template, and `messages` from it and a prompt.
    """

    def window(pipe: Any) -> int:
        tokenizer = getattr(pipe.tokenizer, "tokenizer", pipe.tokenizer)
        chat = tokenizer.apply_chat_template(messages(pipe, PROMPT), tokenize=False, **options)
        front = len(tokenizer(chat.partition(PROMPT)[0], add_special_tokens=False).input_ids)
        return sequence_window(pipe) - front + tokenizer.num_special_tokens_to_add(pair=False)

    return window


def cropped_window(pipe: Any) -> int:
    """As many tokens of a prompt as `pipe(...)` reads by default, the special ones not among them: those are cut off with the template."""
    return sequence_window(pipe) + pipe.tokenizer.num_special_tokens_to_add(pair=False)
