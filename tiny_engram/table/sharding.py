"""One table for many ranks: rows split over them and summed, or one copy in the memory that a host's ranks share.

Imports torch (torch.distributed), kernels, tiny_engram.errors and its neighbours of the table package.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self, TypeVar, get_args

import torch
import torch.distributed as dist

from tiny_engram.errors import TableError
from tiny_engram.kernels.row_gather import OUT_DTYPES, Bounds, row_gather
from tiny_engram.kernels.row_gather.bounds import checked_mode
from tiny_engram.kernels.row_gather.bounds import count as count_outside
from tiny_engram.kernels.row_gather.bounds import refuse as refuse_outside

from .engram_table import EngramTable
from .mapped import map_rows, write_pool
from .report import TableReport
from .shared import SharedRows
from .storage import RowStorage, check_dtype, check_ids, room_for
from .table_file import TableFile

T = TypeVar("T")
Mode = Literal["split", "host_shared"]
ShardHome = Literal["device", "pinned", "pageable"]
_FACTS = ("rows_total", "head_dim", "mode", "first_row", "rows")
_READ_ROWS = 1 << 18  # rows that from_file copies at once

# torch 2.13 renamed both and warns under the old names, the only ones of 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def shard_range(rows: int, rank: int, world: int) -> tuple[int, int]:
    """First row and number of rows that ``rank`` of ``world`` holds; sizes differ by one at most, and may be 0.

    Raises:
        TableError: a rank outside ``0..world - 1``, or fewer than 0 rows.
    """
    if rows < 0 or not 0 <= rank < world:
        raise TableError(f"shard {rank} of {world} of {rows} rows: expected a rank in 0..world - 1 and 0 or more rows")
    first = rows * rank // world
    return first, rows * (rank + 1) // world - first


class ShardedTable(SharedRows):
    """Rows by id for all ranks of a process group.

    ``split``: every rank holds a range; a lookup reads what is here, zeros for the rest, and sums over the ranks. The sum is
    taken over bit patterns as integers, all zero but one, so that every bit of a row arrives: -0.0 and NaN too.
    ``host_shared``: every rank reads one copy in its host's memory by itself; no communication.
    ``copy.deepcopy`` shares the table; it cannot be pickled.

    Attributes:
        rows_total: rows of the whole table.
        bounds: what an id without a row does where the lookup does not say, as in EngramTable; the same on every rank.
    """

    def __init__(
        self,
        storage: RowStorage,
        *,
        first_row: int,
        rows_total: int,
        group: dist.ProcessGroup | None = None,
        mode: Mode = "split",
        bounds: Bounds = "fatal",
    ):
        """Every rank of the group must construct at the same time; they compare what they hold.

        Args:
            storage: this rank's rows, any home; ``host_shared`` takes the whole table.
            first_row: row id of ``storage``'s row 0.
            rows_total: rows of the whole table.
            group: None takes the default group.
            mode, bounds: see the class.

        Raises:
            TableError: no process group, or the ranks' tables do not make one whole: another row count, width or mode, a gap
                or an overlap. Every rank raises.
        """
        if mode not in get_args(Mode):
            raise TableError(f"mode {mode!r}: expected 'split' or 'host_shared'")
        _need_group(group)
        self.storage, self.mode = storage, mode
        self.first_row, self.rows_total = first_row, rows_total
        self.head_dim = storage.head_dim
        self.world = dist.get_world_size(group)
        self._group = group
        self._table = EngramTable.over(storage, bounds=bounds)
        self.bounds: Bounds = self._table.bounds
        self._device_types = _device_types(group)
        self._compare()

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        group: dist.ProcessGroup | None = None,
        home: ShardHome = "pageable",
        device: torch.device | str | None = None,
    ) -> Self:
        """Split a file over the ranks of a group; each reads its own range only.

        Args:
            path: a table file or its index, as :class:`TableFile` reads; every rank must see it.
            group: None takes the default group.
            home: where the rank's rows go, as in ``RowStorage.allocate``.
            device: for ``home="device"``.

        Raises:
            TableError: a rank could not read, or reads a file of another digest; every rank raises and names it.
        """
        _need_group(group)

        def read() -> tuple[RowStorage, int, int, str | None]:
            with TableFile(path) as source:
                first, count = shard_range(source.rows, dist.get_rank(group), dist.get_world_size(group))
                storage = RowStorage.allocate(count, source.head_dim, home=home, device=device)
                for start in range(0, count, _READ_ROWS):
                    storage.write(start, *source.read(first + start, min(_READ_ROWS, count - start)))
                return storage, first, source.rows, source.digest

        storage, first, total, digest = _together(read, f"reading {path}", group)
        _check_digests(digest, path, group)
        return cls(storage, first_row=first, rows_total=total, group=group)

    @classmethod
    def share_on_host(cls, path: str | Path, load: Callable[[], RowStorage], *, group: dist.ProcessGroup | None = None) -> Self:
        """Put one copy of a table where all ranks of a host map it, and attach every rank of the group.

        Args:
            path: of the pool, on a file system in memory (``/dev/shm``) or a DAX device. It stays until somebody removes it.
            load: makes the whole table; called by the first rank of each host only.
            group: None takes the default group.

        Raises:
            TableError: a rank could not load, write or attach, or hosts loaded other rows; every rank raises and names it.
        """
        _need_group(group)
        hosts = _gather_objects(_folder_identity(Path(path)), group)
        rank = dist.get_rank(group)
        loads = hosts.index(hosts[rank]) == rank
        digest = _together(lambda: write_pool(path, load()) if loads else None, f"writing the shared copy {path}", group)
        _check_digests(digest, path, group)
        storage = _together(lambda: map_rows(path, register=torch.cuda.is_available()), f"attaching to {path}", group)
        return cls(storage, first_row=0, rows_total=storage.rows, group=group, mode="host_shared")

    def lookup(
        self,
        row_ids: torch.Tensor,
        *,
        bounds: Bounds | None = None,
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
        same_ids: bool = True,
    ) -> torch.Tensor:
        """Rows by id; every rank of a split table must call it, with the same dtype and bounds.

        Args:
            row_ids: int64 ``[...]``, on a device that the group's backend serves (split); -1 gives zeros.
            bounds: as the attribute, which counts when this is None.
            dtype: float32, bfloat16 or float16.
            out: contiguous ``[..., head_dim]`` on the ids' device to write into; its type then counts, not ``dtype``.
            same_ids: True where all ranks ask for the same ids (tensor parallel): one all-reduce. Under ``fatal``, which waits for the
                host anyway, a checksum of the ids is compared first; under ``warn`` and ``ignore``, which can be captured, it is not:
                other ids give wrong rows there. False where each has its own, in any number (data parallel): ids are gathered first,
                rows reduced to the rank that asked; this synchronises with the host.

        Returns:
            ``[..., head_dim]`` on the device of ``row_ids``, or ``out``.

        Raises:
            TableError: an id outside the table under ``fatal``, a rank that does not answer; ranks that ask for different dtypes or,
                under ``fatal``, for different ids with ``same_ids=True``: every rank raises.
        """
        bounds = checked_mode(self.bounds if bounds is None else bounds, TableError)
        if self.mode == "host_shared":
            return self._table.lookup(row_ids, bounds=bounds, dtype=dtype, out=out)
        dtype = dtype if out is None else out.dtype
        check_dtype(dtype)
        check_ids(row_ids)
        if row_ids.device.type not in self._device_types:
            raise TableError(
                f"row ids are {row_ids.dtype} on {row_ids.device}: expected torch.int64 on a device that the group's backend serves "
                f"({', '.join(sorted(self._device_types))})"
            )
        rows = room_for((*row_ids.shape, self.head_dim), dtype, row_ids.device, out)
        if not same_ids:
            return self._lookup_own(row_ids, bounds, rows)
        if bounds == "fatal":
            if row_ids.is_cuda and torch.cuda.is_current_stream_capturing():
                raise TableError("bounds='fatal' waits for the device, which a captured stream cannot: look up with bounds='warn'")
            self._asked(row_ids, bounds, rows.dtype, same_ids=True)
        self._local(row_ids, bounds, rows)
        with self._peers("lookup"):
            dist.all_reduce(rows.view(torch.int32), group=self._group)
        return rows

    def check_bounds(self) -> int:
        """Warn of what ``bounds="warn"`` counted on this rank, as ``EngramTable.check_bounds``; with ``same_ids=False`` a split
        table counts the ids of all ranks."""
        return self._table.counters.check()

    def report(self) -> TableReport:
        """Where this rank's rows are, how they are held, and how many ids outside the table were counted. Waits for devices."""
        return self._table.report()

    def _lookup_own(self, row_ids: torch.Tensor, bounds: Bounds, rows: torch.Tensor) -> torch.Tensor:
        if row_ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise TableError("same_ids=False under stream capture: its counts go through the host; gather them first, pass same_ids=True")
        longest = max(self._asked(row_ids, bounds, rows.dtype, same_ids=False))
        padded = row_ids.new_full((longest,), -1)
        padded[: row_ids.numel()] = row_ids.reshape(-1)
        partial = rows.new_empty((self.world * longest, self.head_dim))
        self._local(self._gathered(padded).reshape(-1), bounds, partial)
        own = rows.new_empty((longest, self.head_dim))
        if longest:
            with self._peers("lookup"):
                _reduce_scatter(own.view(torch.int32), partial.view(torch.int32), group=self._group)
        return rows.copy_(own[: row_ids.numel()].view(rows.shape))

    def _asked(self, row_ids: torch.Tensor, bounds: Bounds, dtype: torch.dtype, *, same_ids: bool) -> list[int]:
        """How many ids each rank asks for; raises on every rank where what they ask for does not go together. Waits for devices."""
        facts = [OUT_DTYPES.index(dtype), get_args(Bounds).index(bounds), int(same_ids), row_ids.numel()]
        mine = torch.cat((torch.tensor(facts, device=row_ids.device), _checksum(row_ids) if same_ids else row_ids.new_zeros(1)))
        asked = self._gathered(mine).tolist()
        if len({tuple(other[:3]) for other in asked}) > 1:
            said = [f"rank {rank} {OUT_DTYPES[d]} {get_args(Bounds)[b]} same_ids={bool(s)}" for rank, (d, b, s, *_) in enumerate(asked)]
            raise TableError(f"ranks ask for different dtypes, bounds or same_ids ({', '.join(said)}): pass the same on every rank")
        if same_ids and len({tuple(other[3:]) for other in asked}) > 1:
            said = [f"rank {rank} {n} with checksum {c & (1 << 64) - 1:016x}" for rank, (*_, n, c) in enumerate(asked)]
            raise TableError(f"ranks ask for different row ids ({', '.join(said)}): pass same_ids=False where each rank has its own")
        return [other[3] for other in asked]

    def _local(self, row_ids: torch.Tensor, bounds: Bounds, out: torch.Tensor) -> None:
        """This rank's rows into ``out``, +0 bits where another rank holds them; raises alike on all ranks, before any communication."""
        violations = self._table.counters.at(row_ids.device) if bounds == "warn" else None
        payload, scale = self.storage.payload, self.storage.scale
        try:
            if row_ids.device == payload.device:
                row_gather(
                    payload,
                    scale,
                    row_ids,
                    first_row=self.first_row,
                    rows_total=self.rows_total,
                    bounds=bounds,
                    violations=violations,
                    out=out,
                )
                return
            # Host rows for a GPU: the table's planner knows the fast way across the bus, and takes ids of this storage alone.
            if bounds == "fatal":
                refuse_outside(row_ids, self.rows_total)
            elif violations is not None:
                count_outside(row_ids, self.rows_total, violations)
        except (IndexError, ValueError) as error:
            raise TableError(str(error)) from error
        local = row_ids - self.first_row
        local = local.masked_fill((local < 0) | (local >= self.storage.rows), -1)
        self._table.lookup(local, bounds="ignore", out=out)

    def _compare(self) -> None:
        mine = [self.rows_total, self.head_dim, get_args(Mode).index(self.mode), self.first_row, self.storage.rows]
        device = "cpu" if "cpu" in self._device_types else torch.device("cuda", torch.cuda.current_device())
        ranks = self._gathered(torch.tensor(mine, device=device)).tolist()
        for place in range(3):
            if len({facts[place] for facts in ranks}) > 1:
                said = ", ".join(f"rank {rank}: {facts[place]}" for rank, facts in enumerate(ranks))
                raise TableError(f"{_FACTS[place]} differs between ranks ({said}): load the same table on all of them")
        if self.mode == "host_shared":
            partial = [rank for rank, facts in enumerate(ranks) if facts[3:] != [0, self.rows_total]]
            if partial:
                raise TableError(f"ranks {partial} hold a part of {self.rows_total} rows: host_shared takes the whole table; use split")
            return
        for rank, (*_, first, rows) in enumerate(ranks):
            if not 0 <= first <= first + rows <= self.rows_total:
                raise TableError(f"rank {rank} holds rows {first}..{first + rows - 1} of {self.rows_total}: split by shard_range")
        end = 0
        for first, rows in sorted(facts[3:] for facts in ranks if facts[4]):
            if first != end:
                word = "belong to no rank" if first > end else "belong to two ranks"
                raise TableError(f"rows {min(first, end)}..{max(first, end) - 1} {word} of {self.world}: split by shard_range")
            end = first + rows
        if end != self.rows_total:
            raise TableError(f"the ranks' ranges end at row {end} of {self.rows_total}: was it split for other than {self.world} ranks?")

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[N]`` of every rank as ``[world, N]``."""
        out = tensor.new_empty((self.world * tensor.numel(),))
        if tensor.numel():
            with self._peers("comparing ranks"):
                _all_gather(out, tensor, group=self._group)
        return out.view(self.world, tensor.numel())

    @contextmanager
    def _peers(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            line = str(error).splitlines()[0]
            raise TableError(f"{what}: not all {self.world} ranks took part ({line}); look at their errors and start anew") from error


def _checksum(row_ids: torch.Tensor) -> torch.Tensor:
    """int64 ``[1]``: depends on every id and its place; made where the ids are, of whole numbers that wrap around."""
    mixed = row_ids.reshape(-1) + torch.arange(row_ids.numel(), device=row_ids.device) * -7046029254386353131
    # Not linear before the sum: ids that are shifted against each other would cancel out.
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31)).sum().reshape(1)


def _need_group(group: dist.ProcessGroup | None) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise TableError("there is no process group: call torch.distributed.init_process_group first, or use EngramTable")
    if dist.get_rank(group) < 0:
        raise TableError("this process is not a rank of the group that was given: construct the table on the group's ranks only")


def _device_types(group: dist.ProcessGroup | None) -> set[str]:
    """Kinds of devices whose tensors the group can send ("cpu:gloo,cuda:nccl" serves both)."""
    return {part.partition(":")[0] for part in dist.get_backend_config(group).split(",")}


def _gather_objects(mine: object, group: dist.ProcessGroup | None) -> list:
    out: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, mine, group=group)
    return out


def _together(action: Callable[[], T], what: str, group: dist.ProcessGroup | None) -> T:
    """Each rank's own result, or one error on all ranks: nobody is left waiting for a rank that failed."""
    failure, result = None, None
    try:
        result = action()
    except Exception as error:  # whatever it was, the others must hear of it
        failure = error
    told = _gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    bad = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
    if bad:
        raise TableError(f"{what} failed on {len(bad)} of {len(told)} ranks ({'; '.join(bad)})") from failure
    return result  # pyright: ignore[reportReturnType]


def _check_digests(mine: str | None, path: str | Path, group: dist.ProcessGroup | None) -> None:
    """Raises TableError on every rank where ranks know different digests; a rank that knows none (None) believes the others."""
    told = {rank: digest for rank, digest in enumerate(_gather_objects(mine, group)) if digest is not None}
    if len(set(told.values())) > 1:
        said = ", ".join(f"rank {rank}: {digest[:16]}" for rank, digest in told.items())
        raise TableError(f"{path}: digests differ between ranks ({said}): give all of them the same table")


def _folder_identity(path: Path) -> tuple[str, int, int]:
    """Equal for ranks that see one folder of one running machine; two containers of a host have a /dev/shm each."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not path.parent.exists():
        return "", 0, 0  # writing or attaching will say so
    folder = path.parent.stat()
    return boot.read_text().strip() if boot.exists() else "", folder.st_dev, folder.st_ino
