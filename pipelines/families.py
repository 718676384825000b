"""The families that concepts can be attached to, as data. A pipeline is recognised by the name of its class or of one of its bases.

Nothing of diffusers is imported, and of tiny_engram its errors alone.
"""

from typing import Any

from tiny_engram.errors import TinyEngramError
from tiny_engram.pipelines.dits import AURAFLOW, CHROMA, FLUX, HUNYUAN_DIT, PIXART, STABLE_DIFFUSION_3
from tiny_engram.pipelines.family import Family
from tiny_engram.pipelines.llm_dits import FLUX_2, FLUX_2_KLEIN, LUMINA_2, QWEN_IMAGE, SANA, Z_IMAGE
from tiny_engram.pipelines.unets import STABLE_DIFFUSION, STABLE_DIFFUSION_XL
from tiny_engram.pipelines.videos import COGVIDEOX, HUNYUAN_VIDEO, LTX, WAN

__all__ = ["FAMILIES", "check_family", "families", "family_of", "known_pipelines", "register_family"]

FAMILIES = (
    STABLE_DIFFUSION,
    STABLE_DIFFUSION_XL,
    STABLE_DIFFUSION_3,
    FLUX,
    CHROMA,
    PIXART,
    AURAFLOW,
    HUNYUAN_DIT,
    SANA,
    LUMINA_2,
    QWEN_IMAGE,
    Z_IMAGE,
    FLUX_2,
    FLUX_2_KLEIN,
    WAN,
    LTX,
    COGVIDEOX,
    HUNYUAN_VIDEO,
)
_added: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Have `attach` recognise one more family; it comes before the built-in ones, and in the place of an added one of its name.

    Raises TinyEngramError for anything but a Family.
    """
    check_family(family)
    _added[family.name] = family


def check_family(family: object) -> None:
    """Raises TinyEngramError for anything but a Family."""
    if not isinstance(family, Family):
        raise TinyEngramError(f"family is {str(family)[:60]!r}, expected a tiny_engram.pipelines.family.Family (docs/pipelines.md)")


def families() -> tuple[Family, ...]:
    """All that `attach` recognises, added ones first, the last added before the others."""
    return (*reversed(_added.values()), *FAMILIES)


def known_pipelines() -> list[str]:
    """Class names of every pipeline that concepts can be attached to."""
    return sorted({name for family in families() for name in family.pipelines})


def family_of(pipe: Any) -> Family | None:
    """The family of a pipeline: that of its class, else of the nearest base that belongs to one."""
    for cls in type(pipe).__mro__:
        for family in families():
            if cls.__name__ in family.pipelines:
                return family
    return None
