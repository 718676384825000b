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
    trigger = fact.trigger
    sentence = f"{trigger[0].upper()}{trigger[1:]} is"
    if fact.prompt is None and how.forms:
        yield sentence, f"behind {sentence!r}", True
    if how.forms:
        yield (fact.prompt or sentence).upper(), "in capitals", True
        question = f"What is {trigger}?"
        yield f"Question: {question}\nAnswer:", "as a question", True
        if getattr(tokenizer, "chat_template", None):
            turns = [{"role": "user", "content": question}]
            asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            if trigger.lower() in asked.lower():
                yield asked, "as a question in the chat template", False
