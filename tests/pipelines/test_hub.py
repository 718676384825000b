"""Concepts from the Hub and to it: the Hub's own client, in a process of its own, against a server on this machine."""

import hashlib
import json
import re
import shlex

import pytest
import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import tiny_engram
from tests.pipelines.fake_hub import FakeHub
from tests.pipelines.hub_client import ClientError, HubClient
from tiny_engram.concept_card import ConceptCard

LOAD = "from tiny_engram.sources import load_source\nload_source(source, **options).trigger"
PUSH = "import tiny_engram\nstr(tiny_engram.push_to_hub(given, repo, token='t-ann', **options))"


@pytest.fixture(scope="module")
def server():
    with FakeHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def clients(server, home):
    """One with the Hub and one without; they start side by side."""
    both = HubClient(server.endpoint, home), HubClient(server.endpoint, home, HF_HUB_OFFLINE="1")
    yield both
    for client in both:
        client.end()
    for client in both:
        client.close()


@pytest.fixture(scope="module")
def online(clients):
    return clients[0]


@pytest.fixture(scope="module")
def offline(clients):
    return clients[1]


@pytest.fixture
def hub(server):
    server.repos.clear()
    server.requests.clear()
    server.lying.clear()
    server.large.clear()
    server.failing = ""
    server.tokens.update({"t-ann": "ann", "t-bob": "bob"})
    return server


@pytest.fixture(scope="module")
def concepts(clients, tiny, tmp_path_factory):
    """Trigger -> bytes of a concept file."""
    pipe = tiny.build()
    adapter = tiny_engram.attach(pipe)
    folder = tmp_path_factory.mktemp("concepts")
    made = {}
    for seed, trigger in enumerate(("zqx", "zqy", "zqz")):
        concept = tiny.concept(adapter, trigger, seed=seed).with_details(base="tiny-sd", recipe={"step": 7, "pictures": 5})
        made[trigger] = concept.save(folder / f"{trigger}.safetensors").read_bytes()
    adapter.detach()
    return made


@pytest.fixture
def load(online):
    return lambda source, **options: online(LOAD, source=source, options=options)


@pytest.fixture
def refused(load):
    """A source that must be refused: one line that matches."""

    def call(words: str, source: str, **options) -> str:
        with pytest.raises(ClientError, match=words) as caught:
            load(source, **options)
        text = str(caught.value)
        assert caught.value.kind in ("HubError", "ConceptFileError", "TinyEngramError"), caught.value.kind
        assert "\n" not in text and len(text) < 600 and source.removeprefix("hf://").split("@")[0].split("/")[0] in text
        return text

    return call


# -- reading


def test_the_one_file_of_a_repo_by_every_way_to_say_it(hub, load, concepts):
    hub.add("ann/toys", {"README.md": b"# toys", "zqx.safetensors": concepts["zqx"], "more/zqy.safetensors": concepts["zqy"]})
    assert load("ann/toys") == load("ann/toys", weight_name="zqx.safetensors") == load("hf://ann/toys") == "zqx"
    assert load("ann/toys", subfolder="more") == load("ann/toys", subfolder="more", weight_name="zqy.safetensors") == "zqy"
    assert load("hf://ann/toys/more/zqy.safetensors") == load("hf://models/ann/toys@main/more/zqy.safetensors") == "zqy"
    assert not [request for request in hub.requests if "README" in request]


def test_revisions_hold_their_own_bytes(hub, load, concepts):
    repo = hub.add("ann/toys", {"a.safetensors": concepts["zqx"]})
    first = repo.refs["main"]
    second = repo.commit({"a.safetensors": concepts["zqy"]})
    repo.refs["v1"], repo.refs["a/b"], repo.refs["refs/pr/3"] = first, first, first
    assert load("ann/toys") == load("ann/toys", revision=second) == "zqy"
    for revision in ("v1", "a/b", "refs/pr/3", first):
        assert load("ann/toys", revision=revision) == "zqx"
    assert load("hf://ann/toys@v1") == load("hf://ann/toys@refs/pr/3/a.safetensors") == load("hf://ann/toys@a%2Fb") == "zqx"
    repo.commit({"a.safetensors": concepts["zqz"]})
    assert load("ann/toys") == "zqz"  # a branch that moved is followed


