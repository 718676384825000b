"""What a family of pipelines is: its encoders, how they are called, and what the denoiser consumes of them.

Dataclasses and small functions about objects that the user made; nothing of diffusers is imported, and of tiny_engram its errors and the
families' latents alone.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from tiny_engram.errors import TinyEngramError
from tiny_engram.pipelines.latents import scaled

__all__ = [
    "WITH_MASKS",
    "Attention",
    "EncoderSpec",
    "Family",
    "call_default",
    "cleans_captions",
    "encode_by_signature",
    "single_states",
    "text_as_given",
]

# Of these some pipelines demand an answer; None means the first prompt.
SECOND_PROMPTS = ("prompt_2", "prompt_3")
# `Family.returns` of pipelines that give each prompt's mask behind its states.
WITH_MASKS = ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask")


def _check(right: object, what: str, value: object, expected: str) -> None:
    if not right:
        raise TinyEngramError(f"{what} is {str(value)[:60]!r}, expected {expected}")


def _several(values: object, kind: type) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(isinstance(value, kind) for value in values)


def text_as_given(pipe: Any, text: str) -> str:
    """For pipelines that hand the prompt to the tokenizer as it is."""
    return text


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """One text encoder: attribute names on the pipeline, and what the pipeline reads of its output.

    Attributes:
        role: what concept files call it: "clip_l", "clip_g", "t5", "bert", "llm".
        encoder, tokenizer: names of the pipeline's attributes.
        final_norm: the module that the pipeline applies itself to an earlier state (clip_skip); the end of its dotted path in the encoder.
        reads: what is read of `hidden_states`: a number, counted as in a list, for that entry (and with clip_skip an earlier one); several
            for entries that are read side by side; None for the last hidden state.
        pooled: is the pooled vector all that is used of it?
        text: (pipe, prompt) -> what the tokenizer is given: cleaned, in lower case; without a chat template.
        masked: does the pipeline give it the tokenizer's attention mask?
        window: pipe -> most tokens of that text that the pipeline lets through, with the special tokens that the tokenizer alone adds; None
            for the tokenizer's own `model_max_length`.
        lower_case: does `text` write all prompts in lower case? Then other spellings of a trigger need no rows.
        offset: place of its first state in what the denoiser reads, where several encoders' states stand one behind the other.
    """

    role: str
    encoder: str
    tokenizer: str
    final_norm: str | None = None
    reads: int | tuple[int, ...] | None = None
    pooled: bool = False
    text: Callable[[Any, str], str] = text_as_given
    masked: bool = False
    window: Callable[[Any], int] | None = None
    offset: int = 0
    lower_case: bool = False

    def __post_init__(self) -> None:
        where = "EncoderSpec"
        for what in ("role", "encoder", "tokenizer"):
            _check(isinstance(value := getattr(self, what), str) and value, f"{where}.{what}", value, "a name")
        where = f"EncoderSpec({self.role!r})"
        _check(callable(self.text), f"{where}.text", self.text, "a function (pipe, prompt) -> text")
        _check(self.window is None or callable(self.window), f"{where}.window", self.window, "a function such as lambda pipe: 77, or None")


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention of a denoiser that reads text states.

    Attributes:
        module: holds the projections. What others put in the place of one of these later is found under the attribute again, so hooks go
            by module and attribute.
        block: name of the block that it lies in, "down1" or "mid".
        transformer: the transformer layer around it, whose feed-forward layer runs after it.
        key, value: names of the projections that read the text states.
        joint: are text and picture read by one attention (MMDiT)? Then there are no maps at it.
        mapped: can there be maps, where it is not joint? Not where queries are changed behind `to_q` by more than a norm over all heads.
        masked: is it given a mask over the text?
        feed: name of the transformer layer's feed-forward layer; None where that is none over `[batch, places, channels]`.
        offset: positions in front of the text in what its projections read.
        tail: where the text stands at the end of what they read instead: lengths of the rows' texts -> positions from its first one to the
            end.
    """

    module: Any
    block: str
    transformer: Any = None
    key: str = "to_k"
    value: str = "to_v"
    joint: bool = False
    mapped: bool = True
    masked: bool = False
    feed: str | None = "ff"
    offset: int = 0
    tail: Callable[[Sequence[int]], int] | None = None

    @property
    def channels(self) -> int | None:
        """Values that `to_q` reads, and gives, at each place of the picture; None where it does not say, or gives others, or there are no
        maps."""
        projection = None if self.joint or not self.mapped else getattr(self.module, "to_q", None)
        channels = getattr(projection, "in_features", None)
        return channels if channels == getattr(projection, "out_features", None) else None

    @property
    def feedforward(self) -> Any | None:
        """The feed-forward layer that its transformer layer runs after it, as it is now; it reads as many channels. None without one."""
        return None if self.feed is None else getattr(self.transformer, self.feed, None)


def call_default(pipe: Any, name: str, default: Any = None) -> Any:
    """What `pipe(...)` takes for a parameter that is not given; `default` if it has none of that name."""
    parameter = inspect.signature(type(pipe).__call__).parameters.get(name)
    return default if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


