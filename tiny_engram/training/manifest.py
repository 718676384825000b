"""A manifest: many concepts to teach, as one YAML file. Imports config_file, files, errors and what a run is told.

Fields of TrainConfig that all have in common stand at its top; `concepts` is a list of entries with what is each one's own. Paths are
relative to the file's folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_engram.config_file import checked_option, known_options, load_yaml, yaml_text
from tiny_engram.errors import ConfigError, TinyEngramError, raise_faults
from tiny_engram.files import file_name_of
from tiny_engram.training.config import TrainConfig

__all__ = ["OWN", "Manifest", "manifest_text", "read_manifest"]

LOADING = ("model", "dtype", "device")
# Of each concept; a value for all would make no sense.
OWN = ("trigger", "train_data_dir", "aliases", "name")
# Of the whole run, so that no entry has its own.
WHOLE = ("mixed_precision", "gradient_checkpointing")
PATHS = ("train_data_dir", "output_dir", "validation_data_dir", "cache_dir")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest asks for: a config for each concept, what the pipeline is loaded with, the folder of the whole, and options of the
    run: most concepts of a batch, and a library for all of them."""

    configs: tuple[TrainConfig, ...]
    loading: Mapping[str, str | None]
    output_dir: Path
    concepts_together: int | None
    library: Path | None


def read_manifest(path: Path, given: Mapping[str, Any]) -> Manifest:
    """What a file says, with the fields `given` in the place of its shared ones.

    Raises:
        ConfigError: it is no YAML file. FaultsError: keys that are no options, values of another kind or that make no sense; all of them.
    """
    told = load_yaml(path)
    known: dict[str, Any] = {**known_options(TrainConfig, (*LOADING, "library")), "concepts_together": int, "concepts": list}
    own = known_options(TrainConfig)
    faults: list[str] = []

    def checked(where: object, values: Mapping[Any, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in values.items():
            try:
                found[key] = checked_option(where, key, value, options)
            except ConfigError as error:
                faults.append(str(error))
        return found

    entries = told.pop("concepts", None)
    shared = checked(path, {key: value for key, value in told.items() if value is not None or key in own}, known)
    for key in (*OWN, "resume_from_checkpoint"):
        if shared.pop(key, None) is not None:
            faults.append(f"{path}: {key} stands at the top, expected {_where(key)}")
    loading = {name: shared.pop(name, None) for name in LOADING}
    together, library = shared.pop("concepts_together", None), shared.pop("library", None)
    if together is not None and together < 1:
        faults.append(f"{path}: concepts_together is {together}, expected a whole number from 1")
    shared = _absolute(shared, path.parent) | dict(given)
    output = Path(shared.pop("output_dir", path.absolute().parent / "concepts"))
    if not isinstance(entries, list) or not entries:
        faults.append(f"{path}: concepts is {entries!r}, expected a list of entries such as '- {{trigger: zqx, train_data_dir: zqx}}'")
        entries = []
    configs: list[TrainConfig] = []
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            faults.append(f"{path}: entry {number} is {entry!r}, expected lines such as 'trigger: zqx'")
            continue
        where = f"{path}: entry {number} ({entry.get('name') or entry.get('trigger')!r})"
        before = len(faults)
        mine = _absolute(checked(where, entry, own), path.parent)
        faults += [f"{where}: {key} is of the whole run; write it at the top" for key in WHOLE if key in mine]
        faults += [f"{where}: resume_from_checkpoint is {_where('resume_from_checkpoint')}"] * ("resume_from_checkpoint" in mine)
        faults += [f"{where}: no {key}; add it" for key in ("trigger", "train_data_dir") if key not in mine and key not in entry]
        if len(faults) > before:
            continue
        name = mine.get("name") or mine["trigger"]
        mine.setdefault("output_dir", str(output / file_name_of(name).removesuffix(".safetensors")))
        try:
            configs.append(TrainConfig(**{**shared, **mine}))
        except (TinyEngramError, TypeError, AttributeError) as error:
            faults.append(f"{where}: {error}")
    raise_faults(faults)
    return Manifest(tuple(configs), loading, output, together, None if library is None else path.absolute().parent / library)


def _where(key: str) -> str:
    if key == "resume_from_checkpoint":
        return "nowhere in a manifest: the same command goes on where it was stopped"
    return "it in an entry of concepts, each of which has its own"


def _absolute(fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    folder = folder.absolute()
    return {key: str(folder / value) if key in PATHS and isinstance(value, str) else value for key, value in fields.items()}


def manifest_text(manifest: Manifest) -> str:
    """A manifest as it is taken, as one that reads back the same: what all have in common stands at the top."""
    told = [config.to_dict() for config in manifest.configs]
    for each in told:
        each.pop("resume_from_checkpoint")
    shared = {key: value for key, value in told[0].items() if key not in (*OWN, "output_dir") and all(e[key] == value for e in told)}
    top: dict[str, Any] = {key: value for key, value in manifest.loading.items() if value is not None}
    top |= {"output_dir": str(manifest.output_dir)}
    top |= {} if manifest.concepts_together is None else {"concepts_together": manifest.concepts_together}
    top |= {} if manifest.library is None else {"library": str(manifest.library)}
    return yaml_text(top | shared | {"concepts": [{key: e[key] for key in e if key not in shared} for e in told]})
