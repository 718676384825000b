"""Jobs on disk: made whole or not at all, read from disk alone, in their order, and never by a path of a user's."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest

from tiny_engram.studio import job_folder, jobs
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.job_folder import JobState, Progress, hold, plain_message, progress_lines, read_state, write_state
from tiny_engram.studio.jobs import JobStore, Taught
from tiny_engram.studio.workspace import write_json


def test_a_job_is_what_was_asked_for_and_another_store_reads_the_same(store, workspace, taught, few_steps):
    job = store.create(taught, "  zqx ", aliases=["zqxs"], class_word="hat", preset="quick", options=few_steps(), model=None, threads=1)
    again = JobStore(workspace)
    assert again.job(job.id) == job and job.trigger == job.name == "zqx" and job.aliases == ("zqxs",) and job.steps == 4
    state = again.state(job.id)
    assert (state.state, state.step, state.steps, state.place) == ("queued", 0, 4, 1) and again.states() == [state]
    assert again.progress(job.id) == [] and again.samples(job.id) == []
    kept = again.pictures(job.id)
    assert [p.caption for p in kept] == ["a {trigger} on a dark background", ""]
    assert [p.path.read_bytes() for p in kept] == [p.path.read_bytes() for p in taught]
    config = job.train_config(store.folder(job.id))
    assert config.concept_path == store.concept_path(job.id) and config.trigger == "zqx" and config.class_word == "hat"
    assert str(workspace.root) not in (store.folder(job.id) / "job.json").read_text(), "a workspace may be moved"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trigger": "  "}, "the trigger is empty"),
        ({"trigger": "x" * 201}, "the trigger is 201 characters long"),
        ({"trigger": None}, "the trigger is empty"),
        ({"aliases": ["a"] * 17}, "17 aliases, expected at most 16"),
        ({"pictures": []}, "0 pictures, expected 1 to 256; add some"),
        ({"preset": "fast"}, "preset 'fast'"),
        ({"options": {"max_train_steps": -1}}, "max_train_steps is -1"),
        ({"caption": "a hat"}, "the caption of picture 1, 'a hat', does not hold the trigger 'zqx'; write {trigger}"),
        ({"caption": "{trigger} " + "x" * 1000}, "the caption of picture 1 has 1010 characters"),
        ({"blob": b"no picture"}, "0000.png: not a picture that can be read"),
        ({"class_word": "y" * 300}, "the class word is 300 characters long"),
    ],
)
def test_what_is_refused_leaves_nothing(store, workspace, taught, few_steps, changes, words):
    pictures = changes.pop("pictures", taught)
    if "caption" in changes:
        pictures = [Taught(path=taught[0].path, caption=changes.pop("caption"))]
    if "blob" in changes:
        taught[0].path.write_bytes(changes.pop("blob"))
    with pytest.raises(StudioError) as caught:
        store.create(pictures, **({"trigger": "zqx", "options": few_steps()} | changes))
    assert words in str(caught.value) and "\n" not in str(caught.value) and str(workspace.root) not in str(caught.value)
    assert list(workspace.jobs.iterdir()) == []


def test_a_full_disk_is_told_and_leaves_nothing(store, workspace, taught, few_steps, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(StudioError, match="No space left on device.*free space"):
        patch.setattr(jobs, "scan_folder", full)
        store.create(taught, "zqx", options=few_steps())
    assert list(workspace.jobs.iterdir()) == []


def test_a_kill_while_a_job_is_made_leaves_no_half_job(store, workspace, taught, few_steps):
    """A process that is killed with the files written and the name not given yet."""
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
        "from tiny_engram.studio import jobs\n"
        "jobs.write_state = lambda *args: os.kill(os.getpid(), signal.SIGKILL)\n"
        "store = jobs.JobStore(SimpleNamespace(jobs=sys.argv[1]))\n"
        "store.create([jobs.Taught(path=Path(sys.argv[2]))], 'zqx', preset='quick')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(workspace.jobs), str(taught[0].path)], check=False)
    left = list(workspace.jobs.iterdir())
    assert ended.returncode == -9 and len(left) == 1 and left[0].name.startswith(".")
    assert store.states() == []
    assert JobStore(workspace).states() == [] and list(workspace.jobs.iterdir()) == []


def test_the_queue_has_an_order_that_no_clock_can_change(store, taught, few_steps, monkeypatch):
    first = store.create(taught, "one", options=few_steps())
    monkeypatch.setattr(jobs.time, "time_ns", lambda: 1)
    second, third = (store.create(taught, word, options=few_steps()) for word in ("two", "three"))
    assert [(s.id, s.place) for s in store.states()] == [(third.id, 3), (second.id, 2), (first.id, 1)]
    store.enqueue(first.id)
    assert [(s.id, s.place) for s in store.states()] == [(first.id, 3), (third.id, 2), (second.id, 1)]


@pytest.mark.parametrize("id", ["../../etc", "..", "", "0" * 15, "0" * 16, "/etc", None, "<script>"])
def test_no_path_of_a_user_s(store, id):
    for call in (store.job, store.state, store.folder, store.progress, store.samples, store.pictures, store.delete, store.concept_path):
        with pytest.raises(StudioError, match="^no job ") as caught:
            call(id)
        assert str(store.root) not in str(caught.value)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"state": "asleep"}', b"\xff", b'{"state": {}}'])
def test_a_damaged_job_is_listed_and_can_be_deleted(store, taught, few_steps, damage):
    good, bad = (store.create(taught, word, options=few_steps()) for word in ("one", "two"))
    for name in ("state.json", "job.json"):
        (store.folder(bad.id) / name).write_bytes(damage)
    states = {state.id: state for state in store.states()}
    assert states[good.id].place == 1 and states[bad.id].state == "failed" and "damaged" in states[bad.id].message
    with pytest.raises(StudioError, match="damaged"):
        store.job(bad.id)
    store.delete(bad.id)
    assert [state.id for state in store.states()] == [good.id]


def test_states_survive_what_others_do(store, taught, few_steps):
    """Jobs are listed while others are made and taken away."""
    stop, errors = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                store.states()
            except Exception as error:
                errors.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(10):
        store.delete(store.create(taught[:1], "zqx", options=few_steps()).id)
    stop.set()
    for reader in readers:
        reader.join()
    assert errors == [] and store.states() == []


def test_progress_is_read_past_what_a_kill_cut_off(store, taught, few_steps):
    job = store.create(taught, "zqx", options=few_steps())
    file = store.folder(job.id) / "progress.jsonl"
    file.write_bytes(progress_lines([Progress(1, 0.5, 1.0), Progress(2, float("nan"), 2.0), Progress(2, 0.25, 3.0)]) + b"[3, 0.1")
    assert store.progress(job.id) == [Progress(1, 0.5, 1.0), Progress(2, 0.25, 3.0)]
    file.write_bytes(b"null\n[]\n{}\n[1, null, null]\n\n" + b"[" * 10_000)
    assert store.progress(job.id) == [Progress(1, None, None)]


def test_what_is_asked_of_a_process_shows(tmp_path):
    write_state(tmp_path, JobState(id=tmp_path.name, state="running", loss=float("inf")))
    assert read_state(tmp_path).state == "running" and read_state(tmp_path).loss is None
    (tmp_path / job_folder.PAUSE).touch()
    assert read_state(tmp_path).state == "pausing"
    (tmp_path / job_folder.CANCEL).touch()
    assert read_state(tmp_path).state == "cancelling"
    write_json(tmp_path / "state.json", {"state": "paused", "of a later version": 1})
    assert read_state(tmp_path).state == "paused"


def test_one_process_at_a_time_holds_a_job(tmp_path):
    lock = hold(tmp_path)
    assert lock is not None and hold(tmp_path) is None
    code = "import sys\nfrom pathlib import Path\nfrom tiny_engram.studio.job_folder import hold\nsys.exit(hold(Path(sys.argv[1])) is None)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == 1
    os.close(lock)
    assert subprocess.run(command, check=False).returncode == 0


def test_samples_come_in_order_and_others_are_left_alone(store, taught, few_steps):
    job = store.create(taught, "zqx", options=few_steps())
    folder = store.folder(job.id) / "samples"
    for name in ("step_000100.png", "step_000020.png", "step_x.png", ".step_000001.png.tmp"):
        shutil.copy(taught[0].path, folder / name)
    assert [step for step, _ in store.samples(job.id)] == [20, 100]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("/home/me/jobs/ab/pictures/0.png: not a picture", "0.png: not a picture"),
        (OSError("cannot open '/srv/models/tiny sd/unet'\nat all"), "cannot open 'tiny sd/unet' at all"),
        ("see https://example.org/a/b and a/b", "see https://example.org/a/b and a/b"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_messages_have_no_folders_of_the_server(error, words):
    assert plain_message(error) == words


def test_job_json_is_plain(store, taught, few_steps):
    job = store.create(taught, "zqx", options=few_steps())
    told = json.loads((store.folder(job.id) / "job.json").read_text())
    assert told["fields"]["max_train_steps"] == 4 and told["pictures"] == 2 and told["created"].endswith("Z")


def test_whole_checkpoints_are_told_from_others_as_training_does(tmp_path):
    from tiny_engram.checkpoints import list_checkpoints

    for name in ("checkpoint-3", "checkpoint-20", "checkpoint-x", "checkpoint-50.old", ".checkpoint-60.7.tmp", "damaged-checkpoint-70"):
        (tmp_path / "output" / name).mkdir(parents=True)
        (tmp_path / "output" / name / "state.json").touch()
    (tmp_path / "output" / "checkpoint-80").mkdir()
    assert job_folder.checkpoint_step(tmp_path) == list_checkpoints(tmp_path / "output")[-1][0] == 20
    assert job_folder.checkpoint_step(tmp_path / "nothing") == 0


def test_a_process_that_teaches_starts_without_torch():
    """So that it stops at once where it is asked to before it has begun."""
    code = "import sys, tiny_engram.studio.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_long_caption_is_not_repeated_whole(store, taught):
    long = [dataclasses.replace(taught[0], caption="lorem " * 160)]
    line = r"^the caption of picture 1, 'lorem .{50,60}\.\.\.', does not hold the trigger 'zorblax'; write"
    with pytest.raises(StudioError, match=line) as told:
        store.create(long, "zorblax")
    assert len(str(told.value)) < 250