def encode_by_signature(
    pipe: Any, prompts: Sequence[str], negative: Sequence[str] | None, images: int, returns: Sequence[str], **others: Any
) -> dict[str, Any]:
    """Call `pipe.encode_prompt` as `pipe(...)` does, by the names of its parameters.

    `returns` names what it gives, in order. Parameters that both have, such as max_sequence_length, get the defaults of `pipe(...)`, or
    those of `others`. Where it takes no negative prompt, that one is encoded by a second call, as such pipelines do for true
    classifier-free guidance.

    Returns:
        What `pipe(...)` takes in the place of prompts, by name; without names that begin with an underscore, and without None.
    """
    # by the class: what others put in the place of the method of one pipeline often says nothing
    known = inspect.signature(type(pipe).encode_prompt).parameters.keys() - {"self"}
    mine = {
        "device": pipe._execution_device,
        "num_images_per_prompt": images,
        "num_videos_per_prompt": images,
        "do_classifier_free_guidance": negative is not None,
    }
    if negative is not None:
        mine["negative_prompt"] = list(negative)
    shared = known & inspect.signature(type(pipe).__call__).parameters.keys()
    skipped = {name for name in shared if name.startswith(("prompt", "negative_prompt")) and name != "prompt_template"}
    options = {name: call_default(pipe, name) for name in shared - skipped - set(mine)}
    options |= {name: value for name, value in (mine | others).items() if name in known}
    options |= {name: None for name in SECOND_PROMPTS if name in known}
    if not cleans_captions():
        options = {name: value for name, value in options.items() if name != "clean_caption"}  # that would only warn, each time

    def call(texts: Sequence[str]) -> dict[str, Any]:
        # a copy: some pipelines write into the list
        given = pipe.encode_prompt(list(texts), **options)
        given = given if isinstance(given, tuple) else (given,)
        if len(given) != len(returns):
            raise TinyEngramError(
                f"encode_prompt of {type(pipe).__name__} gives {len(given)} values, and Family.returns names {len(returns)} "
                f"({', '.join(returns)}); name all of them in order, with '_' in front of those that pipe(...) does not take"
            )
        named = {name: value for name, value in zip(returns, given, strict=True) if not name.startswith("_")}
        # an empty list stands for no negative prompt
        return {name: value for name, value in named.items() if value is not None and not (isinstance(value, list) and not value)}

    found = call(prompts)
    if negative is not None and "negative_prompt" not in known:
        found |= {f"negative_{name}": value for name, value in call(negative).items()}
    return found


def cleans_captions() -> bool:
    """Are the libraries there that pipelines clean captions with?"""
    return find_spec("bs4") is not None and find_spec("ftfy") is not None


def single_states(pipe: Any, embeds: Mapping[str, Any], role: str) -> dict[str, Any]:
    """The prompt embeds of pipelines that read one encoder's states alone."""
    if "prompt_embeds" not in embeds:
        raise TinyEngramError(
            f"encode_prompt of {type(pipe).__name__} gave {', '.join(sorted(embeds)) or 'nothing'} and no 'prompt_embeds'; "
            "check the order of Family.returns, or say in Family.consumed what the denoiser reads"
        )
    return {role: embeds["prompt_embeds"]}


