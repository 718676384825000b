"""Whatever happens to a writer, and whenever: the library is as it was, or as it was to be."""

import os
import resource
import signal
import tempfile
from pathlib import Path

import pytest

from tests.library.conftest import in_child
from tiny_engram.library import ConceptLibrary, LibraryError

CALLS = ("pwrite", "fsync", "ftruncate", "replace", "link")


def changes(maker):
    """By name: a change to a library of twelve."""
    return {
        "add": lambda library: library.add(maker(30)),
        "add many": lambda library: library.add_many([maker(k) for k in range(30, 36)]),
        "remove": lambda library: library.remove(maker(2).name, maker(9).name),
        "compact": lambda library: library.compact(),
    }


def state_of(path) -> tuple[str, ...]:
    """The names, after everything was compared."""
    library = ConceptLibrary.open(path)
    assert library.verify() == len(library)
    return tuple(entry.name for entry in library)


@pytest.mark.parametrize("what", ["add", "add many", "remove", "compact", "create"])
@pytest.mark.parametrize("half", [False, True])
def test_killed_at_every_call(what, half, library, maker, tmp_path):
    """SIGKILL before the k-th call that changes anything, for every k; or in the middle of a write."""
    library.remove(maker(5).name)
    path = tmp_path / "new.engrams" if what == "create" else library.path
    before = library.path.read_bytes()
    old = state_of(library.path)

    def killed_at(k: int):
        """The change, in a process that ends at its k-th call."""
        left = [k]

        def counted(name):
            plain = getattr(os, name)

            def call(*arguments):
                if not left[0]:
                    if half and name == "pwrite":
                        plain(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2], arguments[2])
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return plain(*arguments)

            return call

        for name in CALLS:
            setattr(os, name, counted(name))
        ConceptLibrary.create(path) if what == "create" else changes(maker)[what](ConceptLibrary.open(path))

    seen = []
    for k in range(60):
        if what == "create":
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(before)
        signalled, answer = in_child(lambda k=k: killed_at(k))
        assert answer is None
        seen.append(state_of(path) if path.exists() else None)
        if not signalled:
            break
        assert signalled == signal.SIGKILL
        if path.exists() and what != "create":  # and the next writer finds nothing in its way
            again = ConceptLibrary.open(path)
            again.add(maker(40))
            assert state_of(path) == (*seen[-1], maker(40).name)
    else:
        pytest.fail("never came to its end")
    if what == "compact":
        ConceptLibrary.open(path).compact()
        assert [each.name for each in path.parent.iterdir()] == ["ducks.engrams"]  # nothing is left of those that were killed
    new = seen[-1]
    assert set(seen) <= ({None, new} if what == "create" else {old, new}) and len(seen) > 3
    assert what == "compact" or (seen[0] == (None if what == "create" else old) and seen[0] != new)


@pytest.mark.parametrize("what", ["add", "add many", "remove"])
def test_power_lost_at_every_call(what, library, maker, monkeypatch):
    """What was not flushed may be on the disk in part: none of it, all of it, or any one write, whole or torn."""
    path, before = library.path, library.path.read_bytes()
    old = state_of(path)
    calls: list[tuple[int, bytes] | None] = []
    write, flush = os.pwrite, os.fsync
    monkeypatch.setattr(os, "pwrite", lambda handle, blob, at: (calls.append((at, bytes(blob))), write(handle, blob, at))[1])
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(None), flush(handle))[1])
    changes(maker)[what](library)
    monkeypatch.undo()
    new = state_of(path)
    assert new != old and calls.count(None) == 2 and calls[-1] is None

    def image(writes) -> bytes:
        out = bytearray(before)
        for at, blob in writes:
            out[len(out) : at] = bytes(max(0, at - len(out)))
            out[at : at + len(blob)] = blob
        return bytes(out)

    seen = set()
    for cut in range(len(calls) + 1):
        done = calls[:cut]
        flushed = max((k for k, call in enumerate(done) if call is None), default=0)
        sure, loose = ([call for call in part if call] for part in (done[:flushed], done[flushed:]))
        torn = [[(at, blob[: len(blob) // 3])] for at, blob in loose]
        for found in ([], loose, *([call] for call in loose), *torn):
            path.write_bytes(image([*sure, *found]))
            seen.add(state_of(path))
    assert seen == {old, new}


@pytest.mark.parametrize("what", ["add", "add many", "compact"])
def test_disk_full(what, library, maker, tmp_path):
    """The kernel takes so many bytes and no more."""
    path, before = library.path, library.path.read_bytes()
    library.remove(maker(5).name)
    before = path.read_bytes()
    room = {"add": len(before) + 3000, "add many": len(before) + 20_000, "compact": len(before) // 2}[what]

    def act():
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        changes(maker)[what](library)

    signalled, error = in_child(act)
    assert signalled == 0 and isinstance(error, LibraryError), error
    assert "it is as it was; free space" in str(error) and "\n" not in str(error)
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["ducks.engrams"]
    changes(maker)[what](library)
    assert library.verify() == len(library)


def test_read_only(library, maker):
    """A user who may read and not write reads, and is told so."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "x.engrams"
        path.write_bytes(library.path.read_bytes())
        path.chmod(0o444)

        def act():
            if os.geteuid() == 0:
                os.setuid(65534)
            reader = ConceptLibrary.open(path)
            assert reader.verify() == 12 and reader.get(maker(4).name).trigger == maker(4).trigger
            said = []
            for change in changes(maker).values():
                with pytest.raises(LibraryError) as raised:
                    change(reader)
                said.append(str(raised.value))
            return said

        signalled, said = in_child(act)
    assert signalled == 0 and len(said) == 4, said
    assert all("cannot be changed (Permission denied)" in line and "it can be read" in line for line in said), said
