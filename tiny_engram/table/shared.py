"""SharedRows: what holds rows, memory or a connection is shared by copies and refuses to be pickled. Imports errors."""

from typing import NoReturn, Self, SupportsIndex

from tiny_engram.errors import TableError

__all__ = ["SharedRows"]


class SharedRows:
    """A base class: rows may be hundreds of GiB, so no copy of a model or a configuration takes them along.

    ``copy.copy`` and ``copy.deepcopy`` give the object itself; closing it closes it for all. Pickling raises TableError.
    """

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TableError(
            f"{type(self).__name__} cannot be pickled, its rows stay in this process: open the file in the other process "
            "(EngramTable.open(path)); of a model, save the state_dict, which holds no rows"
        )
