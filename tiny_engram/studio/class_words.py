"""What teaching would say of a class word, while it is typed. May import trigger_book and the class words of training."""

from tiny_engram.boundaries import text_of_token
from tiny_engram.studio.trigger_book import TriggerBook
from tiny_engram.training.class_word import CARRIERS, place_of_word

__all__ = ["class_word_hint"]

MOST_WORD = 60  # characters
MOST_PIECES = 6


def class_word_hint(word: str | None, book: TriggerBook) -> str:
    """One line on a word that will be refused, or gives a poor start; empty for an empty one, and one that the base knows."""
    word = " ".join((word or "").split())
    if not word:
        return ""
    if len(word) > MOST_WORD:
        return f"the class word has {len(word):,} characters, expected a plain word of at most {MOST_WORD}, such as duck; shorten it"
    for role, voice in book.voices.items():
        read = [(text, *book.encode(role, text.format(word))) for text in CARRIERS]
        found = [(ids, place) for text, ids, offsets in read if (place := place_of_word(text, word, offsets)) is not None]
        if not found:
            return f"{word!r} is not read as tokens of its own by the base ({role}); write a plain word that it knows, such as duck"
        ids, (first, count) = found[0]
        special = set(ids[first : first + count]) & set(voice.tokenizer.all_special_ids)
        if count > len(word.split()) or special or not any(c.isalnum() for c in word):
            tokens = voice.tokenizer.convert_ids_to_tokens(ids[first : first + count])
            pieces = [text_of_token(token, byte_level=True).strip() for token in tokens]
            shown = " + ".join(pieces[:MOST_PIECES]) + (" ..." if count > MOST_PIECES else "")
            said = "" if count == 1 or "\ufffd" in shown else f" (it reads {shown})"
            return f"the base does not know {word!r} as one word{said}; a plain one, such as duck, gives a better start"
    return ""
