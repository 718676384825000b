"""What a hostile page, file or text could try that test_server and test_api do not, by requests to the page that is served."""

import http.client
import io
import os
import pickle
import re
import struct
import urllib.parse
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gradio as gr
import httpx2
import pytest
import torch
from PIL import Image

import tiny_engram
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.server import serve
from tiny_engram.studio.uploads import Limits, take_pictures
from tiny_engram.studio.workspace import MOST_TEMPORARY

SECRET = "hidden words"


def sent(url: str, path: str, **headers: str) -> tuple[int, bytes]:
    """(status, body) of a GET whose path goes out as it is."""
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    try:
        connection.putrequest("GET", path)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def event(page: gr.Blocks, elem_id: str, name: str):
    id = next(id for id, block in page.blocks.items() if getattr(block, "elem_id", None) == elem_id)
    return next(fn for fn in page.fns.values() if (id, name) in fn.targets)


# -- who is listened to


def test_it_listens_to_this_machine_alone_and_shares_nothing(served, http_):
    port = urllib.parse.urlsplit(served[1]).port
    with open("/proc/net/tcp") as table:
        ours = [line.split()[1] for line in table if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"]
    assert ours == [f"0100007F:{port:04X}"]
    config = http_.get("/config").json()
    assert not config.get("is_space") and not config.get("share_url") and config["enable_queue"] is not None
    assert "gradio.live" not in http_.get("/").text


def test_other_sites_get_no_leave_to_read(served, http_):
    for origin in ("http://evil.example", "null", served[1].replace("127.0.0.1", "127.0.0.1.evil.example")):
        for method in ("GET", "OPTIONS"):
            answer = http_.request(method, "/config", headers={"Origin": origin, "Access-Control-Request-Method": "POST"})
            allowed = answer.headers.get("access-control-allow-origin")
            assert allowed is None or allowed == served[1], (origin, method, allowed)


@pytest.mark.parametrize(
    "route", ["/gradio_api/queue/join", "/gradio_api/upload", "/gradio_api/call/suggest", "/gradio_api/cancel", "/login"]
)
def test_no_route_takes_changes_from_another_site(http_, route):
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        kind = {"Content-Type": "text/plain"}  # which a form can send without asking
        assert http_.post(f"/{route}", content=b'{"data": []}', headers={**headers, **kind}).status_code == 403, headers


def test_heads_of_requests_are_bounded(served):
    place = urllib.parse.urlsplit(served[1])
    for head in (b"GET /" + b"x" * 10**6 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"y" * 10**6 + b"\r\n\r\n"):
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=20)
        connection.connect()
        try:
            connection.sock.sendall(head)
            answer = connection.sock.recv(64)
        except ConnectionError:
            answer = b""
        finally:
            connection.close()
        assert not answer or b" 4" in answer[:16], answer
    assert sent(served[1], "/config")[0] == 200, "and it goes on"


# -- files


def test_no_route_leads_to_files_of_the_server(served, tmp_path):
    studio, url = served
    workspace = studio.workspace
    outside = tmp_path / "outside.txt"
    outside.write_text(SECRET)
    job = workspace.jobs / ("0" * 16)
    job.mkdir()
    planted = [
        job / "job.json",
        workspace.gallery / "notes.txt",
        workspace.trash / "gone.txt",
        workspace.root / "tray" / "tray.txt",
    ]
    planted[-1].parent.mkdir(exist_ok=True)
    for path in planted:
        path.write_text(SECRET)
    links = [workspace.gallery / "link.png", workspace.tmp / "link.png", workspace.tmp / "folder"]
    for link in links[:2]:
        link.symlink_to(outside)
    links[2].symlink_to(tmp_path)
    tmp = str(workspace.tmp)
    wanted = [str(path) for path in (*planted, *links[:2], outside)]
    wanted += [f"{tmp}/../jobs/{job.name}/job.json", f"{tmp}/..%2fgallery%2fnotes.txt", f"{tmp}/%2e%2e/gallery/notes.txt"]
    wanted += [f"{tmp}/folder/outside.txt", f"{tmp}/%252e%252e/gallery/notes.txt", f"{tmp}/x/..\\..\\gallery\\notes.txt"]
    wanted += ["/proc/self/environ", "/proc/self/cmdline", f"/proc/self/root{outside}", f"/proc/{os.getpid()}/maps", "/dev/zero"]
    wanted += ["file:///etc/passwd", "//etc/passwd", "/etc/passwd%00.png", "../" * 12 + "etc/passwd", "..%2f" * 12 + "etc%2fpasswd"]
    marks = (SECRET.encode(), b"root:", b"PATH=", b"pytest\0", b"r-xp")
    try:
        for path in wanted:
            for route in (
                "/gradio_api/file=",
                "/gradio_api/file/",
                "/file=",
                "/static/",
                "/assets/",
                "/theme/",
                "/",
                "/gradio_api/stream/x/y/z/",
            ):
                status, body = sent(url, urllib.parse.quote(route + path, safe="/%=:.\\"))
                assert status in (307, 400, 403, 404, 405, 500) and not any(mark in body for mark in marks), (
                    route,
                    path,
                    status,
                    body[:80],
                )
                assert status != 500, (route, path)
    finally:
        for path in (*planted, *links):
            path.unlink()
        job.rmdir()


