"""A config and the options beside it as a YAML file: read with unknown keys refused, written so that it reads back the same.

Imports PyYAML where it is used, config and errors. YAML is read as its version 1.2 has it: "no" is a word and 1e-3 a number, which PyYAML's
own loader takes for False and for a word.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny_engram.errors import ConfigError

__all__ = ["checked_option", "config_text", "known_options", "load_yaml", "read_config_file", "yaml_text"]


_FLOAT_TAG, _FLOAT_FIRST = "tag:yaml.org,2002:float", list("-+0123456789.")
_FLOAT = re.compile(r"^[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|nan))$")


def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Plain types alone."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for at, key in enumerate(keys):
                if key in keys[:at]:
                    raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands there twice", node.value[at][0].start_mark)
            return super().construct_mapping(node, deep=deep)

    # copied: these tables are the base class's own
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag not in ("tag:yaml.org,2002:bool", _FLOAT_TAG)]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
    Loader.add_implicit_resolver(_FLOAT_TAG, _FLOAT, _FLOAT_FIRST)
    return Loader


def load_yaml(path: Path) -> dict[Any, Any]:
    """The mapping that a file holds. Raises ConfigError: it cannot be read, or is none."""
    import yaml

    try:
        told = yaml.load(path.read_text(encoding="utf-8"), _loader())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config ({error.strerror or error}); pass a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: no YAML ({' '.join(str(error).split())}); expected lines such as 'max_train_steps: 300'") from error
    told = {} if told is None else told
    if not isinstance(told, dict):
        raise ConfigError(f"{path}: holds a {type(told).__name__}, expected lines such as 'max_train_steps: 300'")
    return told


def known_options(config: type, also: Sequence[str] = ()) -> dict[str, Any]:
    """Kinds of values by name: of a config's fields, and of other options, which are texts."""
    hints = typing.get_type_hints(config)
    return {field.name: hints[field.name] for field in dataclasses.fields(config)} | dict.fromkeys(also, str)


def checked_option(where: object, key: Any, value: Any, known: Mapping[str, Any]) -> Any:
    """The value of an option (lists as tuples). Raises ConfigError for a key that is none of the known ones (the nearest one is named), or
    a value of another kind; whether a value makes sense is the config's to say."""
    if key not in known:
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{where}: no option {key!r}; the nearest is {near!r}, and --help lists all")
    return _fitting(where, key, value, known[key])


def read_config_file(path: Path, config: type, also: Sequence[str] = ()) -> dict[str, Any]:
    """What a file says, by name: fields of a config (lists as tuples) and the options named in `also` (texts).

    Raises:
        ConfigError: as `load_yaml` and `checked_option` do.
    """
    known = known_options(config, also)
    told = load_yaml(path)
    for key in told:
        if key not in known:
            checked_option(path, key, None, known)
    return {key: checked_option(path, key, value, known) for key, value in told.items() if value is not None or key not in also}


def _fitting(where: object, key: str, value: Any, hint: Any) -> Any:
    """The value where it is of the field's kind; a whole number is also one with a fraction, and one value a list of one."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is tuple:
            item = typing.get_args(kind)[0]
            items = value if isinstance(value, list) else [value]
            if all(_is(each, item) for each in items):
                return tuple(items)
        elif _is(value, kind):
            return value
    said = " or ".join("a list" if typing.get_origin(kind) is tuple else _WORDS[kind] for kind in kinds)
    raise ConfigError(f"{where}: {key} is {value!r}, expected {said}")


_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def config_text(config: Any, also: Mapping[str, str | None] | None = None) -> str:
    """The YAML of a config with all of its fields, in their order, behind what else the run was told; keys without a value are left out
    of the latter. Floats read back to the same bits."""
    return yaml_text({key: value for key, value in (also or {}).items() if value is not None} | config.to_dict())


def yaml_text(told: Mapping[str, Any]) -> str:
    """A mapping of plain values as YAML that either version of it reads alike."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes what either version of YAML would take for something else than a text, and writes everything out."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    Dumper.add_implicit_resolver(_FLOAT_TAG, _FLOAT, _FLOAT_FIRST)
    return yaml.dump(dict(told), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)
