"""What concepts cost beside the text encoders of each family: attaching, and the adapter's own time for each encoded prompt.

    python benchmarks/family_times.py tiny      # every tiny pipeline of the tests, on the CPU
    python benchmarks/family_times.py large     # text encoders of real size and random weights, on a CUDA device

Both fill a section of benchmarks/results/families.json. The own time is what the hooks count themselves, which is the time of the CPU;
on a CUDA device the encode as a whole is timed too, with a thousand concepts loaded and with none, in turn. Before anything is timed,
a prompt without a trigger has to keep its bits and one with a trigger to lose them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu import need, record, row
from tables import ROOT

import tiny_engram
from tiny_engram.pipelines.families import family_of

sys.path.insert(0, str(ROOT))  # the tiny pipelines are the tests'

CONCEPTS = 1000
PLAIN, FIRING = "a photo of a cat on a table", "a photo of a {} on a table"
ATTACH, QUIET, LOUD = 50.0, 0.3, 1.0  # milliseconds at most
# Those whose own time is measured: loading a thousand concepts takes a while.
OWN = ("stable-diffusion-1", "stable-diffusion-xl", "stable-diffusion-3", "flux:dev", "pixart:sigma", "wan:2.1")


def triggers() -> Iterator[str]:
    """Made-up words, each another."""
    starts, ends = ("zor", "vex", "qui", "bla", "dru", "fje", "gno", "hux", "jor", "kly"), ("bu", "tam", "rix", "nel", "pof")
    for parts in itertools.product(starts, ends, starts, ends):
        yield "".join(parts)


def seconds_of(action: Callable[[], object], *, cuda: bool) -> float:
    begin = time.perf_counter()
    action()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def attach_ms(pipe: Any, *, repeats: int = 9) -> tuple[float, float]:
    """Milliseconds of the first attach, which reads the vocabularies, and the median of later ones."""
    times: list[float] = []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        adapter = tiny_engram.attach(pipe)
        times.append(1e3 * (time.perf_counter() - begin))
        adapter.detach()
    return times[0], statistics.median(times[1:])


def loaded(pipe: Any, count: int) -> tuple[Any, list[str]]:
    """An adapter with so many concepts of random rows, and their triggers."""
    adapter = tiny_engram.attach(pipe)
    generator = torch.Generator().manual_seed(0)
    words = list(itertools.islice(triggers(), count))
    for word in words:
        concept = adapter.new_concept(word)
        for role, place in concept.roles.items():
            for mount, old in place.mounts.items():
                rows = torch.randn(old.payload.shape, generator=generator)
                concept = concept.with_rows(role, rows, old.gain, old.bias, mount=mount)
        adapter.load_concept(concept)
    return adapter, words


def first_states(embeds: Any) -> torch.Tensor:
    return embeds["prompt_embeds"][0]


def own_ms(pipe: Any, *, repeats: int, cuda: bool = False) -> dict[str, float]:
    """Medians of milliseconds for each encoded prompt, none of which comes twice: the hooks' own without a trigger, with one that fired
    before, and with one that fires for the first time; on CUDA what the whole takes more as well."""
    names = {"quiet": PLAIN, "firing": ""}
    plain = {PLAIN: first_states(_encode(pipe, PLAIN)).clone()}
    adapter, words = loaded(pipe, CONCEPTS)
    names["firing"] = FIRING.format(words[CONCEPTS // 2])
    adapter.disable_concepts()
    base = first_states(_encode(pipe, names["firing"])).clone()
    adapter.enable_concepts()
    need(torch.equal(first_states(_encode(pipe, PLAIN)), plain[PLAIN]), "a prompt without a trigger changed")
    need(not torch.equal(first_states(_encode(pipe, names["firing"])), base), "a prompt with a trigger is the base's")
    need(len(adapter.explain(names["firing"]).fired) >= 1, "explain does not see the trigger")
    found: dict[str, float] = {}
    prompts = {name: [f"{prompt}, number {k}" for k in range(repeats)] for name, prompt in names.items()}
    prompts["first"] = [FIRING.format(word) for word in words[:repeats]]
    for name, each in prompts.items():
        if name in names:
            _encode(pipe, names[name])
        own: list[float] = []
        for prompt in each:
            before = adapter.seconds
            _encode(pipe, prompt)
            own.append(1e3 * (adapter.seconds - before))
        found[name] = statistics.median(own)
    if cuda:
        found |= {f"{name} more": 1e3 * value for name, value in _more(pipe, adapter, names, repeats).items()}
    adapter.detach()
    return found


def _more(pipe: Any, adapter: Any, names: dict[str, str], repeats: int) -> dict[str, float]:
    """Median of what one encode takes more than the bare pipeline's just before it, in seconds, by name."""
    hooks = [mount for mount in adapter.mounts.values()]
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name, prompt in names.items():
            for mount in hooks:
                mount.detach()
            bare = seconds_of(partial(_encode, pipe, prompt), cuda=True)
            for mount in hooks:
                mount.attach()
            found[name].append(seconds_of(partial(_encode, pipe, prompt), cuda=True) - bare)
    return {name: statistics.median(values) for name, values in found.items()}