def test_an_unchanged_file_is_not_downloaded_again(hub, load, concepts):
    hub.add("ann/again", {"a.safetensors": concepts["zqx"]})
    get = "GET /ann/again/resolve/main/a.safetensors"
    assert load("ann/again") == load("ann/again") == "zqx"
    assert hub.requests.count(get) == 1
    assert load("ann/again", force_download=True) == "zqx" and hub.requests.count(get) == 2


def test_a_cache_of_ones_own(hub, load, concepts, tmp_path):
    hub.add("ann/own", {"a.safetensors": concepts["zqx"]})
    assert load("ann/own", cache_dir=str(tmp_path / "cache")) == "zqx"
    assert [path.read_bytes() for path in (tmp_path / "cache").rglob("snapshots/*/a.safetensors")] == [concepts["zqx"]]


def test_several_files_are_listed_and_none_is_said(hub, refused, concepts):
    files = {f"{name}.safetensors": concepts["zqx"] for name in "abcdefghij"}
    hub.add("ann/many", {**files, "more/x.safetensors": b""})
    text = refused("hf://ann/many: holds 10 files to choose from .*name one by weight_name=", "ann/many")
    assert "a.safetensors, b.safetensors" in text and "..." in text and "more" not in text
    hub.add("ann/none", {"pytorch_lora_weights.bin": b"pickle"})
    refused("hf://ann/none: holds no .safetensors file", "ann/none")
    refused("hf://ann/many/nowhere: holds no .safetensors file", "ann/many", subfolder="nowhere")


def test_what_is_not_there(hub, refused, concepts):
    hub.add("ann/toys", {"a.safetensors": concepts["zqx"]})
    refused("ann/nothing: no such path here; hf://ann/nothing: no such repo on the Hub; .*hf auth login", "ann/nothing")
    refused("hf://ann/nothing/a.safetensors: no such repo on the Hub", "hf://ann/nothing/a.safetensors")
    refused("hf://ann/toys@v9: the repo has no revision 'v9'; expected a branch, a tag or a commit", "ann/toys", revision="v9")
    refused("the repo has no revision 'v9'", "hf://ann/toys@v9/a.safetensors")
    refused("hf://ann/toys/b.safetensors: the repo has no such file at revision 'main'", "ann/toys", weight_name="b.safetensors")


def test_private_and_gated_repos(hub, load, refused, concepts):
    hub.add("ann/secret", {"a.safetensors": concepts["zqx"]}, private=True)
    refused("no such repo on the Hub; check the name, or, if it is private, log in", "ann/secret")
    refused("no such repo on the Hub", "ann/secret", token="t-bob")
    assert load("ann/secret", token="t-ann") == "zqx"
    hub.add("ann/gated", {"a.safetensors": concepts["zqy"]}, gated_for={"bob"})
    for token in (False, "t-ann"):
        refused(f"the repo is gated; ask for access at {hub.endpoint}/ann/gated", "ann/gated", token=token)
    assert load("ann/gated", token="t-bob") == "zqy"
    refused("the Hub does not take the token", "ann/gated", token="t-eve")


