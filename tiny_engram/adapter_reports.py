"""What the adapter tells about a pipeline: a trigger that would be registered, and prompts. Changes nothing and runs no encoder.

May import explanation, registration, loaded, role_mounts and what is below.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tiny_engram.config import ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.explanation import Explanation, PromptExplanation, explain_prompt
from tiny_engram.loaded import LoadedConcepts
from tiny_engram.mounts import EncoderMounts
from tiny_engram.registration import RegistrationReport, RoleReport, cleaning_warnings, mode_warnings, report_role
from tiny_engram.role_mounts import asked_of
from tiny_engram.triggers import CompiledTrigger

__all__ = ["explain_prompts", "reading_of", "registration_report", "texts_of"]

QUIET = "in an open library, and not among the active concepts (set_concepts)"


def texts_of(prompt: Any, what: str = "prompt") -> list[str]:
    """One text or several. Raises TinyEngramError for anything else."""
    texts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TinyEngramError(f"{what} is {str(prompt)[:60]}, expected text or a list of texts")
    return list(texts)


def reading_of(pipe: Any, family: Any, role: str) -> tuple[Any, Callable[[str], str], int | None]:
    """The role's `EncoderSpec`, what its tokenizer is given for a prompt, and how many tokens the pipeline reads of it; None: as the
    tokenizer says."""
    spec = next(spec for spec in family.encoders if spec.role == role)
    return spec, partial(spec.text, pipe), None if spec.window is None else spec.window(pipe)


def registration_report(
    pipe: Any,
    family: Any,
    mounts: Mapping[str, EncoderMounts],
    compiled: Mapping[str, CompiledTrigger],
    config: ConceptConfig,
    *,
    name: str | None,
    absent: tuple[str, ...],
    in_libraries: Sequence[tuple[str, str]] = (),
) -> RegistrationReport:
    """What a trigger, compiled for every role, would mean; roles for which the config asks nothing are left out."""
    chosen, maps = asked_of(config, mounts, family.refuses)
    roles: dict[str, RoleReport] = {}
    warned = dict.fromkeys(w for c in compiled.values() for w in c.warnings)
    for role, mount in mounts.items():
        if not chosen[role] and not maps[role]:
            continue
        _, given, most = reading_of(pipe, family, role)
        about = role, compiled[role], mount.tokenizer, mount.store
        roles[role] = report_role(*about, config, chosen[role], maps[role], given=given, most_tokens=most)
        warned |= dict.fromkeys((*mode_warnings(role, chosen[role]), *cleaning_warnings(*about, given)))
    first = next(iter(compiled.values()))
    taken = {owner for role, m in mounts.items() for owner in m.store.index.conflicts(compiled[role])}
    told = absent, tuple(sorted(taken)), tuple(warned), tuple(in_libraries)
    return RegistrationReport(first.text, first.aliases, name or first.text, roles, *told)


def explain_prompts(
    pipe: Any,
    family: Any,
    mounts: Mapping[str, EncoderMounts],
    loaded: LoadedConcepts,
    prompts: Sequence[str],
    negative_prompts: Sequence[str],
) -> Explanation:
    """Which spans fire in these prompts at each role, which triggers were seen but do not fire, and why."""
    pairs = [*((text, False) for text in prompts), *((text, True) for text in negative_prompts)]

    def converted(text: str, mount: EncoderMounts) -> str:
        return pipe.maybe_convert_prompt(text, mount.tokenizer) if hasattr(pipe, "maybe_convert_prompt") else text

    called: dict[str, dict[str, CompiledTrigger]] = {role: {} for role in mounts}
    for role, mount in mounts.items():
        if (seek := mount.seek) is None:
            continue
        given = reading_of(pipe, family, role)[1]
        for text, _ in pairs:
            called[role] |= seek(torch.tensor([mount.tokenizer(given(converted(text, mount)), verbose=False).input_ids]))
    active = loaded.active()

    def explained(text: str, negative: bool, role: str, mount: EncoderMounts) -> PromptExplanation:
        here = [name for name in loaded if name in mount.store]
        _, given, most = reading_of(pipe, family, role)
        plain = converted(text, mount)
        read = given(plain)
        return explain_prompt(
            read,
            role=role,
            negative=negative,
            tokenizer=mount.tokenizer,
            index=mount.store.index,
            strengths={name: loaded[name].strength for name in here if name in active},
            mounts={name: mount.store.mounts_of(name) for name in here},
            maps={name: mount.store.maps_of(name) for name in here},
            schedules={name: str(schedule) for name in here if (schedule := loaded[name].schedule) is not None},
            # one in a library may have the name of another that is loaded
            silent={(name if name not in here else f"{name}, in a library"): (trigger, QUIET) for name, trigger in called[role].items()}
            | {name: (loaded[name].compiled[role], loaded.why_off(name)) for name in here if name not in active},
            written=None if read == plain else text,
            most_tokens=most,
        )

    return Explanation(tuple(explained(text, negative, role, mount) for text, negative in pairs for role, mount in mounts.items()))