def test_no_file_of_the_server_becomes_an_input(served, http_, picture_bytes, called):
    """A handler that takes a file must get none that the browser only named."""
    studio, _ = served
    id = studio.gallery.add(Image.open(io.BytesIO(picture_bytes())), {"prompt": "mine", "seed": 1})
    path = str(studio.gallery.get(id).file)
    for file in (path, "/proc/self/environ", f"{studio.workspace.tmp}/../lock", {"url": "http://127.0.0.1:1/x.png"}):
        given = {"meta": {"_type": "gradio.FileData"}, "orig_name": "a.png", **(file if isinstance(file, dict) else {"path": file})}
        told = called(http_, "train", [[given], "zorp-quib", None, None, "", "quick", None])
        assert "event: error" in told and path not in told
    assert studio.jobs.states() == []
    studio.gallery.delete(id)


# -- uploads


def bomb(side: int) -> bytes:
    """A PNG of side x side pixels in some kilobytes, whose header says so."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    row = bytes(1 + side // 8)
    rows = b"".join(packer.compress(row * 64) for _ in range(side // 64)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_bombs_are_refused_by_their_head(served, http_, tmp_path, called):
    blob = bomb(40_000)
    assert len(blob) < 300_000
    [path] = http_.post("/gradio_api/upload", files={"files": ("bomb.png", blob)}).json()
    told = called(http_, "train", [[{"path": path, "meta": {"_type": "gradio.FileData"}}], "zorp-quib", None, None, "", "quick", None])
    assert "event: error" in told and "pixels" in told, told
    with pytest.raises(StudioError, match="pixels"):
        served[0].gallery.settings_of(_written(tmp_path / "bomb.png", blob))


def _written(path, blob: bytes):
    path.write_bytes(blob)
    return path


def test_pictures_are_bounded_in_number_and_bytes(tmp_path, picture_bytes):
    small = picture_bytes(side=8)
    taken = take_pictures([(f"{k}.png", small) for k in range(Limits().files + 5)], tmp_path)
    assert len(taken.pictures) == Limits().files and len(taken.refused) == 5
    taken = take_pictures([(f"{k}.png", small) for k in range(5)], tmp_path, Limits(total_bytes=3 * len(small)))
    assert len(taken.pictures) == 3 and all("in all" in why for _, why in taken.refused)
    taken = take_pictures([("big.png", small + bytes(Limits().file_bytes))], tmp_path)
    assert not taken.pictures and "32 MiB, expected at most 32 MiB" in taken.refused[0][1]


class Exploit:
    def __reduce__(self):
        return os.mkdir, (os.environ["EXPLOIT"],)


def test_nothing_is_unpickled(served, http_, tmp_path, monkeypatch):
    """A pickle in the place of a concept or a picture is refused, whatever it is called, and not run."""
    studio, _ = served
    monkeypatch.setenv("EXPLOIT", str(tmp_path / "exploited"))
    saved = io.BytesIO()
    torch.save({"rows": Exploit()}, saved)
    old = io.BytesIO()
    torch.save({"rows": Exploit()}, old, _use_new_zipfile_serialization=False)
    for blob in (pickle.dumps(Exploit()), saved.getvalue(), old.getvalue()):
        for name in ("x.safetensors", "x.pt", "x.bin", "x.pkl"):
            with pytest.raises(StudioError):
                studio.library.import_file(_written(tmp_path / name, blob), name)
        assert not take_pictures([("x.png", blob)], tmp_path).pictures
        _written(studio.workspace.concepts / ("1" * 16 + ".safetensors"), blob)
        studio.library.version += 1
        [card] = studio.library.cards()
        assert card.error
        studio.library.delete(card.id)
    assert studio.library.cards() == [] and not (tmp_path / "exploited").exists()
    for source in Path(tiny_engram.__file__).parent.rglob("*.py"):
        assert not re.search(
            r"\b(pickle|dill|marshal|shelve)\b.*\bimport|\bimport (pickle|dill|marshal|shelve)\b|torch\.load\(", source.read_text()
        ), source


# -- what is left behind


def test_temporary_files_are_bounded_over_two_hundred_runs(served, http_, called):
    """As a client draws: a picture of the gallery's, gradio's own copy of it, and the folder it was made in."""
    studio, _ = served
    draws = 200
    before = len(studio.gallery.entries(1_000))

    def draw(k: int) -> str:
        return called(http_, "generate", ["a duck", "", k, 1, 1.0, {}, False])

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(draw, range(draws)))
    assert all("event: complete" in each for each in told), next(each for each in told if "event: complete" not in each)
    made = len(studio.gallery.entries(1_000)) - before
    assert made == draws
    [pages] = studio.workspace.tmp.glob("pages-*")
    folders = [path for path in studio.workspace.tmp.iterdir() if path != pages]
    assert len(folders) <= MOST_TEMPORARY
    assert sum(path.is_file() for path in pages.rglob("*")) <= 2 * 256


def test_files_of_pages_go_after_a_while(served):
    from tiny_engram.studio.ui.page import build_page

    page = build_page(served[0])
    assert page.delete_cache and page.delete_cache[0] <= 600 and page.delete_cache[1] <= 3_600


# -- the password


def test_a_password_guards_every_route(served, picture_bytes, called):
    studio, _ = served
    id = studio.gallery.add(Image.open(io.BytesIO(picture_bytes())), {"prompt": "mine"})
    with serve(studio, auth=[("ann", "pass word:1"), ("bob", "two")]) as guarded, httpx2.Client(base_url=guarded.url, timeout=30) as guest:
        routes = ["/config", "/gradio_api/info", "/gradio_api/queue/status", "/gradio_api/heartbeat/x"]
        routes += [f"/gradio_api/file={studio.gallery.get(id).file}", "/gradio_api/queue/data?session_hash=x", "/gradio_api/call/suggest/x"]
        for route in routes:
            with guest.stream("GET", route) as answer:  # of which some would go on for ever
                assert answer.status_code in (401, 403, 404), route
        for route in ("call/suggest", "queue/join", "upload", "run/predict", "cancel", "component_server"):
            assert guest.post(
                f"/gradio_api/{route}", json={"data": [], "session_hash": "x", "fn_index": 0, "event_id": "x"}
            ).status_code in (
                401,
                403,
                404,
            ), route
        for name, word in (("ann", ""), ("ann", "two"), ("", ""), ("bob", "pass word:1"), ("ann' or 1=1", "x"), ("ann", "pass word:1 ")):
            assert guest.post("/login", data={"username": name, "password": word}).status_code in (400, 422)
        assert guest.get("/config", cookies={"access-token": "x", "access-token-unsecure": "x"}).status_code == 401
        assert guest.post("/login", data={"username": "ann", "password": "pass word:1"}).status_code == 200
        assert "event: complete" in called(guest, "suggest", [])
        cookie = next(c for c in guest.cookies.jar if c.name.startswith("access-token"))
        assert cookie.has_nonstandard_attr("HttpOnly")
        assert len(cookie.value or "") >= 16
    studio.gallery.delete(id)