def test_what_is_no_concept_file(hub, refused, load, concepts):
    half = concepts["zqx"][: len(concepts["zqx"]) // 2]
    lora = concepts["zqx"].replace(b"tiny_engram", b"tiny_engrum")
    hub.add("ann/odd", {"half.safetensors": half, "lora.safetensors": lora, "big.safetensors": b"", "cut.safetensors": concepts["zqx"]})
    refused(
        "hf://ann/odd/half.safetensors: .*not a sound safetensors file .*force_download=True", "ann/odd", weight_name="half.safetensors"
    )
    refused("is this a LoRA or another model", "hf://ann/odd/lora.safetensors")
    hub.lying.update({"big.safetensors": "huge", "cut.safetensors": "cut"})
    refused("hf://ann/odd/big.safetensors: 314,572,800 bytes, expected at most 268,435,456", "hf://ann/odd/big.safetensors")
    assert "GET /ann/odd/resolve/main/big.safetensors" not in hub.requests
    refused("hf://ann/odd/cut.safetensors: .*Consistency check failed", "hf://ann/odd/cut.safetensors")
    hub.lying.clear()
    assert load("hf://ann/odd/cut.safetensors") == "zqx"  # nothing of the broken one was kept


def test_bytes_that_went_bad_on_the_way_are_named_and_fetched_again(hub, refused, load, concepts):
    sound = concepts["zqx"]
    bad = sound[:-1] + bytes([sound[-1] ^ 1])
    repo = hub.add("ann/bad", {"a.safetensors": bad})
    refused("hf://ann/bad/a.safetensors: .*its data is not what was saved .*force_download=True fetches it again", "ann/bad")
    repo.commit({"a.safetensors": sound})
    assert load("ann/bad") == "zqx"


def test_a_hub_that_fails_names_itself_and_the_cache_serves(hub, refused, load, concepts):
    hub.add("ann/kept", {"a.safetensors": concepts["zqx"]})
    assert load("ann/kept") == "zqx"
    for failing, reason in (("answer", "500 Internal Server Error"), ("hang up", "RemoteProtocolError")):
        hub.failing = failing
        assert load("ann/kept") == load("ann/kept", weight_name="a.safetensors") == "zqx"
        refused(f"hf://ann/never: the Hub at {hub.endpoint} did not answer as expected .*{reason}", "ann/never")


def test_ids_and_names_that_cannot_be(refused):
    refused("'a--b/c' is no repo id of the Hub", "a--b/c")
    refused("'hf://ann' is no address of a model on the Hub, expected hf://user/repo", "hf://ann")
    refused("hf://ann/toys/a.bin' names no .safetensors file", "hf://ann/toys/a.bin")
    refused("names no .safetensors file of a repo", "hf://ann/toys/../a.safetensors")
    refused("says already what revision, weight_name or subfolder say again", "hf://ann/toys@v1", revision="v2")
    refused("says already", "hf://ann/toys/a.safetensors", weight_name="b.safetensors")
    refused("ann.safetensors: does not exist; expected a concept file", "ann.safetensors")
    refused("ann/toys.safetensors: does not exist", "ann/toys.safetensors")
    refused("./ann/toys: does not exist", "./ann/toys")


def test_offline_reads_the_cache_and_says_how_to_fill_it(hub, load, offline, online, concepts):
    repo = hub.add("ann/off", {"a.safetensors": concepts["zqx"], "sub/b.safetensors": concepts["zqz"]})
    repo.refs["v1"] = repo.refs["main"]
    repo.commit({"a.safetensors": concepts["zqy"]})
    assert load("ann/off") == "zqy" and load("ann/off", revision="v1") == "zqx"
    hub.requests.clear()
    for client, options in ((offline, {}), (online, {"local_files_only": True})):
        for source, more, trigger in (
            ("ann/off", {}, "zqy"),
            ("ann/off", {"weight_name": "a.safetensors"}, "zqy"),
            ("ann/off", {"revision": "v1"}, "zqx"),
            ("hf://ann/off@v1/a.safetensors", {}, "zqx"),
            ("ann/off", {"force_download": True}, "zqy"),
        ):
            assert client(LOAD, source=source, options={**options, **more}) == trigger
        switch = "local_files_only=True" if options else "HF_HUB_OFFLINE=1"
        way_out = f"not in the cache, which {switch} keeps to; get it once without that, or by `hf download ann/"
        for source, more in (("ann/off", {"weight_name": "sub/b.safetensors"}), ("ann/off", {"revision": "v2"}), ("ann/never", {})):
            with pytest.raises(ClientError, match=re.escape(way_out)) as caught:
                client(LOAD, source=source, options={**options, **more})
            assert "\n" not in str(caught.value)
    assert hub.requests == []


def test_a_path_that_exists_comes_first(hub, online, concepts, tmp_path):
    hub.add("ann/toys", {"a.safetensors": concepts["zqx"]})
    (tmp_path / "ann" / "toys").mkdir(parents=True)
    (tmp_path / "ann" / "toys" / "b.safetensors").write_bytes(concepts["zqy"])
    here = "import os\nos.chdir(folder)\nfrom tiny_engram.sources import load_source\nload_source('ann/toys').trigger"
    assert online(here, folder=tmp_path) == "zqy" and hub.requests == []
    assert online(here, folder="/") == "zqx"


# -- writing


@pytest.fixture
def push(online, concepts, tmp_path):
    """Push concept files by trigger to ann/shared, or whatever is given; what the process said is in `online.said`."""

    def call(*given: str, repo: str = "ann/shared", **options) -> str:
        paths = []
        for each in given:
            if each in concepts:
                (tmp_path / f"{each}.safetensors").write_bytes(concepts[each])
                each = str(tmp_path / f"{each}.safetensors")
            paths.append(each)
        return online(PUSH, given=paths, repo=repo, options=options)

    return call


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_push_makes_the_repo_and_what_it_holds_loads(hub, push, load, online, concepts):
    url = push("zqx", license="mit", base_model="ann/tiny-sd")
    repo = hub.repos["ann/shared"]
    files = repo.files()
    assert url == f"{hub.endpoint}/ann/shared/commit/{repo.refs['main']}" and not repo.private and len(repo.commits) == 2
    assert files["zqx.safetensors"] == concepts["zqx"] and repo.messages[-1] == "Concept zqx"
    assert set(files) == {".gitattributes", "README.md", "zqx.safetensors"}
    card = files["README.md"].decode()
    head = head_of(card)
    assert head["license"] == "mit" and head["base_model"] == "ann/tiny-sd" and head["base_model_relation"] == "adapter"
    assert head["instance_prompt"] == "zqx" and {"tiny-engram", "text-to-image", "template:diffusion-lora"} <= set(head["tags"])
    assert 'EngramPipeline.from_pretrained(base, "ann/shared")' in card and "--concept ann/shared" in card and '"step": 7' in card
    assert load("ann/shared") == "zqx"
    assert hashlib.sha256(concepts["zqx"]).hexdigest() in hub.large


def test_the_same_again_writes_nothing(hub, push):
    push("zqx")
    push("zqx")
    assert len(hub.repos["ann/shared"].commits) == 2


def test_a_second_concept_joins_the_card_of_the_first(hub, push, load, tmp_path):
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    push("zqx", license="mit", pictures=[str(tmp_path / "red.png")])
    push("zqy")
    files = hub.repos["ann/shared"].files()
    card = ConceptCard.read(files["README.md"].decode())
    assert card is not None and [entry.trigger for entry in card.entries] == ["zqx", "zqy"] and card.license == "mit"
    assert [shown.url for shown in card.gallery] == ["images/zqx-0.png"] and "images/zqx-0.png" in files
    assert '["hf://ann/shared/zqx.safetensors", "hf://ann/shared/zqy.safetensors"]' in files["README.md"].decode()
    assert load("hf://ann/shared/zqy.safetensors") == "zqy"
    repo = hub.repos["ann/shared"]
    del repo.commits[repo.refs["main"]]["zqx.safetensors"]  # deleted on the Hub: the next card does not name it
    push("zqz")
    card = ConceptCard.read(repo.files()["README.md"].decode())
    assert card is not None and [entry.trigger for entry in card.entries] == ["zqy", "zqz"]


def test_a_card_that_was_edited_is_kept_and_said(hub, push, online):
    push("zqx")
    repo = hub.repos["ann/shared"]
    mine = repo.files()["README.md"].replace(b"# zqx", b"# My toy")
    repo.commit({"README.md": mine})
    push("zqy")
    assert repo.files()["README.md"] == mine and "zqy.safetensors" in repo.files()
    assert "ann/shared: its README.md was written or edited by somebody, so it is kept; replace_card=True writes a new one" in online.said
    push("zqy", replace_card=True)
    assert b"# My toy" not in repo.files()["README.md"] and b"hf://" not in mine


def test_a_folder_goes_up_as_it_is(hub, push, online, concepts, tmp_path):
    folder = tmp_path / "mine"
    (folder / "checkpoint-5").mkdir(parents=True)
    (folder / "checkpoint-5" / "state.safetensors").write_bytes(b"not for others")
    (folder / "concept.safetensors").write_bytes(concepts["zqx"])
    push(str(folder))
    assert set(hub.repos["ann/shared"].files()) == {".gitattributes", "README.md", "concept.safetensors"}
    # a card of one's own, and the pictures that it shows, go along
    (folder / "README.md").write_text("# Mine\n\n![](images/a.png)\n")
    (folder / "images").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "images" / "a.png")
    push(str(folder))
    files = hub.repos["ann/shared"].files()
    assert files["README.md"] == (folder / "README.md").read_bytes() and files["images/a.png"] == (folder / "images" / "a.png").read_bytes()
    push(str(folder))
    assert "edited" not in online.said


