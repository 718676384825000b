"""Concepts from the Hub: its own client, in a process of its own, against a server on this machine."""

import re

import pytest

from tests.pipelines.hub_client import LOAD, ClientError


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


def test_the_one_file_of_a_repo_by_every_way_to_say_it(hub, load, concept_blobs):
    hub.add("ann/toys", {"README.md": b"# toys", "zqx.safetensors": concept_blobs["zqx"], "more/zqy.safetensors": concept_blobs["zqy"]})
    assert load("ann/toys") == load("ann/toys", weight_name="zqx.safetensors") == load("hf://ann/toys") == "zqx"
    assert load("ann/toys", subfolder="more") == load("ann/toys", subfolder="more", weight_name="zqy.safetensors") == "zqy"
    assert load("hf://ann/toys/more/zqy.safetensors") == load("hf://models/ann/toys@main/more/zqy.safetensors") == "zqy"
    assert not [request for request in hub.requests if "README" in request]


def test_revisions_hold_their_own_bytes(hub, load, concept_blobs):
    repo = hub.add("ann/toys", {"a.safetensors": concept_blobs["zqx"]})
    first = repo.refs["main"]
    second = repo.commit({"a.safetensors": concept_blobs["zqy"]})
    repo.refs["v1"], repo.refs["a/b"], repo.refs["refs/pr/3"] = first, first, first
    assert load("ann/toys") == load("ann/toys", revision=second) == "zqy"
    for revision in ("v1", "a/b", "refs/pr/3", first):
        assert load("ann/toys", revision=revision) == "zqx"
    assert load("hf://ann/toys@v1") == load("hf://ann/toys@refs/pr/3/a.safetensors") == load("hf://ann/toys@a%2Fb") == "zqx"
    repo.commit({"a.safetensors": concept_blobs["zqz"]})
    assert load("ann/toys") == "zqz"  # a branch that moved is followed


def test_an_unchanged_file_is_not_downloaded_again(hub, load, concept_blobs):
    hub.add("ann/again", {"a.safetensors": concept_blobs["zqx"]})
    get = "GET /ann/again/resolve/main/a.safetensors"
    assert load("ann/again") == load("ann/again") == "zqx"
    assert hub.requests.count(get) == 1
    assert load("ann/again", force_download=True) == "zqx" and hub.requests.count(get) == 2


def test_a_cache_of_ones_own(hub, load, concept_blobs, tmp_path):
    hub.add("ann/own", {"a.safetensors": concept_blobs["zqx"]})
    assert load("ann/own", cache_dir=str(tmp_path / "cache")) == "zqx"
    assert [path.read_bytes() for path in (tmp_path / "cache").rglob("snapshots/*/a.safetensors")] == [concept_blobs["zqx"]]


def test_several_files_are_listed_and_none_is_said(hub, refused, concept_blobs):
    files = {f"{name}.safetensors": concept_blobs["zqx"] for name in "abcdefghij"}
    hub.add("ann/many", {**files, "more/x.safetensors": b""})
    text = refused("hf://ann/many: holds 10 files to choose from .*name one by weight_name=", "ann/many")
    assert "a.safetensors, b.safetensors" in text and "..." in text and "more" not in text
    hub.add("ann/none", {"pytorch_lora_weights.bin": b"pickle"})
    refused("hf://ann/none: holds no .safetensors file", "ann/none")
    refused("hf://ann/many/nowhere: holds no .safetensors file", "ann/many", subfolder="nowhere")


def test_what_is_not_there(hub, refused, concept_blobs):
    hub.add("ann/toys", {"a.safetensors": concept_blobs["zqx"]})
    refused("ann/nothing: no such path here; hf://ann/nothing: no such repo on the Hub; .*hf auth login", "ann/nothing")
    refused("hf://ann/nothing/a.safetensors: no such repo on the Hub", "hf://ann/nothing/a.safetensors")
    refused("hf://ann/toys@v9: the repo has no revision 'v9'; expected a branch, a tag or a commit", "ann/toys", revision="v9")
    refused("the repo has no revision 'v9'", "hf://ann/toys@v9/a.safetensors")
    refused("hf://ann/toys/b.safetensors: the repo has no such file at revision 'main'", "ann/toys", weight_name="b.safetensors")


def test_private_and_gated_repos(hub, load, refused, concept_blobs):
    hub.add("ann/secret", {"a.safetensors": concept_blobs["zqx"]}, private=True)
    refused("no such repo on the Hub; check the name, or, if it is private, log in", "ann/secret")
    refused("no such repo on the Hub", "ann/secret", token="t-bob")
    assert load("ann/secret", token="t-ann") == "zqx"
    hub.add("ann/gated", {"a.safetensors": concept_blobs["zqy"]}, gated_for={"bob"})
    for token in (False, "t-ann"):
        refused(f"the repo is gated; ask for access at {hub.endpoint}/ann/gated", "ann/gated", token=token)
    assert load("ann/gated", token="t-bob") == "zqy"
    refused("the Hub does not take the token", "ann/gated", token="t-eve")


def test_what_is_no_concept_file(hub, refused, load, concept_blobs):
    half = concept_blobs["zqx"][: len(concept_blobs["zqx"]) // 2]
    lora = concept_blobs["zqx"].replace(b"tiny_engram", b"tiny_engrum")
    hub.add(
        "ann/odd", {"half.safetensors": half, "lora.safetensors": lora, "big.safetensors": b"", "cut.safetensors": concept_blobs["zqx"]}
    )
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


def test_bytes_that_went_bad_on_the_way_are_named_and_fetched_again(hub, refused, load, concept_blobs):
    sound = concept_blobs["zqx"]
    bad = sound[:-1] + bytes([sound[-1] ^ 1])
    repo = hub.add("ann/bad", {"a.safetensors": bad})
    refused("hf://ann/bad/a.safetensors: .*its data is not what was saved .*force_download=True fetches it again", "ann/bad")
    repo.commit({"a.safetensors": sound})
    assert load("ann/bad") == "zqx"


def test_a_hub_that_fails_names_itself_and_the_cache_serves(hub, refused, load, concept_blobs):
    hub.add("ann/kept", {"a.safetensors": concept_blobs["zqx"]})
    assert load("ann/kept") == "zqx"
    for failing, reason in (("answer", "500 .*Internal Server Error"), ("hang up", "(RemoteProtocolError|ConnectionError)")):
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


def test_offline_reads_the_cache_and_says_how_to_fill_it(hub, load, offline, online, concept_blobs):
    repo = hub.add("ann/off", {"a.safetensors": concept_blobs["zqx"], "sub/b.safetensors": concept_blobs["zqz"]})
    repo.refs["v1"] = repo.refs["main"]
    repo.commit({"a.safetensors": concept_blobs["zqy"]})
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


def test_a_path_that_exists_comes_first(hub, online, concept_blobs, tmp_path):
    hub.add("ann/toys", {"a.safetensors": concept_blobs["zqx"]})
    (tmp_path / "ann" / "toys").mkdir(parents=True)
    (tmp_path / "ann" / "toys" / "b.safetensors").write_bytes(concept_blobs["zqy"])
    here = "import os\nos.chdir(folder)\nfrom tiny_engram.sources import load_source\nload_source('ann/toys').trigger"
    assert online(here, folder=tmp_path) == "zqy" and hub.requests == []
    assert online(here, folder="/") == "zqx"
