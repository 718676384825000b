"""What is served and what is refused, by requests that a browser or an attacker could send; and the command."""

import argparse
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse

import pytest

from tiny_engram.errors import TinyEngramError
from tiny_engram.studio import server
from tiny_engram.studio.guarding import PageFiles


@pytest.fixture(scope="module", autouse=True)
def command(tmp_path_factory, repo_root):
    """(process, port, data folder) of the command, which starts with this file, so that it has started when its test comes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = tmp_path_factory.mktemp("command") / "home"
    told = [sys.executable, "app.py", "--data_dir", str(home), "--port", str(port), "--device", "cpu"]
    with subprocess.Popen(told, cwd=repo_root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as app:
        yield app, port, home
        app.kill()


@pytest.fixture
def ask(page_url):
    """ask(path, method="GET", body=None, **headers) -> (status, headers, body), with the path sent as it is."""

    def send(path: str, method: str = "GET", body: bytes | None = None, url: str = page_url, **headers: str):
        place = urllib.parse.urlsplit(url)
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host="Host" in headers)
            for name, value in ({"Content-Length": str(len(body))} if body is not None else {}).items() | headers.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    return send


def test_the_page_comes_with_headers_that_bind_it_to_this_server(ask, page_url):
    assert page_url.startswith("http://127.0.0.1:")
    status, headers, body = ask("/")
    assert status == 200 and b"Tiny-Engram Studio" in body
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy and "object-src 'none'" in policy and "http" not in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "SAMEORIGIN"
    config = json.loads(ask("/config")[2])
    assert not config["analytics_enabled"] and config["footer_links"] == ["api"] and not config["show_error"]


def test_nothing_of_it_comes_from_elsewhere(ask):
    body = ask("/")[2].decode()
    sources = [part.split('"')[0] for word in ('src="', '<link rel="stylesheet" href="') for part in body.split(word)[1:]]
    assert not [source for source in sources if source.startswith(("http:", "https:", "//"))]


def test_names_of_other_sites_that_point_here_are_refused(ask):
    for host in ("evil.example", "evil.example:7860", "127.0.0.1.evil.example", ""):
        assert ask("/", Host=host)[0] == 421
    assert ask("/", Host="localhost")[0] == 200 and ask("/", Host="LOCALHOST:1")[0] == 200 and ask("/", Host="[::1]:7860")[0] == 200


def test_changes_asked_for_by_pages_of_other_sites_are_refused(ask, page_url):
    body = json.dumps({"data": [], "fn_index": 0, "session_hash": "x"}).encode()
    kind = {"Content_Type": "application/json"}
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        assert ask("/gradio_api/run/predict", "POST", body, Origin=origin, **kind)[0] == 403
    assert ask("/gradio_api/run/predict", "POST", body, Origin=page_url, **kind)[0] != 403


def test_files_of_the_server_are_not_served(ask, opened_studio):
    secret = opened_studio.workspace.root / "secret.txt"
    secret.write_text("hidden words")
    inside = opened_studio.workspace.concepts / "0123456789abcdef.safetensors"
    inside.write_text("hidden words")
    try:
        tmp = str(opened_studio.workspace.tmp)
        for path in (
            "/etc/passwd",
            str(secret),
            str(inside),
            f"{tmp}/../secret.txt",
            f"{tmp}/%2e%2e/secret.txt",
            os.getcwd() + "/README.md",
        ):
            for route in ("/gradio_api/file=", "/file=", "/gradio_api/file/", "/static/", "/assets/../../", "/theme.css/../"):
                status, _, body = ask(route + path)
                assert status in (307, 403, 404, 405) and b"hidden words" not in body and b"root:" not in body, (route, path, status)
    finally:
        secret.unlink()
        inside.unlink()


def test_it_fetches_nothing_for_others(ask):
    for path in ("/gradio_api/file=http://127.0.0.1:1/", "/gradio_api/file=https://example.com/", "/gradio_api/proxy=http://127.0.0.1:1/"):
        assert ask(path)[0] == 404
    for path in ("/docs", "/openapi.json", "/monitoring", "/gradio_api/mcp/"):
        assert ask(path)[0] in (404, 405), path


def test_uploads_are_bounded_and_their_names_are_no_paths(ask, opened_studio):
    def upload(name: str, blob: bytes):
        mark = "x" * 20
        head = f'--{mark}\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
        body = head.encode() + blob + f"\r\n--{mark}--\r\n".encode()
        return ask("/gradio_api/upload", "POST", body, Content_Type=f"multipart/form-data; boundary={mark}")

    status, _, told = upload("../../../escape.png", b"x")
    [path] = json.loads(told)
    tmp = str(opened_studio.workspace.tmp)
    assert status == 200 and os.path.realpath(path).startswith(tmp) and not (opened_studio.workspace.root / "escape.png").exists()
    assert upload("big.png", b"x" * (server.MOST_FILE + 2**20))[0] == 413
    assert ask("/gradio_api/upload", "POST", None, Content_Length=str(10**12))[0] == 413


def test_errors_of_events_that_were_made_up_say_nothing_of_the_server(ask, opened_studio):
    for body in (
        b"{",
        b"[]",
        b'{"fn_index": 99999, "data": [], "session_hash": "x"}',
        b'{"fn_index": 0, "data": [{}], "session_hash": "x"}',
    ):
        status, _, told = ask("/gradio_api/run/predict", "POST", body, Content_Type="application/json")
        assert status >= 400 and b"Traceback" not in told and str(opened_studio.workspace.root).encode() not in told


def test_with_auth_nothing_is_told_before_the_password(opened_studio, ask):
    with server.serve(opened_studio, auth=[("ann", "pass word:1")]) as served:
        for path in ("/config", "/gradio_api/info", "/gradio_api/file=" + str(opened_studio.workspace.tmp / "x")):
            assert ask(path, url=served.url)[0] == 401, path
        body = json.dumps({"data": [], "fn_index": 0, "session_hash": "x"}).encode()
        for path in ("/gradio_api/run/predict", "/gradio_api/queue/join", "/gradio_api/upload"):
            assert ask(path, "POST", body, url=served.url, Content_Type="application/json")[0] == 401, path
        assert b"Suggest a trigger" not in ask("/", url=served.url)[2] and b"Suggest a trigger" in ask("/")[2]

        def login(password: str):
            form = urllib.parse.urlencode({"username": "ann", "password": password}).encode()
            return ask("/login", "POST", form, url=served.url, Content_Type="application/x-www-form-urlencoded")

        assert login("wrong")[0] == 400
        status, headers, _ = login("pass word:1")
        assert status == 200
        cookie = headers["set-cookie"].split(";")[0]
        assert ask("/config", url=served.url, Cookie=cookie)[0] == 200


def test_what_stops_listening_leaves_the_studio_open(opened_studio):
    before = os.environ.get("GRADIO_TEMP_DIR")
    served = server.serve(opened_studio)
    port = urllib.parse.urlsplit(served.url).port
    with pytest.raises(TinyEngramError, match=f"127.0.0.1:{port}"):
        server.serve(opened_studio, port=port)
    served.close()
    served.close()
    assert os.environ.get("GRADIO_TEMP_DIR") == before
    assert opened_studio.library.cards() is not None
    with pytest.raises(TinyEngramError, match="--host"):
        server.serve(opened_studio, host="192.0.2.1")


def test_files_of_pages_are_bounded_and_the_newest_stay(tmp_path):
    files = PageFiles(tmp_path / "pages", keep=10, keep_bytes=2_000, young=0.0, every=0.01)
    for k in range(200):
        folder = files.folder / f"{k:03}"
        folder.mkdir()
        (folder / "picture.png").write_bytes(b"x" * 100)
        os.utime(folder / "picture.png", (k, k))
    files.prune()
    assert len(list(files.folder.rglob("*.png"))) == 10 and len(list(files.folder.iterdir())) == 10
    (files.folder / "big").write_bytes(b"x" * 1_950)
    files.start()
    until = time.monotonic() + 10
    while sum(len(names) for _, _, names in os.walk(files.folder)) > 1 and time.monotonic() < until:
        time.sleep(0.02)
    assert [path.name for path in files.folder.iterdir()] == ["big"]
    files.close()
    assert not files.folder.exists()


def test_fresh_files_stay_to_twice_the_bounds(tmp_path):
    files = PageFiles(tmp_path, keep=3)
    for k in range(8):
        (tmp_path / str(k)).write_text("x")
    files.prune()
    assert len(list(tmp_path.iterdir())) == 6


def test_who_may_come_in(tmp_path):
    assert server.read_auth("ann:a:b") == [("ann", "a:b")]
    (tmp_path / "users").write_text("ann:1\n\n bob:two words\n")
    assert server.read_auth(str(tmp_path / "users")) == [("ann", "1"), ("bob", "two words")]
    (tmp_path / "empty").write_text("\n")
    for wrong in ("ann", ":secret", "secret:", str(tmp_path / "empty")):
        with pytest.raises(TinyEngramError) as raised:
            server.read_auth(wrong)
        assert "secret" not in str(raised.value)


def test_options():
    parser = argparse.ArgumentParser(exit_on_error=False)
    server.add_arguments(parser)
    args = parser.parse_args(["--port", "7000", "--auth", "a:b", "--open"])
    assert (args.host, args.port, args.auth, args.open, args.data_dir) == ("127.0.0.1", 7000, "a:b", True, None)
    for port in ("0", "70000", "x"):
        with pytest.raises(argparse.ArgumentError, match="65535"):
            parser.parse_args(["--port", port])


def test_without_gradio_it_says_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gradio" else real(name, *rest))
    with pytest.raises(TinyEngramError, match=r"pip install 'tiny-engram\[app\]'"):
        server.main(argparse.Namespace())


def test_the_command_prints_where_it_answers_and_ends_at_a_signal(command):
    app, port, home = command
    line = app.stdout.readline()  # the base is loaded, and the page answers
    assert f"http://127.0.0.1:{port}" in line
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/")
    assert connection.getresponse().status == 200
    connection.close()
    app.send_signal(signal.SIGTERM)
    _, errors = app.communicate(timeout=30)
    assert app.returncode == 0 and "Traceback" not in errors, errors
    assert not list((home / "tmp").iterdir())
