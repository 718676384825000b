"""A folder of concepts as others get it: files, card and gallery, and what becomes of cards that somebody edited."""

import base64
import io
import json
import re

import pytest
import torch
import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import tiny_engram
from tiny_engram.concept_card import ConceptCard
from tiny_engram.errors import TinyEngramError
from tiny_engram.model_card import front_matter, sign, signed_data


@pytest.fixture(scope="module")
def made(attached, tiny):
    _, adapter = attached
    concepts = [tiny.concept(adapter, trigger, seed=seed) for seed, trigger in enumerate(("zqx", "zqy"))]
    return [concept.with_details(base="tiny-sd", recipe={"step": 7, "class_word": "duck"}) for concept in concepts]


def names_in(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def blocks(card: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)


def test_a_folder_whose_card_runs(made, saved_pipe, tmp_path, tiny):
    folder = made[0].save_pretrained(tmp_path / "out", base_model="ann/tiny-sd", license="cc-by-4.0")
    assert names_in(folder) == {"README.md", "zqx.safetensors"}
    saved = tiny_engram.Concept.load(folder / "zqx.safetensors")
    assert saved.metadata == made[0].metadata and saved.nbytes == made[0].nbytes
    card = (folder / "README.md").read_text()
    head = head_of(card)
    assert head["base_model"] == "ann/tiny-sd" and head["license"] == "cc-by-4.0" and head["instance_prompt"] == "zqx"
    assert head["library_name"] == "tiny-engram" and head["pipeline_tag"] == "text-to-image" and "widget" not in head
    assert f"| `zqx.safetensors` | `zqx` | - | `tiny-sd` | {(folder / 'zqx.safetensors').stat().st_size:,} |" in card
    assert json.loads(blocks(card, "json")[0]) == {"step": 7, "class_word": "duck"}
    here = card.replace("THIS_FOLDER", str(folder)).replace("ann/tiny-sd", str(saved_pipe))
    first, second = blocks(here, "python")
    names: dict = {}
    exec(first.split("picture =")[0], names)
    assert tiny_engram.get_adapter(names["pipe"]).get_list_concepts() == ["zqx"]
    tiny_engram.detach(names["pipe"])
    exec(second, names)
    assert tiny_engram.get_list_concepts(names["pipe"]) == ["zqx"]
    assert torch.isfinite(tiny.picture(names["pipe"], "a zqx")).all()


def test_the_command_in_the_card_is_understood(made, tmp_path):
    import shlex

    from tiny_engram.cli import _parser

    folder = tiny_engram.save_pretrained(made, tmp_path / "out")
    (command,) = blocks((folder / "README.md").read_text(), "sh")
    args = _parser().parse_args(shlex.split(command)[1:])
    assert args.concept == ["THIS_FOLDER/zqx.safetensors", "THIS_FOLDER/zqy.safetensors"] and args.prompt == "a photo of a zqx"


def test_pictures_keep_their_pixels_and_prompts_and_lose_what_else_they_tell(made, tmp_path):
    info = PngInfo()
    info.add_itxt("parameters", json.dumps({"prompt": "a zqx\nin the sun", "concepts": ["/home/ann/secret.safetensors"]}))
    red = Image.effect_noise((16, 8), 64).convert("RGB")
    red.save(tmp_path / "ours.png", pnginfo=info)
    info = PngInfo()
    info.add_itxt("parameters", "a zqx by night\nNegative prompt: bad\nSteps: 25, Seed: 3")
    red.save(tmp_path / "studio.png", pnginfo=info)
    red.convert("RGBA").save(tmp_path / "clear.webp", lossless=True, exif=b"Exif\0\0secret")
    pictures = [tmp_path / "ours.png", tmp_path / "studio.png", (tmp_path / "clear.webp", "said"), tmp_path / "clear.webp"]
    folder = made[0].save_pretrained(tmp_path / "out", pictures=pictures)
    card = (folder / "README.md").read_text()
    assert [each["text"] for each in head_of(card)["widget"]] == ["a zqx in the sun", "a zqx by night", "said", "zqx"]
    urls = [each["output"]["url"] for each in head_of(card)["widget"]]
    assert urls == ["images/zqx-0.png", "images/zqx-1.png", "images/zqx-2.webp", "images/zqx-3.webp"] and "<Gallery />" in card
    for url in urls:
        blob = (folder / url).read_bytes()
        assert b"secret" not in blob and b"Steps" not in blob
        assert Image.open(folder / url).convert("RGB").tobytes() == red.tobytes()


def test_new_pictures_take_the_place_of_old_ones_and_none_keeps_them(made, tmp_path):
    for k in range(2):
        Image.new("RGB", (8, 8), (k, 0, 0)).save(tmp_path / f"{k}.png")
    folder = made[0].save_pretrained(tmp_path / "out", pictures=[tmp_path / "0.png", tmp_path / "1.png"], license="mit")

    def shown() -> list[str]:
        return [each["output"]["url"] for each in head_of((folder / "README.md").read_text())["widget"]]

    made[0].save_pretrained(folder)
    assert shown() == ["images/zqx-0.png", "images/zqx-1.png"]
    made[1].save_pretrained(folder, pictures=[tmp_path / "0.png"])
    assert shown() == ["images/zqx-0.png", "images/zqx-1.png", "images/zqy-0.png"]
    made[0].save_pretrained(folder, pictures=[(tmp_path / "1.png", "new")])
    assert shown() == ["images/zqy-0.png", "images/zqx-0.png"]
    head = head_of((folder / "README.md").read_text())
    assert head["license"] == "mit" and head["widget"][1]["text"] == "new" and head["instance_prompt"] == "zqx, zqy"


def test_thumbnails_stand_in_and_are_called_what_they_are(made, tmp_path):
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "WEBP")
    small = made[0].with_details(thumbnail="data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode())
    folder = small.save_pretrained(tmp_path / "out")
    assert (folder / "images" / "zqx-taught.webp").read_bytes() == buffer.getvalue()
    card = (folder / "README.md").read_text()
    assert head_of(card)["widget"] == [{"text": "zqx", "output": {"url": "images/zqx-taught.webp"}}]
    assert "The small picture is from the pictures that were taught, not drawn." in card
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    small.save_pretrained(folder, pictures=[tmp_path / "a.png"])
    assert "taught.webp" not in (folder / "README.md").read_text()


def test_an_edited_card_is_kept_until_it_is_asked_for(made, tmp_path, caplog):
    folder = made[0].save_pretrained(tmp_path / "out")
    written = (folder / "README.md").read_text()
    made[0].save_pretrained(folder)
    assert (folder / "README.md").read_text() == written and not caplog.records
    mine = written.replace("# zqx", "# My zqx")
    (folder / "README.md").write_text(mine)
    made[1].save_pretrained(folder)
    assert (folder / "README.md").read_text() == mine and (folder / "zqy.safetensors").exists()
    assert "its README.md was written or edited by somebody, so it is kept; replace_card=True" in caplog.text
    made[1].save_pretrained(folder, replace_card=True)
    assert "My zqx" not in (folder / "README.md").read_text()


def test_names_that_would_be_marks_stay_text(attached, tiny, tmp_path):
    _, adapter = attached
    odd = tiny.concept(adapter, "zq|x`y", name='a: "b" #[c](d)<e>\n--- \u2028 \U0001f986 -->').with_details(recipe={"note": "```\n-->"})
    folder = odd.save_pretrained(tmp_path / "out", license="other: mine")
    card = (folder / "README.md").read_text()
    head = head_of(card)
    assert head["instance_prompt"] == odd.trigger and head["license"] == "other: mine"
    assert '\n# a: "b" \\#\\[c\\](d)\\<e\\> --- \U0001f986 --\\>\n' in card and card.count("<!--") == card.count("-->") - 1
    assert json.loads(blocks(card, "json")[0]) == {"note": "```\n-->"}
    read = ConceptCard.read(card)
    assert read is not None and read.entries[0].name == odd.name and read.entries[0].recipe == odd.recipe
    (row,) = [line for line in card.splitlines() if line.startswith("| `a")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 6


def test_front_matter_is_what_it_was_told():
    told = {
        "plain": "cc-by-4.0",
        "no": "yes",
        "colon": "a: b",
        "number": "1e3",
        "empty": "",
        "none": None,
        "list": ["x", "null", {"a": ["\x85"]}],
        "duck": "\U0001f986\u2028\x7f",
        "quote": '"',
    }
    held = yaml.safe_load(front_matter({f"k_{name}": value for name, value in told.items()}).split("---\n")[1])
    assert held == {f"k_{name}": value for name, value in told.items() if value}


def test_a_signature_knows_every_change():
    card = sign("# Text\n", {"concepts": [{"name": "--> <b>"}]})
    assert signed_data(card) == {"concepts": [{"name": "--> <b>"}]} and card.count("-->") == 1
    for other in (card.replace("Text", "Test"), card + "more", card.replace("u003cb", "u003cc"), "# Text\n", card.replace("{", "[", 1)):
        assert signed_data(other) is None
    assert ConceptCard.read(sign("# Text\n", {"concepts": [{"file": 1}]})) is None


def test_what_cannot_be_shared(made, tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.gif")
    (tmp_path / "file").write_text("mine")

    def refused(words: str, concepts, folder="out", **options) -> None:
        with pytest.raises(TinyEngramError, match=words) as caught:
            tiny_engram.save_pretrained(concepts, tmp_path / folder, **options)
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()

    refused("text.png: no picture that can be read .*expected PNG or WebP", made[0], pictures=[tmp_path / "text.png"])
    refused("a.gif: no picture that can be read .*expected PNG or WebP", made[0], pictures=[tmp_path / "a.gif"])
    refused("two concepts would be 'zqx.safetensors'; give one another name", [made[0], made[0]])
    refused("no concept was given", [])
    refused("concepts is None, expected one or a list of them", None)
    refused("pictures is '.*a.png', expected a list of files", made[0], pictures=tmp_path / "a.png")
    refused("pictures is 'a.png', expected a list of files", made[0], pictures="a.png")
    refused("nowhere: does not exist", tmp_path / "nowhere")
    refused("holds no .safetensors file, expected concepts", tmp_path)
    refused("file: cannot write there", made[0], folder="file")