@torch.no_grad()
def _encode(pipe: Any, prompt: str) -> Any:
    family = family_of(pipe)
    assert family is not None
    return family.embeds(pipe, [prompt])


def tiny(repeats: int) -> None:
    """Every tiny pipeline of the tests."""
    from tests.pipelines.tiny.every import EVERY

    figures: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for entry in EVERY:
        pipe = entry.build()
        first, again = attach_ms(pipe)
        figures[entry.name] = {"first_attach_ms": first, "attach_ms": again}
        print(f"{entry.name}: first attach {first:.0f} ms, again {again:.1f} ms", flush=True)
        if entry.name in OWN:
            own = own_ms(pipe, repeats=repeats)
            figures[entry.name] |= {f"{name}_ms": value for name, value in own.items()}
            print(f"{entry.name}: own time {own['quiet']:.3f} ms, firing {own['firing']:.3f}, first {own['first']:.3f} ms", flush=True)
    slowest = max(figures, key=lambda name: figures[name]["attach_ms"])
    worst = figures[slowest]["attach_ms"]
    rows.append(
        row(f"attach, slowest of {len(figures)} tiny pipelines ({slowest})", f"{worst:.1f} ms", f"<= {ATTACH:.0f} ms", worst <= ATTACH)
    )
    middle = statistics.median(each["attach_ms"] for each in figures.values())
    rows.append(row("attach, median of them", f"{middle:.1f} ms", f"<= {ATTACH:.0f} ms", middle <= ATTACH))
    for name in OWN:
        for kind, limit, words in (("quiet", QUIET, "no trigger"), ("firing", LOUD, "a trigger"), ("first", LOUD, "its first time")):
            value = figures[name][f"{kind}_ms"]
            rows.append(
                row(f"own time of an encode, {CONCEPTS} concepts, {name}, {words}", f"{value:.3f} ms", f"<= {limit} ms", value <= limit)
            )
    record("families", "tiny", figures=figures, rows=rows, packages=("diffusers", "transformers"))


def stable_diffusion_stack() -> Any:
    """CLIP-L, the text encoder of Stable Diffusion 1.5, with random weights, in a pipeline whose other parts are tiny."""
    from transformers import CLIPTextConfig, CLIPTextModel

    from tests.pipelines.tiny.stable_diffusion import PIPELINES

    pipe = next(entry for entry in PIPELINES if entry.name == "stable-diffusion-1").build()
    config = CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768)
    with torch.device("cuda"):
        encoder = CLIPTextModel(config)
    pipe.text_encoder = encoder.half().eval()
    return pipe.to("cuda")


def flux_stack() -> Any:
    """CLIP-L and T5 v1.1 XXL, the text encoders of FLUX.1, in bfloat16 with random weights."""
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    from tests.pipelines.tiny.flux import PIPELINES

    pipe = PIPELINES[0].build()
    clip = CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768)
    t5 = T5Config(vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            pipe.text_encoder, pipe.text_encoder_2 = CLIPTextModel(clip).eval(), T5EncoderModel(t5).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    return pipe.to("cuda")


def large(repeats: int) -> None:
    """Text encoders of real size on a CUDA device."""
    figures: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, build in {"Stable Diffusion 1.5's text encoder": stable_diffusion_stack, "FLUX.1's text encoders": flux_stack}.items():
        pipe = build()
        encode = statistics.median(seconds_of(partial(_encode, pipe, PLAIN), cuda=True) for _ in range(repeats))
        first, again = attach_ms(pipe)
        own = own_ms(pipe, repeats=repeats, cuda=True)
        figures[name] = {"encode_ms": 1e3 * encode, "first_attach_ms": first, "attach_ms": again, **own}
        rows += [
            row(f"{name}: encode of one prompt", f"{1e3 * encode:.2f} ms"),
            row(f"{name}: attach", f"{again:.1f} ms"),
            row(f"{name}: own time, {CONCEPTS} concepts, no trigger", f"{own['quiet']:.3f} ms"),
            row(f"{name}: own time, a trigger", f"{own['firing']:.3f} ms"),
            row(f"{name}: own time, a trigger for the first time", f"{own['first']:.3f} ms"),
            row(f"{name}: the whole encode takes more, no trigger", f"{own['quiet more']:.3f} ms"),
            row(f"{name}: the whole encode takes more, a trigger", f"{own['firing more']:.3f} ms"),
        ]
        print(name, figures[name], flush=True)
        del pipe
    record("families", "large", figures=figures, rows=rows, packages=("diffusers", "transformers"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("tiny", "large"))
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    {"tiny": tiny, "large": large}[args.what](args.repeats)


if __name__ == "__main__":
    main()
