"""`tiny-engram library`: its verbs in order, and one line for every mistake."""

import hashlib
import json
import re

import pytest

from tiny_engram.cli import main
from tiny_engram.library import ConceptLibrary


@pytest.fixture
def folder(tmp_path, maker, monkeypatch):
    """A working directory with concepts/: five files."""
    (tmp_path / "concepts").mkdir()
    for k in range(5):
        maker(k).save(tmp_path / "concepts" / f"{k}.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys, folder):
    def call(*words, code=0):
        capsys.readouterr()
        assert main(["library", *map(str, words)]) == code, words
        out, err = capsys.readouterr()
        return out if not code else err

    return call


def test_every_verb(run, folder, maker):
    assert run("create", "x.engrams") == "x.engrams: an empty library\n" and run("list", "x.engrams") == "no concepts in x.engrams\n"
    names = [maker(k).name for k in range(5)]
    assert run("add", "x.engrams", "concepts") == (
        f"x.engrams: added 5 concepts ({', '.join(map(repr, names[:4]))}, ...), holds 5\n"
    )  # fmt: skip
    maker(7).save("seven.safetensors")
    assert run("add", "x.engrams", "seven.safetensors", "--name", "my seven") == "x.engrams: added 1 concept ('my seven'), holds 6\n"
    listed = json.loads(run("list", "x.engrams", "--json"))
    assert [each["name"] for each in listed] == [*names, "my seven"]
    blob = (folder / "seven.safetensors").read_bytes()
    place = maker(7).roles["clip_l"]
    assert listed[-1] == {
        "name": "my seven",
        "trigger": maker(7).trigger,
        "bytes": len(blob),
        "base": "emoji-sd",
        "roles": {"clip_l": {"width": 128, "tokenizer": place.fingerprint}},
        "sha256": hashlib.sha256(blob).hexdigest(),
    }
    assert f"my seven  {maker(7).trigger!r}  {len(blob):,} bytes  base emoji-sd\n" in run("list", "x.engrams")
    assert run("verify", "x.engrams") == "x.engrams: sound, 6 concepts and the index compared\n"
    assert run("verify", "x.engrams", "my seven", names[0]) == "x.engrams: sound, 2 concepts compared\n"
    assert run("export", "x.engrams", "my seven", "out.safetensors") == f"out.safetensors: concept 'my seven', {len(blob):,} bytes\n"
    assert (folder / "out.safetensors").read_bytes() == blob
    assert run("remove", "x.engrams", *names[:2]) == "x.engrams: removed 2 concepts, holds 4\n"
    size = (folder / "x.engrams").stat().st_size
    (saved,) = re.findall(r"4 concepts, [\d,]+ bytes, ([\d,]+) less than before", run("compact", "x.engrams"))
    assert (folder / "x.engrams").stat().st_size == size - int(saved.replace(",", "")) < size
    assert ConceptLibrary.open("x.engrams").verify() == 4


def test_mistakes(run, folder, maker):
    run("create", "x.engrams")
    run("add", "x.engrams", "concepts/0.safetensors")
    (folder / "nothing").mkdir()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for words, says in (
        (("create", "x.engrams"), "is there already"),
        (("create", "no/x.engrams"), "cannot make a library"),
        (("add", "absent.engrams", "concepts"), "cannot open the library"),
        (("add", "x.engrams", "nothing"), "holds no .safetensors file"),
        (("add", "x.engrams", "absent.safetensors"), "does not exist"),
        (("add", "x.engrams", "concepts"), f"concept '{maker(0).name}' is in it already"),
        (("add", "x.engrams", "concepts", "--name", "five"), "--name 'five' with 5 concepts, expected one"),
        (("add", "concepts/0.safetensors", "concepts/1.safetensors"), "is no library of concepts"),
        (("remove", "x.engrams", "nobody"), "holds no concept 'nobody'"),
        (("verify", "x.engrams", "nobody"), "holds no concept 'nobody'"),
        (("export", "x.engrams", maker(0).name, "no/out.safetensors"), "cannot write the concept"),
        (("list", "concepts"), "is no regular file"),
        (("compact", "absent.engrams"), "cannot open the library"),
    ):
        err = run(*words, code=2)
        assert err.startswith("tiny-engram: ") and err.count("\n") == 1 and says in err, err
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_concepts_of_a_library_on_the_command_line(run, folder, maker, capsys):
    run("create", "x.engrams")
    run("add", "x.engrams", "concepts")
    prompt = f"a {maker(1).trigger} and a {maker(2).trigger}"
    assert main(["explain", "--library", "x.engrams", prompt, "--json"]) == 0
    assert [span["name"] for span in json.loads(capsys.readouterr().out)["prompts"][0]["fired"]] == [maker(1).name, maker(2).name]
    assert main(["explain", "--concept", f"x.engrams#{maker(1).name}=0.5", prompt]) == 0
    said = capsys.readouterr().out
    assert f"fires: {maker(1).name}" in said and "strength 0.5" in said and maker(2).name not in said.split("\n", 1)[1]
