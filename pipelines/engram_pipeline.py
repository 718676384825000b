"""`EngramPipeline.from_pretrained`: a base and its concepts in one line. Imports adapter, sources, loaders; diffusers when called."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, cast

from tiny_engram.adapter import attach, find_adapter
from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.sources import HubOptions, Source, SourceOptions, load_source

__all__ = ["ConceptSource", "EngramPipeline"]

# What a base and its concepts share: whose account, which cache.
_SHARED = ("token", "cache_dir", "local_files_only", "force_download")


class ConceptSource(SourceOptions, total=False):
    """A concept of the list as a dict: its source, and how its file is found."""

    source: Source


class EngramPipeline:
    """Loads pipelines with concepts on them. Like diffusers' AutoPipelines it is never made itself: `from_pretrained` returns the
    pipeline, an object of the base's own class, whose concepts are then reached by the functions of `tiny_engram`."""

    def __init__(self) -> None:
        raise TinyEngramError("EngramPipeline is not made itself; EngramPipeline.from_pretrained(base, concepts) returns a pipeline")

    @classmethod
    def from_pretrained(
        cls,
        base: Any = None,
        concepts: Source | ConceptSource | Sequence[Source | ConceptSource] = (),
        *,
        strengths: float | Sequence[float] | None = None,
        names: str | Sequence[str | None] | None = None,
        dtype: Any = None,
        device: Any = None,
        **options: Any,
    ) -> Any:
        """The base's pipeline, of the class that its model_index.json names, with these concepts loaded and active.

        Args:
            base: a diffusers folder or Hub id; None for the embedded base; or a pipeline that is loaded already, which is returned
                itself (its adapter is used if it has one).
            concepts: one or several, each a Concept, a file, a folder with one file, a Hub id "user/repo" or an address
                "hf://user/repo@revision/file.safetensors"; or a dict with "source" and the options of SourceOptions.
            strengths: one for all or one for each; None is 1.
            names: one for each concept, None for the file's own.
            dtype: of the base's weights, as torch.float16 or "float16"; None is float32. Not for a pipeline that is loaded.
            device: None is CUDA if there is one, unless a `device_map` is given. Not for a pipeline that is loaded.
            options: all others go to diffusers' `from_pretrained`: revision, variant, safety_checker, ... Those named token, cache_dir,
                local_files_only and force_download are for the concepts too; a revision is the base's alone.

        Raises TinyEngramError, in a line that names the concept at fault. Then nothing is left half done: a pipeline that was given has
        the concepts that it had, and no adapter if it had none.
        """
        if not isinstance(concepts, (Concept, str, PathLike, Mapping, Iterable)):
            raise TinyEngramError(
                f"concepts is {str(concepts)[:60]}, expected one or a list of them: a Concept, a file, a folder or a Hub id"
            )
        if near := [f"{name}s" for name in options if f"{name}s" in ("concepts", "strengths", "names")]:  # diffusers would ignore them
            raise TinyEngramError(f"from_pretrained takes no option {near[0][:-1]!r}; did you mean {near[0]!r}?")
        given = [concepts] if isinstance(concepts, (Concept, str, PathLike, Mapping)) else list(concepts)
        factors = _one_each(1.0 if strengths is None else strengths, len(given), "strengths")
        own_names = _one_each(None if names is None else [names] if isinstance(names, str) else names, len(given), "names")
        loaded_already = base is not None and not isinstance(base, (str, PathLike))
        if loaded_already and not hasattr(base, "__dict__"):
            raise TinyEngramError(f"base is {str(base)[:60]}, expected a folder, a Hub id, None or a loaded pipeline")
        dtype = options.pop("torch_dtype", None) if dtype is None else dtype  # diffusers' older name
        told = [name for name, value in {"dtype": dtype, "device": device, **options}.items() if value is not None]
        if loaded_already and (told := [name for name in told if name not in _SHARED]):
            raise TinyEngramError(
                f"{', '.join(told)} given with a loaded {type(base).__name__}; expected with a path or an id, leave it out"
            )
        hub_options = cast(HubOptions, {name: options[name] for name in _SHARED if options.get(name) is not None})
        # files first: they are small, and one that is wrong should not cost the minutes that a base takes
        read = []
        for k, each in enumerate(given):
            with _about(k, each):
                read.append(_load(each, hub_options))
        pipe = base if loaded_already else load_pipeline(base, dtype=dtype or "float32", device=device, **options)
        found = find_adapter(pipe)
        adapter = attach(pipe) if found is None else found
        added: list[str] = []
        try:
            for k, (concept, strength, name) in enumerate(zip(read, factors, own_names, strict=True)):
                with _about(k, given[k]):
                    added.append(adapter.load_concept(concept, name, strength))
        except BaseException:
            if found is None:
                adapter.detach()
            for name in added if found is not None else ():
                adapter.unload_concept(name)
            raise
        return pipe


def _one_each(values: Any, count: int, what: str) -> list[Any]:
    """As many as there are concepts; one value, or none, is for all."""
    if values is None or isinstance(values, (int, float)):
        return [values] * count
    if len(values) != count:
        raise TinyEngramError(f"{len(values)} {what} for {count} concepts, expected one each")
    return list(values)


def _load(given: Any, hub_options: HubOptions) -> Concept:
    if not isinstance(given, Mapping):
        return load_source(given) if isinstance(given, Concept) else load_source(given, **hub_options)
    options = dict(given)
    known = ", ".join(sorted(SourceOptions.__annotations__))
    if "source" not in options:
        raise TinyEngramError(f"a dict without 'source', expected it and any of {known}")
    if unknown := sorted(map(repr, options.keys() - ConceptSource.__annotations__.keys())):
        raise TinyEngramError(f"unknown {', '.join(unknown)}; expected 'source' and any of {known}")
    source = options.pop("source")
    shared = {} if isinstance(source, Concept) else hub_options
    return load_source(source, **cast(SourceOptions, {**shared, **options}))


@contextmanager
def _about(k: int, given: Any) -> Iterator[None]:
    """Errors inside say which of the concepts they are about."""
    try:
        yield
    except TinyEngramError as error:
        shown = given.get("source", given) if isinstance(given, Mapping) else given
        shown = f"Concept {shown.name!r}" if isinstance(shown, Concept) else repr(str(shown))
        raise type(error)(f"concepts[{k}], {shown}: {error}") from error
