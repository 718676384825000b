"""Tiny-Engram: teach a frozen image generator a new thing as a table read only when its name is in the prompt.

Importing the package loads neither torch nor diffusers; each name below is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiny_engram.adapter import (
        EngramAdapter,
        attach,
        close_library,
        delete_concept,
        detach,
        disable_concepts,
        enable_concepts,
        explain,
        get_active_concepts,
        get_adapter,
        get_list_concepts,
        get_list_libraries,
        get_schedule,
        load_concept,
        open_library,
        register,
        scheduled,
        set_concepts,
        set_schedule,
        set_strength,
        step_callback,
        unload_concept,
    )
    from tiny_engram.concept import Concept, ConceptFileError
    from tiny_engram.config import ConceptConfig
    from tiny_engram.errors import TinyEngramError
    from tiny_engram.library import ConceptLibrary
    from tiny_engram.pipelines.engram_pipeline import EngramPipeline
    from tiny_engram.schedule_run import EngramSchedule
    from tiny_engram.schedules import Schedule
    from tiny_engram.sharing import push_to_hub, save_pretrained

__version__ = "0.1.0"

__all__ = [
    "Concept",
    "ConceptConfig",
    "ConceptFileError",
    "ConceptLibrary",
    "EngramAdapter",
    "EngramPipeline",
    "EngramSchedule",
    "Schedule",
    "TinyEngramError",
    "__version__",
    "attach",
    "close_library",
    "delete_concept",
    "detach",
    "disable_concepts",
    "enable_concepts",
    "explain",
    "get_active_concepts",
    "get_adapter",
    "get_list_concepts",
    "get_list_libraries",
    "get_schedule",
    "load_concept",
    "open_library",
    "push_to_hub",
    "register",
    "save_pretrained",
    "scheduled",
    "set_concepts",
    "set_schedule",
    "set_strength",
    "step_callback",
    "unload_concept",
]

_HOMES = {
    "Concept": "concept",
    "ConceptConfig": "config",
    "ConceptFileError": "concept",
    "ConceptLibrary": "library",
    "EngramPipeline": "pipelines.engram_pipeline",
    "EngramSchedule": "schedule_run",
    "Schedule": "schedules",
    "TinyEngramError": "errors",
    "push_to_hub": "sharing",
    "save_pretrained": "sharing",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'adapter')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
