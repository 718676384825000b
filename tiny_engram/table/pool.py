"""Rows across machines, through Mooncake Store: publish a table once, look rows up from any machine, and never wait longer than said.

Imports torch, kernels, tiny_engram.errors and its neighbours; mooncake runs in a process of its own (pool_link.py, pool_worker.py).
"""

import threading
import time
import warnings

import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.row_gather import Bounds, row_gather
from tiny_engram.kernels.row_gather.bounds import checked_mode, refuse, warn

from .pool_format import OBJECT_BYTES, Manifest, RowCheck, check_name, current_key
from .pool_link import Link, LinkError, PoolConfig, way_out
from .shared import SharedRows
from .storage import check_dtype, check_ids, room_for
from .table_digest import RowSource, RowsProgress, checked_source, digest_blocks, table_digest

__all__ = ["MooncakeRows", "PoolConfig", "publish"]

_ID_BYTES = 8


def publish(
    config: PoolConfig,
    name: str,
    source: RowSource,
    *,
    digest: str | None = None,
    replicas: int = 1,
    object_bytes: int = OBJECT_BYTES,
    progress: RowsProgress | None = None,
) -> Manifest:
    """Write a table into a pool, where readers find it by name once all of it is there.

    Objects that are there already, from a call that was interrupted or from before a store was lost, are not sent again. A table with
    another digest is a new version: readers that are attached keep theirs, readers that attach later get the new one.

    Args:
        name: letters, digits, '.', '_', '-'.
        source: rows, head_dim and ``read(first_row, count)``: a RowStorage, or a table file.
        digest: of the table, where it is known (table files carry it); None computes it, which reads the source once more.
        replicas: stores that hold each object; more than one needs as many stores.
        object_bytes: the most bytes of one object; staging_bytes is a limit too.
        progress: called with (rows done, rows in all).

    Raises:
        TableError: the pool is not reached, has no room, or did not keep what was sent. What was sent stays, unseen by readers.
    """
    check_name(name)
    checked_source(source)
    if source.rows < 1 or replicas < 1 or object_bytes < 1:
        raise TableError(f"{source.rows} rows, {replicas} replicas, objects of {object_bytes} B: expected 1 or more of each")
    link = Link(config)  # before the digest, which takes its time: what the machine lacks is said at once
    object_bytes = min(object_bytes, config.staging_bytes)
    if digest is None:
        digest = table_digest(source.rows, source.head_dim, digest_blocks(source))
    manifest = Manifest.of(name, source.rows, source.head_dim, digest, object_bytes)
    check = RowCheck(digest, source.head_dim)
    started = time.monotonic()

    def ask(method: str, *arguments):
        return link.request(time.monotonic() + config.connect_timeout_ms / 1000, method, *arguments)

    try:
        known = ask("get", manifest.key)
        if known is not None:  # readers rely on its cut: objects of other sizes must not come between
            manifest = Manifest.decode(known)
        for index in range(manifest.objects):
            count = manifest.object_rows(index)
            key, nbytes = f"{manifest.prefix}/part-{index:06d}", count * manifest.row_bytes
            found = ask("size", key)
            if found != nbytes:
                if found is not None:  # of a publication in other sizes that was not finished: putting does not replace
                    ask("remove", key)
                first = index * manifest.rows_per_object
                link.staging[:nbytes] = check.store(first, *source.read(first, count)).reshape(-1)
                ask("put", key, nbytes, replicas)
            if progress is not None:
                progress(min((index + 1) * manifest.rows_per_object, manifest.rows), manifest.rows)
        # Last: a reader that finds the manifest finds every row, and one that finds the name finds the manifest.
        ask("replace", manifest.key, manifest.encode(), replicas)
        ask("replace", current_key(name), digest.encode(), replicas)
    except LinkError as error:
        raise TableError(_message(config, name, error, started, "the table is not published")) from error
    finally:
        link.close()
    return manifest


def _message(config: PoolConfig, name: str, error: LinkError, started: float, before: str = "") -> str:
    elapsed = time.monotonic() - started
    lead = f"{before}: " if before else ""
    return f"pool table {name!r} at {config.master}, after {elapsed:.2f} s: {lead}{error}; {way_out(error.kind, config)}"