@dataclass(frozen=True, slots=True)
class Family:
    """Pipelines that are alike for concepts.

    Attributes:
        name: what errors call it.
        pipelines: class names.
        encoders: in the order in which roles are listed.
        returns: names of what `encode_prompt` returns, in order, as `pipe(...)` takes them: "prompt_embeds", "negative_prompt_embeds",
            "pooled_prompt_embeds", ...; "_" in front of what it does not take.
        denoisers: attributes of the denoisers; those that a pipeline has not are left out.
        consumed: (pipe, embeds) -> each role's states `[batch, time, width]` (a pooled role's vectors `[batch, width]`; a list of `[time,
            width]` where the pipeline keeps one) inside the embeds, which are named as in `returns`. None: the only role's are the prompt
            embeds.
        encode: (pipe, prompts, negative prompts or None, images per prompt) -> embeds by name; None: `encode_by_signature`.
        given: parameter of the denoiser's `forward` -> name of the embeds that it is given.
        attentions: (denoiser, role) -> the attentions that read the role's states, in running order.
        projected: are the states projected or mixed with time before attentions read them? Otherwise they are read as `encode` gives
            them, the same tensor everywhere.
        timestep: parameter of the denoiser's `forward` that holds it.
        per_timestep: timestep of the denoiser's call -> the scheduler's, of `num_train_timesteps`.
        probe_length: tokens that the prompts of the probe at attach are padded to, where the pipeline pads; None for its own.
        refuses: mode ("deep", "context", "input") -> why this family does not have it, in words.
        call: further arguments of `pipe(...)` with which pictures are drawn at a size that is asked for.
        predicts: how a step of training calls the denoiser: (pipe, noisy latents `[batch, channels, h, w]`, the scheduler's timesteps
            `[batch]`, embeds as `embeds` gives them, frames float `[batch, 6]`) -> what it says, whose first channels are those of the
            latents; with flow matching the way from picture to noise. A frame is height and width of the picture as it was found, top and
            left edge of the crop in it once scaled, height and width of the crop. None: concepts cannot be taught on this family.
        latents: (pipe, pixels) -> mean and deviation of the latents, the other way round than the pipeline decodes them.
        plain: does the last state of its one encoder, of a prompt filled up to the window, reach the denoiser as it is? Then captions of a
            run are encoded many at a time, and rows at `input` run the encoder again no further than to the trigger.
        patch: side of the square of latents that is one place for the denoiser; None where its config's `patch_size` says so.
        no_checkpoints: why a denoiser whose blocks are computed again for their gradients says something else, in words; None where it does
            not.
        untaught: why concepts cannot be taught, in words; for families without `predicts`.
    """

    name: str
    pipelines: tuple[str, ...]
    encoders: tuple[EncoderSpec, ...]
    returns: tuple[str, ...]
    denoisers: tuple[str, ...] = ("transformer",)
    consumed: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None
    encode: Callable[[Any, Sequence[str], Sequence[str] | None, int], Mapping[str, Any]] | None = None
    given: Mapping[str, str] | None = None
    attentions: Callable[[Any, str], Sequence[Attention]] | None = None
    projected: bool = True
    timestep: str = "timestep"
    per_timestep: Callable[[float, int], float] | None = None
    probe_length: int | None = 64
    refuses: Mapping[str, str] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    predicts: Callable[[Any, Any, Any, Mapping[str, Any], Any], Any] | None = None
    latents: Callable[[Any, Any], tuple[Any, Any]] = scaled
    plain: bool = False
    patch: int | None = None
    no_checkpoints: str | None = None
    untaught: str = "nobody has described yet how it is taught"

    def __post_init__(self) -> None:
        """Raises TinyEngramError for a field of another type, and for two encoders of one role."""
        _check(isinstance(self.name, str) and self.name, "Family.name", self.name, "a name")
        where = f"Family({self.name!r})"
        for what in ("pipelines", "returns", "denoisers"):
            value = getattr(self, what)
            _check(_several(value, str), f"{where}.{what}", value, "a tuple of names; of one name it is ('name',)")
        expected = "a tuple of at least one EncoderSpec, each with a role of its own"
        _check(_several(self.encoders, EncoderSpec) and self.encoders, f"{where}.encoders", self.encoders, expected)
        roles = [spec.role for spec in self.encoders]
        _check(len(set(roles)) == len(roles), f"roles of {where}.encoders", ", ".join(roles), expected)

    @property
    def denoiser(self) -> str:
        """Attribute of the first denoiser."""
        return self.denoisers[0]

    def embeds(
        self, pipe: Any, prompts: Sequence[str], negative: Sequence[str] | None = None, images: int = 1, **others: Any
    ) -> Mapping[str, Any]:
        """What `pipe(...)` takes in the place of prompts, by name. `others` go on to `encode_prompt`, where it has them."""
        if self.encode is not None:
            return self.encode(pipe, prompts, negative, images)
        return encode_by_signature(pipe, prompts, negative, images, self.returns, **others)

    def check_options(self, pipe: Any, options: Iterable[str]) -> None:
        """Raises TinyEngramError for a name that neither `pipe(...)` nor its `encode_prompt` takes. Where one of them takes any name, those
        that are nearly one of its own are refused."""
        calls = (type(pipe).__call__, type(pipe).encode_prompt)
        known = [parameter for call in calls for parameter in inspect.signature(call).parameters.values()]
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known)
        names = {parameter.name for parameter in known} - {"self"}
        for name in sorted({*options} - names - {"callback", "callback_steps"}):  # some take these two, and do not say so
            near = get_close_matches(name, names, 1)
            if near or not anything:
                way = f"did you mean {near[0]!r}?" if near else "leave it out"
                raise TinyEngramError(f"{type(pipe).__name__} takes no option {name!r}; {way}")

    def text_of(self, embeds: Mapping[str, Any]) -> Any:
        """The first tensor of text states that the denoiser is given, of embeds by name."""
        name = next(iter((self.given or {"encoder_hidden_states": "prompt_embeds"}).values()))
        return embeds[name][0] if isinstance(embeds[name], list) else embeds[name]

    def states(self, pipe: Any, embeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """Each role's own states inside the embeds; see `consumed`."""
        if self.consumed is not None:
            return self.consumed(pipe, embeds)
        return single_states(pipe, embeds, self.encoders[0].role)

    def present(self, pipe: Any) -> dict[str, Any]:
        """The denoisers that a pipeline has, by attribute."""
        found = {name: getattr(pipe, name, None) for name in self.denoisers}
        return {name: module for name, module in found.items() if module is not None}

    def contexts(self, denoiser: Any, role: str) -> dict[str, tuple[Any, str]]:
        """A denoiser's own context mounts at a role, in running order: name -> (module, attribute that holds the projection)."""
        return {
            f"context.{i}.{kind}": (attention.module, attribute)
            for i, attention in enumerate(self.attentions(denoiser, role) if self.attentions is not None else ())
            for kind, attribute in (("key", attention.key), ("value", attention.value))
        }
