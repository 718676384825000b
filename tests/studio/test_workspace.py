"""The folder: one owner, nothing half-written, ids of the server alone, a bounded tmp."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from tiny_engram.studio import workspace as module
from tiny_engram.studio.errors import StudioError, without_folder
from tiny_engram.studio.workspace import Workspace, check_id, default_folder, free_name, new_id, read_json, write_json

HOLD = """
import sys, time
from tiny_engram.studio.workspace import Workspace
opened = Workspace.open(sys.argv[1])
print("open", flush=True)
time.sleep(60)
"""

LIST_OPEN = """
import os
print([os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")], flush=True)
input()
"""


def test_folders_are_made_and_private(tmp_path):
    with Workspace.open(tmp_path / "a" / "studio") as opened:
        assert {p.name for p in opened.root.iterdir()} == {"concepts", "drafts", "jobs", "gallery", "trash", "tmp", "lock"}
        assert stat.S_IMODE(opened.root.stat().st_mode) == 0o700


def test_the_default_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_ENGRAM_HOME", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"
    monkeypatch.delenv("TINY_ENGRAM_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_folder() == tmp_path / "data" / "tiny-engram"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".local" / "share" / "tiny-engram"


def test_two_of_one_process_never_share(tmp_path):
    first = Workspace.open(tmp_path)
    with pytest.raises(StudioError, match=rf"another Studio \(process {os.getpid()}\) has this folder open; close that one"):
        Workspace.open(tmp_path)
    first.close()
    first.close()
    Workspace.open(tmp_path).close()


def test_a_killed_owner_gives_the_folder_back(tmp_path):
    held = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert held.stdout is not None and held.stdout.readline() == "open\n"
        with pytest.raises(StudioError, match=f"process {held.pid}"):
            Workspace.open(tmp_path)
    finally:
        held.send_signal(signal.SIGKILL)
        held.wait()
    Workspace.open(tmp_path).close()


def test_a_process_of_a_job_does_not_keep_the_lock(tmp_path):
    opened = Workspace.open(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", LIST_OPEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, close_fds=False)
    try:
        assert child.stdout is not None and str(tmp_path / "lock") not in child.stdout.readline()
        opened.close()
        Workspace.open(tmp_path).close()
    finally:
        child.communicate("\n")


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StudioError, match=r"file: cannot keep the Studio's files there \(.*\); set TINY_ENGRAM_HOME"):
        Workspace.open(tmp_path / "file")
    (tmp_path / "studio").mkdir()
    (tmp_path / "studio" / "jobs").write_text("")
    with pytest.raises(StudioError, match="cannot keep"):
        Workspace.open(tmp_path / "studio")
    (tmp_path / "studio" / "jobs").unlink()
    Workspace.open(tmp_path / "studio").close()  # the refusal gave the lock back


def test_leftovers_of_a_killed_app_are_cleared(tmp_path):
    with Workspace.open(tmp_path) as opened:
        folder = opened.temporary()
        (folder / "export.safetensors").write_text("x")
        job = opened.jobs / new_id()
        job.mkdir()
        lefts = [place / ".abc.json.x1y2.tmp" for place in (opened.concepts, opened.drafts, opened.gallery, opened.trash, job)]
        lefts.append(job / ".old.tmp")
        for left in lefts:
            left.write_text("half")
        long_ago = time.time() - 3600
        os.utime(lefts[-1], (long_ago, long_ago))
        kept = [opened.concepts / "a.tmp", job / "state.json"]
        for file in kept:
            file.write_text("kept")
    with Workspace.open(tmp_path) as opened:
        assert not list(opened.tmp.iterdir())
        # a job's process may be writing at this moment
        assert [left.exists() for left in lefts] == [False] * 4 + [True, False]
        assert all(file.read_text() == "kept" for file in kept)


def test_tmp_is_bounded_by_count_and_bytes(workspace):
    made = [workspace.temporary(keep=5) for _ in range(200)]
    assert sorted(workspace.tmp.iterdir()) == made[-5:]
    for _ in range(4):
        (workspace.temporary() / "big").write_bytes(bytes(1000))
    newest = workspace.temporary(keep_bytes=2500)
    assert newest.is_dir() and sum(p.stat().st_size for p in workspace.tmp.rglob("big")) == 2000


def test_json_round_trip_and_what_is_none(tmp_path):
    path = tmp_path / "state.json"
    value = {"trigger": "zørblax \u2028 \U0001f600", "steps": [1, 2.5, None, True]}
    assert read_json(write_json(path, value)) == value
    with pytest.raises(ValueError):
        write_json(path, {"loss": float("nan")})
    assert read_json(path) == value and [p.name for p in tmp_path.iterdir()] == ["state.json"]
    path.write_text("{")
    with pytest.raises(StudioError, match=r"^state\.json: damaged, expected JSON"):
        read_json(path)
    path.write_bytes(b"[" * 200_000)
    with pytest.raises(StudioError, match="damaged"):
        read_json(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(StudioError, match="damaged"):
        read_json(path)
    path.write_bytes(b" " * (module.MOST_JSON + 1))
    with pytest.raises(StudioError, match="more than 4194304 bytes"):
        read_json(path)
    with pytest.raises(StudioError, match=r"^none\.json: cannot be read \(No such file") as error:
        read_json(tmp_path / "none.json")
    assert str(tmp_path) not in str(error.value)


def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    path = write_json(tmp_path / "state.json", 1)

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StudioError, match=r"cannot save \(No space left on device\); free space") as error:
        write_json(path, 2)
    assert str(tmp_path) not in str(error.value)
    monkeypatch.undo()
    assert read_json(path) == 1 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "given", ["", "..", "../../etc/passwd", "0" * 15, "0" * 41, "g" * 16, "0123456789abcdef/", "0123456789abcde\n", None, 7]
)
def test_an_id_is_of_the_server_or_refused(given):
    with pytest.raises(StudioError, match="no concept .*; reload the page"):
        check_id("concept", given)
    assert check_id("concept", new_id())


def test_free_names_count_up():
    assert free_name("Dog", set()) == "Dog"
    assert free_name("Dog", {"dog", "dog-2"}) == "Dog-3"


def test_errors_name_no_folder_of_the_server(tmp_path):
    path = tmp_path / "a.png"
    text = without_folder(f"{path}: broken\n at '{path}'", path, "a.png")
    assert text == "a.png: broken at 'a.png'"
