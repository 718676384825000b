"""A fast twin for a slow tokenizer: the same ids, and where in the text they lie, which a slow one does not tell.

Before transformers 5 pipelines are loaded with slow tokenizers. May import errors; transformers is imported where a twin is made.
"""

import weakref
from typing import Any

from tiny_engram.errors import TinyEngramError

__all__ = ["SAMPLES", "fast_tokenizer"]

# Read by both before a twin is used: cases, places where words meet punctuation, numbers, accents, white space.
SAMPLES = (
    "",
    "a photo of a Vortex-99 cat on a table",
    '  A PHOTO,  of my_dog\tand\nzqx\'s "red" (sks) [toy]; 3d: 2.5 -- end!?  ',
    "(zqx), 'zqx' zqx. zqx's x,zqx #zqx a/zqx <zqx> zqx&co 100% it's I'll 12345",
    "caf\u00e9 na\u00efve \u00fcber Br\u00f8n \u00c9T\u00c9 \u0142\u00f3d\u017a",
)
_twins: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], Any]] = weakref.WeakKeyDictionary()


def fast_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer itself if it is a fast one, else its twin, made once and again when tokens were added to it.

    Raises:
        TinyEngramError: transformers cannot convert it, or the two do not read the same ids in `SAMPLES`.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        return tokenizer
    state = tuple(tokenizer.get_added_vocab().items()), tuple(tokenizer.all_special_ids), tokenizer.model_max_length
    known = _twins.get(tokenizer)
    if known is None or known[0] != state:
        known = _twins[tokenizer] = state, _converted(tokenizer)
    return known[1]


def _converted(slow: Any) -> Any:
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import convert_slow_tokenizer

    name = type(slow).__name__
    try:
        backend = convert_slow_tokenizer(slow)
    except Exception as error:  # whatever a converter stumbles over, the way out is the same
        why = str(error).strip().partition("\n")[0]
        raise TinyEngramError(
            f"{name} is a slow tokenizer, which does not tell where words lie, and transformers makes no fast one of it ({why}), expected "
            f"a fast tokenizer; load {name}Fast and give it to the pipeline"
        ) from error
    named = {key: value for key, value in slow.special_tokens_map.items() if value}
    twin = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        added_tokens_decoder=slow.added_tokens_decoder,
        model_max_length=slow.model_max_length,
        padding_side=slow.padding_side,
        truncation_side=slow.truncation_side,
        **named,
    )
    for text in SAMPLES:
        for special in (True, False):
            expected, found = (one(text, add_special_tokens=special).input_ids for one in (slow, twin))
            if found != expected:
                raise TinyEngramError(
                    f"{name} reads {text!r} as {expected}, the fast tokenizer that transformers makes of it as {found}, expected the same; "
                    f"load {name}Fast and give it to the pipeline"
                )
    return twin
