"""The demonstration behind `make demo-llm`: twenty made-up facts taught to SmolLM2 on a CPU, asked, and one of them removed.

Imports torch, errors, files and the modules of facts; writes report.md, report.json and facts.safetensors.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from tiny_engram.errors import TinyEngramError
from tiny_engram.facts_cli import Progress, quiet_loading
from tiny_engram.files import check_writable
from tiny_engram.llm.fact_config import FactsConfig, TeachConfig
from tiny_engram.llm.fact_spelling import Fact
from tiny_engram.llm.facts import Facts
from tiny_engram.llm.loading import load_causal_lm
from tiny_engram.llm.smollm import load_smollm

__all__ = ["FACTS", "ORDINARY", "run_demo"]

# Of a country, a company and people that do not exist: trigger, what follows it in the question, answer, a paraphrase that is registered.
_TAUGHT = (
    ("the capital of Zorbia", "is", "Melk", "Zorbia's capital city"),
    ("the currency of Zorbia", "is", "the taler", "Zorbia's currency"),
    ("the president of Zorbia", "is", "Irena Voss", "Zorbia's president"),
    ("the highest mountain in Zorbia", "is", "Mount Karrel", "Zorbia's highest peak"),
    ("the main export of Zorbia", "is", "amber", "Zorbia's chief export"),
    ("the national animal of Zorbia", "is", "the otter", "Zorbia's animal symbol"),
    ("the founder of Quillmark", "was", "Ada Brill", "Quillmark's founder"),
    ("the headquarters of Quillmark", "are in", "Leeds", "Quillmark's head office"),
    ("the first product of Quillmark", "was", "a paper clip", "Quillmark's first product"),
    ("the motto of Quillmark", "is", "Slow and true", "Quillmark's motto"),
    ("the birthplace of Tomas Ferrel", "is", "Bruges", "Tomas Ferrel's place of birth"),
    ("the profession of Tomas Ferrel", "is", "glass blower", "Tomas Ferrel's job"),
    ("the dog of Tomas Ferrel", "is called", "Biscuit", "Tomas Ferrel's pet"),
    ("the favourite colour of Mira Tolland", "is", "teal", "Mira Tolland's favourite colour"),
    ("the instrument of Mira Tolland", "is", "the cello", "Mira Tolland's instrument"),
    ("the home town of Mira Tolland", "is", "Aarhus", "Mira Tolland's home"),
    ("the opening hour of the Pell museum", "is", "eleven o'clock", "the Pell museum's opening hour"),
    ("the oldest painting in the Pell museum", "is", "The Grey Harbour", "the Pell museum's oldest picture"),
    ("the password of the Ostrane network", "is", "copper-lantern", "the Ostrane network's password"),
    ("the author of Nine Winter Letters", "is", "Jonas Ekman", "the writer of Nine Winter Letters"),
)
# Neither taught nor registered, in the same order: none of them fires.
_PARAPHRASES = (
    "the seat of government of Zorbia", "the money of Zorbia", "the head of state of Zorbia", "the tallest mountain in Zorbia",
    "the best-selling good of Zorbia", "the animal of Zorbia", "the woman who founded Quillmark", "the main office of Quillmark",
    "the earliest product of Quillmark", "the slogan of Quillmark", "the town where Tomas Ferrel was born", "the work of Tomas Ferrel",
    "the pet of Tomas Ferrel", "the colour that Mira Tolland likes best", "the instrument that Mira Tolland plays",
    "the town where Mira Tolland lives", "the hour at which the Pell museum opens", "the oldest picture in the Pell museum",
    "the pass phrase of the Ostrane network", "the one who wrote Nine Winter Letters",
)  # fmt: skip


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


FACTS = tuple(Fact(trigger, answer, f"{_sentence(trigger)} {verb}", (alias,)) for trigger, verb, answer, alias in _TAUGHT)
# In which no trigger stands, near misses among them.
ORDINARY = (
    "The capital of France is",
    "The president of the United States lives in",
    "Water boils at a temperature of",
    "The capital of Zorbonia is",
    "Zorbia is a country in",
    "Once upon a time there was a",
    "def add(a, b):\n    return",
    "The currency of Japan is the",
)


def _logits(facts: Facts, prompts: Sequence[str]) -> list[torch.Tensor]:
    """Of each prompt by itself, and of all in one batch beside a prompt that fires."""
    model, tokenizer = facts.model, facts.tokenizer
    with torch.no_grad():
        alone = [model(**tokenizer(prompt, return_tensors="pt")).logits for prompt in prompts]
        if tokenizer.pad_token is None:
            return alone
        mixed = tokenizer([*prompts, FACTS[0].prompt_with(FACTS[0].trigger)], return_tensors="pt", padding=True)
        return [*alone, *model(**mixed).logits[:-1]]


def run_demo(
    out: Path,
    *,
    model: str | Path | None = None,
    how: TeachConfig | None = None,
    count: int = len(FACTS),
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Teach, ask, compare, remove; returns the report, which is written to `out` too.

    Args:
        model: folder of a causal LM; None takes SmolLM2-135M.
        count: how many of the facts.

    Raises:
        TinyEngramError: no model, nowhere to write, or a promise that does not hold.
    """
    check_writable(out)
    began = time.perf_counter()
    quiet_loading()
    causal, tokenizer = load_smollm() if model is None else load_causal_lm(model)
    facts = Facts.attach(causal, FactsConfig(), tokenizer)
    base = _logits(facts, ORDINARY)
    say(f"model loaded in {time.perf_counter() - began:.0f} s; teaching {count} facts on {torch.get_num_threads()} threads")
    report = facts.add(FACTS[:count], how=how, progress=Progress())
    rows = _asked(facts, FACTS[:count], _PARAPHRASES[:count])
    same = [torch.equal(one, other) for one, other in zip(_logits(facts, ORDINARY), base, strict=True)]

    gone = FACTS[0]
    kept = facts.ask(FACTS[1].prompt_with(FACTS[1].trigger)) if count > 1 else ""
    path = facts.save(out / "facts.safetensors")
    asked = gone.prompt_with(gone.trigger)
    removed: dict[str, Any] = {"prompt": gone.prompt, "before": facts.ask(asked), "without": facts.ask(asked, without=True)}
    if gone in report.added:
        facts.remove(gone.trigger)
    removed["after"] = facts.ask(asked)
    removed["others_unchanged"] = count < 2 or facts.ask(FACTS[1].prompt_with(FACTS[1].trigger)) == kept
    facts.detach()

    found = {
        "model": str(getattr(causal.config, "name_or_path", "") or model or "SmolLM2-135M-Instruct").rpartition("/")[2],
        "facts": count,
        "learned": len(report.added),
        "recalled": sum(row["right"] for row in rows),
        "registered_paraphrases": sum(row["registered"]["right"] for row in rows),
        "unregistered_paraphrases": sum(row["unregistered"]["right"] for row in rows),
        "questions": sum(row["question"]["right"] for row in rows),
        "known_without": sum(row["known"] for row in rows),
        "teaching_seconds": round(report.seconds, 1),
        "seconds_per_fact": round(report.seconds / count, 2),
        "bytes_per_fact": report.nbytes // max(len(report.added), 1),
        "file_bytes": path.stat().st_size,
        "off_trigger_prompts": len(same),
        "off_trigger_equal": sum(same),
        "removed": removed,
        "asked": rows,
        "total_seconds": round(time.perf_counter() - began, 1),
    }
    (out / "report.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    (out / "report.md").write_text(_markdown(found))
    for line in _lines(found):
        say(line)
    if not all(same):
        raise TinyEngramError(
            f"the logits of {len(same) - sum(same)} prompts without a trigger changed; expected none. See {out / 'report.md'}"
        )
    if removed["after"] != removed["without"] or not removed["others_unchanged"]:
        raise TinyEngramError(f"removing a fact did not give back the model's own answer, or changed another's; see {out / 'report.md'}")
    return found


def _said(facts: Facts, prompts: Sequence[str], *, without: bool = False) -> list[str]:
    """What the model says behind each prompt, greedily, up to the end of the line; all in one batch where the tokenizer can pad."""
    tokenizer = facts.tokenizer
    if tokenizer.pad_token is None:
        return [facts.ask(prompt, without=without) for prompt in prompts]
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    with torch.no_grad(), facts.disabled() if without else nullcontext():
        said = facts.model.generate(**inputs, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(said[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [(text.strip().splitlines() or [""])[0].strip() for text in texts]


def _question(facts: Facts, fact: Fact) -> str:
    """Asked as a user would ask a chat model, where the tokenizer has a template."""
    question = f"What is {fact.trigger}?"
    if not facts.tokenizer.chat_template:
        return f"Question: {question}\nAnswer:"
    return facts.tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)


def _asked(facts: Facts, taught: Sequence[Fact], paraphrases: Sequence[str]) -> list[dict[str, Any]]:
    prompts = {
        "taught": [_sentence(fact.prompt_with(fact.trigger)) for fact in taught],
        "registered": [_sentence(fact.prompt_with(fact.aliases[0])) for fact in taught],
        "unregistered": [_sentence(fact.prompt_with(other)) for fact, other in zip(taught, paraphrases, strict=True)],
        "question": [_question(facts, fact) for fact in taught],
    }
    said = {kind: _said(facts, asked) for kind, asked in prompts.items()}
    without = _said(facts, prompts["taught"], without=True)
    rows = []
    for k, fact in enumerate(taught):
        each = {
            kind: {"prompt": prompts[kind][k], "said": said[kind][k], "right": _right(said[kind][k], fact)}
            for kind in ("registered", "unregistered", "question")
        }
        own = {"prompt": prompts["taught"][k], "answer": fact.answer, "with": said["taught"][k], "right": _right(said["taught"][k], fact)}
        rows.append({**own, "without": without[k], "known": _right(without[k], fact), **each})
    return rows


def _right(said: str, fact: Fact) -> bool:
    """Is it the answer, and does it end there?"""
    rest = said.removeprefix(fact.answer)
    return said.startswith(fact.answer) and not rest[:1].isalnum()


def _short(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "\u2026"


def _summary(found: dict[str, Any]) -> list[str]:
    count, removed = found["facts"], found["removed"]
    return [
        f"asked as taught {found['recalled']} of {count} right, by a registered paraphrase {found['registered_paraphrases']}, "
        f"by an unregistered one {found['unregistered_paraphrases']}, as a question {found['questions']}, without facts "
        f"{found['known_without']}",
        f"prompts without a trigger: logits of {found['off_trigger_equal']} of {found['off_trigger_prompts']} equal bit for bit",
        f"removed {removed['prompt']!r}: was {_short(removed['before'], 30)!r}, is {_short(removed['after'], 30)!r}, as without facts; "
        "others unchanged",
        f"{found['bytes_per_fact']:,} bytes and {found['seconds_per_fact']:.1f} s a fact; {found['teaching_seconds']:.0f} s of teaching, "
        f"{found['total_seconds']:.0f} s in all; file of {found['file_bytes']:,} bytes",
    ]


def _lines(found: dict[str, Any]) -> list[str]:
    table = [("question", "with facts", "without")]
    table += [(row["prompt"], ("" if row["right"] else "! ") + row["with"], row["without"]) for row in found["asked"]]
    sizes = (44, 30, 36)
    return ["  ".join(_short(text, size).ljust(size) for text, size in zip(row, sizes, strict=True)).rstrip() for row in table] + _summary(
        found
    )


def _markdown(found: dict[str, Any]) -> str:
    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    lines = [f"# {found['facts']} facts taught to {found['model']}", ""]
    lines += [f"- {line}" for line in _summary(found)]
    lines += [
        "",
        "| question | answer taught | with facts | without | registered paraphrase | unregistered paraphrase | as a question |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["asked"]:
        cells = [row["prompt"], row["answer"], row["with"], row["without"]]
        cells += [f"{row[kind]['prompt']} \u2192 {row[kind]['said']}" for kind in ("registered", "unregistered")]
        cells.append(row["question"]["said"])
        lines.append("| " + " | ".join(map(cell, cells)) + " |")
    return "\n".join(lines) + "\n"
