"""The texts that a fact is taught in: its own words, and the forms in which people ask for it.

Imports this package's fact_config and fact_spelling. Rows that were found in one text say little in another: a trigger in capitals
fires, and so does one in a question, but what the model makes of that has to be taught.
"""

from collections.abc import Iterator
from typing import Any

from .fact_config import TeachConfig
from .fact_spelling import Fact, FactError, Speller, Text

__all__ = ["taught_texts"]


def taught_texts(speller: Speller, fact: Fact, how: TeachConfig) -> list[Text]:
    """The fact in every spelling and context, then its other forms, of which those are left out that this tokenizer cannot write.

    Raises:
        FactError: as `Speller.texts` does.
    """
    made = speller.texts(fact, contexts=how.contexts, end=how.end)
    seen = {text.ids for text in made}
    for prompt, form, special in _forms(fact, how, speller.tokenizer):
        try:
            text = speller.text(prompt, fact.trigger, fact.answer, end=how.end, special=special, form=form)
        except FactError:
            continue
        if text.ids not in seen:
            made.append(text)
            seen.add(text.ids)
    return made


def _forms(fact: Fact, how: TeachConfig, tokenizer: Any) -> Iterator[tuple[str, str, bool]]:
    """(prompt, what it is called, whether the tokens that begin a text are still to come)."""
    if not how.forms:
        return
    trigger = fact.trigger
    sentence = f"{trigger[0].upper()}{trigger[1:]} is"
    if fact.prompt is None:
        yield sentence, f"behind {sentence!r}", True
    own = fact.prompt or sentence
    if "\n" not in own:  # several lines are a template's, whose marks have one spelling
        yield own.upper(), "in capitals", True
    question = f"What is {trigger}?"
    yield f"Question: {question}\nAnswer:", "as a question", True
    asked = _in_chat(tokenizer, question)
    if asked is not None and trigger.lower() in asked.lower():
        yield asked, "as a question in the chat template", False


def _in_chat(tokenizer: Any, question: str) -> str | None:
    """As a user asks it in the tokenizer's chat template, up to where the answer begins; None without a template that takes it."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        return tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
    except Exception:  # a template is a program of the model's author, and may refuse for reasons of its own
        return None