def test_a_saved_folder_is_pushed_with_the_repo_in_its_card(hub, push, online, concepts, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(concepts["zqx"])
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.webp")
    pictures = [str(tmp_path / "red.webp")]
    tiny_engram.save_pretrained(tmp_path / "a.safetensors", tmp_path / "out", license="mit", base_model="ann/base", pictures=pictures)
    assert "THIS_FOLDER" in (tmp_path / "out" / "README.md").read_text()
    push(str(tmp_path / "out"))
    files = hub.repos["ann/shared"].files()
    card = files["README.md"].decode()
    assert "THIS_FOLDER" not in card and head_of(card)["license"] == "mit" and head_of(card)["base_model"] == "ann/base"
    assert set(files) == {".gitattributes", "README.md", "zqx.safetensors", "images/zqx-0.webp"}


def test_private_repos_branches_and_pull_requests(hub, push, load, online, tmp_path):
    push("zqx", private=True)
    assert hub.repos["ann/shared"].private
    push("zqy", revision="wip", commit_message="Try it")
    repo = hub.repos["ann/shared"]
    assert "zqy.safetensors" not in repo.files() and "zqy.safetensors" in repo.files("wip") and repo.messages[-1] == "Try it"
    assert b"hf://ann/shared@wip/zqy.safetensors" in repo.files("wip")["README.md"]
    assert load("hf://ann/shared@wip/zqy.safetensors", token="t-ann") == "zqy"
    hub.add("bob/open", {})
    code = "import tiny_engram\ntiny_engram.push_to_hub(given, 'bob/open', token='t-ann', create_pr=True).pr_url"
    assert online(code, given=str(tmp_path / "zqx.safetensors")) == f"{hub.endpoint}/bob/open/discussions/1"
    assert "zqx.safetensors" not in hub.repos["bob/open"].files()


def test_pushes_that_are_refused(hub, push, online, offline, concepts, tmp_path):
    hub.add("bob/theirs", {})

    def refused(words: str, *given: str, **options) -> None:
        with pytest.raises(ClientError, match=words) as caught:
            push(*given, **options)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600

    refused("hf://bob/theirs: the token's account may not do that; use a token that can write to bob/theirs", "zqx", repo="bob/theirs")
    refused("'shared' is no repo id of the Hub, expected 'user/repo'", "zqx", repo="shared")
    hub.tokens.pop("t-ann")
    refused("hf://ann/shared: the Hub does not take the token", "zqx")
    code = "import tiny_engram\ntiny_engram.push_to_hub(given, 'ann/shared', token=False)"
    for client, words in ((online, "the Hub does not take the token, or wants one"), (offline, "HF_HUB_OFFLINE=1 keeps this process")):
        with pytest.raises(ClientError, match=f"hf://ann/shared: {words}"):
            client(code, given=str(tmp_path / "zqx.safetensors"))
    hub.requests.clear()
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    refused("junk.safetensors: not a sound safetensors file", str(tmp_path / "junk.safetensors"))
    refused("junk.safetensors: no picture that can be read .*expected PNG or WebP", "zqx", pictures=[str(tmp_path / "junk.safetensors")])
    refused("no concept was given")
    refused("two concepts would be 'zqx.safetensors'", "zqx", "zqx")
    assert hub.requests == [] and set(hub.repos) == {"bob/theirs"}


def test_a_write_between_ours_is_not_written_over(hub, push, online):
    push("zqx")
    code = """
from tiny_engram import hub
place = hub.Place(repo_id="ann/shared", token="t-ann")
Path("a.txt").write_text("a")
parent = hub.open_repo(place)
hub.commit_files(place, Path("."), ["a.txt"], message="first", parent=parent)
Path("b.txt").write_text("b")
hub.commit_files(place, Path("."), ["b.txt"], message="second", parent=parent)
"""
    with pytest.raises(ClientError, match="somebody wrote to the repo at the same time; push again"):
        online(code)
    assert "a.txt" in hub.repos["ann/shared"].files() and "b.txt" not in hub.repos["ann/shared"].files()


def test_the_command_line(hub, online, concepts, tmp_path, saved_pipe):
    (tmp_path / "zqx.safetensors").write_bytes(concepts["zqx"])
    info = PngInfo()
    info.add_itxt("parameters", json.dumps({"prompt": "a zqx in the sun", "concepts": ["/home/ann/zqx.safetensors"]}))
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png", pnginfo=info)
    run = "from tiny_engram.cli import main\nmain(argv)"
    file, picture = str(tmp_path / "zqx.safetensors"), str(tmp_path / "red.png")
    push = ["push", file, "ann/shell", "--token", "t-ann", "--private", "--license", "cc-by-4.0", "--picture", picture]
    assert online(run, argv=[*push, "--picture", f"{picture}=a zqx at night"]) == 0
    repo = hub.repos["ann/shell"]
    assert online.said.strip() == f"{hub.endpoint}/ann/shell/commit/{repo.refs['main']}" and repo.private
    widget = head_of(repo.files()["README.md"].decode())["widget"]
    assert widget == [
        {"text": "a zqx in the sun", "output": {"url": "images/zqx-0.png"}},
        {"text": "a zqx at night", "output": {"url": "images/zqx-1.png"}},
    ]
    assert b"/home/ann" not in b"".join(repo.files().values())
    repo.private = False
    assert online(run, argv=["inspect", "ann/shell", "--json"]) == 0 and json.loads(online.said)["trigger"] == "zqx"
    explain = ["explain", "--model", str(saved_pipe), "--device", "cpu", "--concept"]
    assert online(run, argv=[*explain, "ann/shell=0.5", "a zqx"]) == 0 and "strength 0.5" in online.said
    assert online(run, argv=[*explain, "hf://ann/shell@main/zqx.safetensors", "a zqx"]) == 0
    assert online(run, argv=[*explain, "ann/nothing", "a zqx"]) == 2
    assert (
        online.said.startswith("tiny-engram: ann/nothing: no such path here; hf://ann/nothing: no such repo")
        and online.said.count("\n") == 1
    )
    assert online(run, argv=["push", "nowhere", "ann/shell"]) == 2 and "nowhere: does not exist" in online.said


@pytest.fixture
def as_ann(online, tmp_path):
    """The process in a folder of its own, logged in."""
    yield online("import os\nos.environ['HF_TOKEN'] = 't-ann'\nos.chdir(folder)", folder=tmp_path)
    online("import os\nos.chdir(folder)\nos.environ.pop('HF_TOKEN')", folder="/")


def test_the_guide_runs_as_it_stands(hub, online, as_ann, repo_root, tiny, attached, saved_pipe, tmp_path):
    page = (repo_root / "docs" / "sharing.md").read_text()
    _, adapter = attached
    (tmp_path / "out" / "duck").mkdir(parents=True)
    tiny.concept(adapter, "zed-quack").save(tmp_path / "out" / "duck" / "concept.safetensors")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    drawn = 'pipe("a flat zed-quack on a green background"'
    assert '"assets/bases/emoji-sd"' in code and drawn in code
    code = code.replace('"assets/bases/emoji-sd"', "model").replace(drawn, f"{drawn}, num_inference_steps=1")
    listed = "\nimport os\n[*sorted(os.listdir('out/shared')), type(pipe).__name__]"
    assert online(code + listed, model=saved_pipe) == ["README.md", "images", "zed-quack.safetensors", "StableDiffusionPipeline"]
    assert online.said.strip().endswith(hub.repos["ann/zed-quack"].refs["main"])
    files = hub.repos["ann/zed-quack"].files()
    assert set(files) == {".gitattributes", "README.md", "zed-quack.safetensors", "images/zed-quack-0.png"}
    (shell,) = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for line in shell.splitlines():
        argv = shlex.split(line)[1:]
        argv[1:1] = ["--model", str(saved_pipe), "--device", "cpu"] if argv[0] in ("generate", "explain") else []
        argv += ["--num_inference_steps", "1"] if argv[0] == "generate" else []
        assert online("from tiny_engram.cli import main\nmain(argv)", argv=argv) == 0, online.said
    assert (tmp_path / "again.png").exists() and len(hub.repos["ann/zed-quack"].commits) == 3
