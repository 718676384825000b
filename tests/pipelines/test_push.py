"""Concepts to the Hub: its own client, in a process of its own, against a server on this machine."""

import hashlib
import json
import re
import shlex

import pytest
import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import tiny_engram
from tests.pipelines.hub_client import ClientError
from tiny_engram.concept_card import ConceptCard

PUSH = "import tiny_engram\nstr(tiny_engram.push_to_hub(given, repo, token='t-ann', **options))"


@pytest.fixture
def push(online, concept_blobs, tmp_path):
    """Push concept files by trigger to ann/shared, or whatever is given; what the process said is in `online.said`."""

    def call(*given: str, repo: str = "ann/shared", **options) -> str:
        paths = []
        for each in given:
            if each in concept_blobs:
                (tmp_path / f"{each}.safetensors").write_bytes(concept_blobs[each])
                each = str(tmp_path / f"{each}.safetensors")
            paths.append(each)
        return online(PUSH, given=paths, repo=repo, options=options)

    return call


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_push_makes_the_repo_and_what_it_holds_loads(hub, push, load, online, concept_blobs):
    url = push("zqx", license="mit", base_model="ann/tiny-sd")
    repo = hub.repos["ann/shared"]
    files = repo.files()
    assert url == f"{hub.endpoint}/ann/shared/commit/{repo.refs['main']}" and not repo.private and len(repo.commits) == 2
    assert files["zqx.safetensors"] == concept_blobs["zqx"] and repo.messages[-1] == "Concept zqx"
    assert set(files) == {".gitattributes", "README.md", "zqx.safetensors"}
    card = files["README.md"].decode()
    head = head_of(card)
    assert head["license"] == "mit" and head["base_model"] == "ann/tiny-sd" and head["base_model_relation"] == "adapter"
    assert head["instance_prompt"] == "zqx" and {"tiny-engram", "text-to-image", "template:diffusion-lora"} <= set(head["tags"])
    assert 'EngramPipeline.from_pretrained(base, "ann/shared")' in card and "--concept ann/shared" in card and '"step": 7' in card
    assert load("ann/shared") == "zqx"
    assert hashlib.sha256(concept_blobs["zqx"]).hexdigest() in hub.large


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


def test_a_folder_goes_up_as_it_is(hub, push, online, concept_blobs, tmp_path):
    folder = tmp_path / "mine"
    (folder / "checkpoint-5").mkdir(parents=True)
    (folder / "checkpoint-5" / "state.safetensors").write_bytes(b"not for others")
    (folder / "concept.safetensors").write_bytes(concept_blobs["zqx"])
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


def test_a_saved_folder_is_pushed_with_the_repo_in_its_card(hub, push, online, concept_blobs, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(concept_blobs["zqx"])
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


def test_pushes_that_are_refused(hub, push, online, offline, concept_blobs, tmp_path):
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


def test_the_command_line(hub, online, concept_blobs, tmp_path, saved_pipe):
    (tmp_path / "zqx.safetensors").write_bytes(concept_blobs["zqx"])
    info = PngInfo()
    info.add_itxt("parameters", json.dumps({"prompt": "a zqx in the sun", "concepts": ["C:/mine/zqx.safetensors"]}))
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
    assert b"C:/mine" not in b"".join(repo.files().values())
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