class MooncakeRows(SharedRows):
    """The rows of a published table, read over the network by id; an EngramLayer takes it as its table.

    Every row carries a check, so a lookup gives the rows that were published, or raises (with ``on_failure="zero"``: gives zeros), and
    does so within ``timeout_ms``. Threads may share it; their lookups take turns. After a failure the next lookup tries again, with pauses
    that grow up to 8 s between attempts to connect, in which lookups fail at once. ``copy.deepcopy`` shares the
    connection; it cannot be pickled.

    Attributes:
        manifest: what the table is; it stays that version.
        failures: lookups that could not be answered.
        bounds: what an id without a row does, as in EngramTable.
    """

    def __init__(self, config: PoolConfig, name: str, *, digest: str | None = None, bounds: Bounds = "fatal"):
        """Attach; waits up to connect_timeout_ms.

        Args:
            digest: the version; None takes the one published last.

        Raises:
            TableError: no pool there, or no such table in it; also with ``on_failure="zero"``.
        """
        check_name(name)
        self.bounds: Bounds = checked_mode(bounds, TableError)
        self.config = config
        self.name = name
        self.failures = 0
        self._warned = False
        self._lock = threading.Lock()
        self._link = Link(config)
        started = time.monotonic()
        deadline = started + config.connect_timeout_ms / 1000
        try:
            self.manifest = _find(self._link, name, digest, deadline)
        except LinkError as error:
            raise TableError(_message(config, name, error, started)) from error
        finally:
            if not hasattr(self, "manifest"):
                self._link.close()
        self._attached = self._link.generation
        self._check = RowCheck(self.manifest.digest, self.manifest.head_dim)
        self._capacity = (config.staging_bytes - _ID_BYTES) // (self.manifest.row_bytes + _ID_BYTES)

    @property
    def head_dim(self) -> int:
        """Values per row."""
        return self.manifest.head_dim

    def __len__(self) -> int:
        return self.manifest.rows

    def lookup(
        self,
        row_ids: torch.Tensor,
        *,
        bounds: Bounds | None = None,
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read rows; each is fetched once however often it is asked for.

        Args:
            row_ids: int64 ``[...]``; -1 is no row and gives zeros. Ids on a CUDA device are waited for.
            bounds: as the attribute, which counts when this is None.
            dtype: float32, bfloat16 or float16.
            out: contiguous ``[..., head_dim]`` on the ids' device to write into; its type then counts, not ``dtype``.

        Returns:
            ``[..., head_dim]`` on the ids' device, or ``out``.

        Raises:
            TableError: an id outside the table (``bounds="fatal"``), types that do not fit; with ``on_failure="raise"`` also rows that
                did not come in time.
        """
        check_ids(row_ids)
        mode = self.bounds if bounds is None else checked_mode(bounds, TableError)
        check_dtype(dtype if out is None else out.dtype)
        ids = row_ids.detach().cpu()
        if mode == "fatal":
            try:
                refuse(ids, len(self))
            except IndexError as error:
                raise TableError(f"pool table {self.name!r}: {error}") from error
        elif mode == "warn":
            warn(ids, len(self))
        there = (ids >= 0) & (ids < len(self))
        rows = room_for((*row_ids.shape, self.head_dim), dtype, row_ids.device, out)
        wanted, inverse = torch.unique(ids[there], return_inverse=True)
        slots = torch.full_like(ids, -1)
        slots[there] = inverse
        started = time.monotonic()
        deadline = started + self.config.timeout_ms / 1000
        if not wanted.numel():
            return rows.zero_()
        try:
            if not self._lock.acquire(timeout=self.config.timeout_ms / 1000):
                raise LinkError("timeout", "other threads' lookups took the time")
            try:
                return self._read(wanted, slots, rows, deadline)
            finally:
                self._lock.release()
        except LinkError as error:
            return self._failed(error, started, rows)

    def close(self) -> None:
        """End the connection; a later lookup would open another."""
        with self._lock:
            self._link.close()

    def _read(self, wanted: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, deadline: float) -> torch.Tensor:
        self._link.connect(deadline)
        if self._attached != self._link.generation:
            # Another master may answer by now, with another table under the old keys.
            if self._link.request(deadline, "get", self.manifest.key) != self.manifest.encode():
                raise LinkError("missing", f"version {self.manifest.digest[:16]} is not published any more")
            self._attached = self._link.generation
        if out.is_cuda:
            self._link.pin()
        pieces = [self._fetch(piece, deadline) for piece in wanted.split(self._capacity)] if wanted.numel() > self._capacity else None
        records = self._fetch(wanted, deadline, copy=False) if pieces is None else torch.cat(pieces)
        payload, scale = self._check.views(records.to(out.device))
        rows = row_gather(payload, scale, slots.to(out.device), bounds="ignore", out=out)
        self._warned = False
        return rows

    def _fetch(self, ids: torch.Tensor, deadline: float, *, copy: bool = True) -> torch.Tensor:
        """Stored rows uint8 ``[count, row_bytes]`` of ascending ids, checked; a view of the staging unless copied."""
        manifest, count = self.manifest, ids.numel()
        staging = self._link.staging
        start = count * _ID_BYTES
        stored = staging[start : start + count * manifest.row_bytes].view(count, manifest.row_bytes)
        staging[:start] = ids.view(torch.uint8)
        stored.fill_(0xFF)  # so that a range which nobody filled is not what an earlier lookup left there
        self._link.request(deadline, "read", manifest.prefix, manifest.rows_per_object, manifest.row_bytes, count, start)
        wrong = self._check.wrong(stored, ids)
        if bool(wrong.any()):
            self._link.drop()
            first = int(ids[wrong][0])
            raise LinkError("engine", f"{int(wrong.sum())} of {count} rows came back damaged, the first is row {first}")
        return stored.clone() if copy else stored

    def _failed(self, error: LinkError, started: float, out: torch.Tensor) -> torch.Tensor:
        self.failures += 1
        message = _message(self.config, self.name, error, started)
        if self.config.on_failure == "raise":
            raise TableError(message) from error
        if not self._warned:
            self._warned = True
            warnings.warn(f"{message}; until then rows are read as zeros (counted in failures)", RuntimeWarning, stacklevel=3)
        return out.zero_()


def _find(link: Link, name: str, digest: str | None, deadline: float) -> Manifest:
    """The manifest of that version, or of the one published last."""
    if digest is None:
        current: bytes | None = link.request(deadline, "get", current_key(name))
        if current is None:
            raise LinkError("missing", "no table of this name is published")
        digest = current.decode("ascii", "replace")
    blob: bytes | None = link.request(deadline, "get", f"{name}/{digest[:16]}/manifest")
    if blob is None:
        raise LinkError("missing", f"no version {digest[:16]} is published")
    manifest = Manifest.decode(blob)
    if (manifest.name, manifest.digest) != (name, digest):
        raise TableError(f"pool table {name!r} at {link.config.master}: its manifest is of {manifest.prefix}; publish the table again")
    return manifest
