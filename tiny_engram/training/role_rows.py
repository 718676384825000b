"""The trainable side of a concept that has something at several encoders: one `ConceptRows` for each role, taught in one run. May import
torch, rows and the core of concepts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tiny_engram.concept import Concept
from tiny_engram.context_plan import ContextLayout
from tiny_engram.training.class_word import Start
from tiny_engram.training.rows import ConceptRows

__all__ = ["RoleRows", "each_role", "make_rows"]


class RoleRows(nn.Module):
    """Masters of one concept at several roles: parameters are named "{role}.rows", "{role}.gain" and so on.

    Args:
        concept, layouts, starts: as `ConceptRows` takes them; the last two by role.
    """

    def __init__(self, concept: Concept, layouts: Mapping[str, ContextLayout], starts: Mapping[str, Mapping[str, Start]]) -> None:
        super().__init__()
        self.roles = tuple(concept.roles)
        for role in self.roles:
            self.add_module(role, ConceptRows(concept, role, layouts[role], starts=starts.get(role)))

    def of(self, role: str) -> ConceptRows:
        """One role's masters."""
        return self.get_submodule(role)  # pyright: ignore[reportReturnType]

    @property
    def positions(self) -> dict[str, int]:
        """Of all spellings, by role."""
        return {role: self.of(role).positions for role in self.roles}

    @property
    def shape(self) -> tuple[Any, ...]:
        """What concepts must have in common to be read in one pass."""
        return tuple((role, self.of(role).shape) for role in self.roles)

    def forward(
        self, parts: Mapping[str, Any], timesteps: Sequence[int], dtype: torch.dtype, others: Sequence["RoleRows"] = ()
    ) -> dict[str, Any]:
        """What `ConceptRows` gives, by role; parts are the captions as each role reads them, `others` as `ConceptRows` takes them."""
        return {role: self.of(role)(parts[role], timesteps, dtype, [one.of(role) for one in others]) for role in self.roles}

    def concept(self, start: Concept, role: str, values: Mapping[str, torch.Tensor]) -> Concept:
        """`start` with these values, named as the parameters, quantised: all roles', whatever `role` says."""
        for one in self.roles:
            prefix = f"{one}."
            own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
            start = self.of(one).concept(start, one, own)
        return start


def each_role(module: nn.Module) -> list[ConceptRows]:
    """The masters of each role: of one, or of several."""
    return [module.of(role) for role in module.roles] if isinstance(module, RoleRows) else [module]  # pyright: ignore[reportReturnType]


def make_rows(concept: Concept, layouts: Mapping[str, ContextLayout], starts: Mapping[str, Mapping[str, Start]]) -> ConceptRows | RoleRows:
    """The masters of a concept: `ConceptRows` where it has one role, so that checkpoints name parameters "rows", "gain", ...; `RoleRows`
    where it has several. `starts` by role, where rows begin at a word."""
    if len(concept.roles) > 1:
        return RoleRows(concept, layouts, starts)
    (role,) = concept.roles
    return ConceptRows(concept, role, layouts[role], starts=starts.get(role))
