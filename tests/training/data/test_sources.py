"""Where pictures and captions come from: folders in folders, tables, rows from Python, saved datasets; what is refused in which words."""

import importlib.util
import json
import multiprocessing
import sys

import numpy as np
import pytest
from PIL import Image, ImageCms

from tiny_engram.training import train
from tiny_engram.training.data import DataError, fitted_picture, scan_examples, scan_folder, scan_for


def captions(folder, *spellings, **options) -> dict[str, tuple[str, ...]]:
    found = scan_folder(folder, spellings or ("zqx",), **options).examples
    return {e.path.relative_to(folder).as_posix(): e.captions for e in found}


# -- folders ---------------------------------------------------------------------------------------------------------------------


def test_folders_in_folders_only_where_asked_for(folder, picture):
    (folder / "b" / "c").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name in ("b/2.png", "b/c/3.png", ".hidden/4.png"):
        picture(seed=9).save(folder / name)
    (folder / "b" / "2.txt").write_text("my {trigger}")
    (folder / "b" / "junk.md").write_text("")
    (folder / "link").symlink_to(folder, target_is_directory=True)
    assert list(captions(folder)) == ["0.png", "1.png"] and scan_folder(folder, ("zqx",)).others == 0
    found = captions(folder, recursive=True)
    assert list(found) == ["0.png", "1.png", "b/2.png", "b/c/3.png"] and found["b/2.png"] == ("my zqx",)
    assert scan_folder(folder, ("zqx",), recursive=True).others == 1


def test_pictures_that_are_one_folder_deeper_are_hinted_at(tmp_path, picture):
    (tmp_path / "all" / "in").mkdir(parents=True)
    picture().save(tmp_path / "all" / "in" / "0.png")
    with pytest.raises(DataError, match="all: no pictures in it; .*those of the folders in it need --recursive"):
        scan_folder(tmp_path / "all", ("zqx",))


def test_a_caption_file_serves_and_a_text_file_before_it(folder):
    (folder / "0.caption").write_text("one {trigger}")
    (folder / "1.caption").write_text("other {trigger}")
    (folder / "1.txt").write_text("two {trigger}")
    assert captions(folder) == {"0.png": ("one zqx",), "1.png": ("two zqx",)}
    assert scan_folder(folder, ("zqx",)).others == 0


# -- tables ----------------------------------------------------------------------------------------------------------------------


def csv(folder, *lines: str, encoding: str = "utf-8") -> None:
    (folder / "metadata.csv").write_bytes("\r\n".join(lines).encode(encoding))


def test_a_table_of_cells(folder):
    csv(
        folder, "file_name,text,repeats", '0.png,"red, with a {trigger} that says ""hi""",3', "./1.png,a {trigger},", "1.png,the {trigger},"
    )
    (folder / "metadata.csv").write_bytes(b"\xef\xbb\xbf" + (folder / "metadata.csv").read_bytes())
    found = scan_folder(folder, ("zqx",))
    assert [e.captions for e in found.examples] == [('red, with a zqx that says "hi"',), ("a zqx", "the zqx")]
    assert [e.repeats for e in found.examples] == [3, 1] and found.others == 0


def test_a_table_may_say_how_often_and_leave_captions_to_others(folder, mask):
    mask().save(folder / "shape.png")
    (folder / "0.txt").write_text("my {trigger}")
    rows = ({"file_name": "0.png", "repeats": 2}, {"file_name": "1.png", "mask": "shape.png"})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second = scan_folder(folder, ("zqx",), templates=("the {trigger}",)).examples
    assert (first.captions, first.repeats, first.mask) == (("my zqx",), 2, None)
    assert (second.captions, second.repeats, second.mask) == (("the zqx",), 1, folder / "shape.png")


def test_names_in_a_table_are_paths_where_folders_are_read(folder, picture):
    (folder / "sub").mkdir()
    picture().save(folder / "sub" / "0.png")
    csv(folder, "file_name,caption", "sub/0.png,deep {trigger}")
    assert captions(folder, recursive=True)["sub/0.png"] == ("deep zqx",)
    with pytest.raises(DataError, match="names 'sub/0.png', which is no picture in this folder .*with --recursive"):
        captions(folder)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("image,text", "0.png,a {trigger}"), r"line 2: columns \['image', 'text'\], expected file_name and text or caption"),
        (("file_name,prompt", "0.png,a {trigger}"), r"line 2: columns \['file_name', 'prompt'\]"),
        (("file_name,text", "0.png,red, a {trigger}"), "line 2: more or fewer cells than the 2 columns .* double quotes"),
        (("file_name,text", "0.png"), "line 2: more or fewer cells"),
        (("file_name,text", "0.png,"), r"line 2: columns \['file_name'\]"),
        (("file_name,text", '0.png,"a'), "not CSV"),
        (("file_name,text", "7.png,a {trigger}"), "names '7.png', which is no picture"),
        (("file_name,text", "0.png,a cat"), "caption 'a cat' holds neither"),
        (("file_name,text,repeats", "0.png,a {trigger},0"), "line 2: repeats is '0', expected a whole number from 1"),
        (("file_name,text,repeats", "0.png,a {trigger},two"), "repeats is 'two', expected"),
        (("file_name,text,repeats", "0.png,a {trigger},2", "0.png,a {trigger},3"), "line 3: repeats is 3, but 2 in a line before it"),
        (("file_name,text,mask", "0.png,a {trigger},m.png"), "the mask 'm.png' of '0.png' is no file"),
    ],
)
def test_confusion_in_a_table_is_explained(folder, lines, words):
    csv(folder, *lines)
    with pytest.raises(DataError, match=words) as caught:
        scan_folder(folder, ("zqx",))
    assert "\n" not in str(caught.value) and "metadata.csv" in str(caught.value)


@pytest.mark.parametrize("row", [{"repeats": 0}, {"repeats": True}, {"repeats": 1.5}, {"mask": 7}])
def test_confusion_in_lines_of_json_is_too(folder, row):
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "0.png", "text": "a {trigger}"} | row))
    with pytest.raises(DataError, match=f"metadata.jsonl, line 1: {next(iter(row))} is {next(iter(row.values()))}, expected"):
        scan_folder(folder, ("zqx",))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_table_in_another_encoding_is_one_clear_line(folder, encoding):
    csv(folder, "file_name,text", "0.png,ein {trigger} über Wasser", encoding=encoding)
    with pytest.raises(DataError, match="metadata.csv: cannot be read as UTF-8 text .*; save it as UTF-8"):
        scan_folder(folder, ("zqx",))


def test_two_tables_are_refused(folder):
    csv(folder, "file_name,text", "0.png,a {trigger}")
    (folder / "metadata.jsonl").write_text("")
    with pytest.raises(DataError, match="both metadata.jsonl and metadata.csv say what its pictures are; keep one"):
        scan_folder(folder, ("zqx",))


# -- how often -------------------------------------------------------------------------------------------------------------------


def test_a_folder_s_number_counts_only_where_asked_for(tmp_path, picture):
    for name, seed in (("10_vortex cat", 0), ("3_more", 1), ("plain", 2)):
        (tmp_path / name).mkdir()
        picture(seed=seed).save(tmp_path / name / "0.png")
    csv(tmp_path, "file_name,repeats", "3_more/0.png,5")
    plain = scan_folder(tmp_path, ("zqx",), recursive=True).examples
    assert [e.repeats for e in plain] == [1, 5, 1]
    numbered = scan_folder(tmp_path, ("zqx",), recursive=True, folder_repeats=True).examples
    assert [e.repeats for e in numbered] == [10, 5, 1], "a table says it before a folder"
    assert [e.repeats for e in scan_folder(tmp_path / "10_vortex cat", ("zqx",), folder_repeats=True).examples] == [10]
    (tmp_path / "10_vortex cat").rename(tmp_path / "0_vortex cat")
    with pytest.raises(DataError, match="its name says 0 repeats, expected a whole number from 1; rename the folder"):
        scan_folder(tmp_path, ("zqx",), recursive=True, folder_repeats=True)


def test_the_flag_alone_does_not_pass_for_numbers(folder):
    with pytest.raises(DataError, match="folder_repeats is True, but no folder .* is named as 10_words; .*--recursive"):
        scan_folder(folder, ("zqx",), folder_repeats=True)


# -- rows ------------------------------------------------------------------------------------------------------------------------


def test_rows_from_python_are_what_files_are(folder, picture, mask):
    sideways = picture(24, 16, 3)
    exif = sideways.getexif()
    exif[0x0112] = 6
    sideways.info["exif"] = exif.tobytes()
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    rows = [
        {"image": picture(), "text": "my {trigger}", "repeats": 3},
        {"image": sideways, "caption": ["a {trigger}", "the zqx"], "text": None},
        {"image": clear, "mask": mask(8, 8)},
        {"image": Image.open(folder / "0.png"), "text": ""},
    ]
    found = scan_examples(rows, ("zqx",), templates=("one {trigger}",))
    assert [e.captions for e in found.examples] == [("my zqx",), ("a zqx", "the zqx"), ("one zqx",), ("one zqx",)]
    assert [e.repeats for e in found.examples] == [3, 1, 1, 1] and [e.mask is not None for e in found.examples] == [
        False,
        False,
        True,
        False,
    ]
    assert [s.size for s in found.seen] == [(64, 64), (16, 24), (8, 8), (64, 64)]
    assert (
        np.array_equal(fitted_picture(found.examples[0], 64), picture())
        and fitted_picture(found.examples[2], 8).getpixel((0, 0)) == (255,) * 3
    )


@pytest.mark.parametrize(
    "mode", ["L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LA", "La", "PA", "RGBX", "RGBa", "I", "F", "I;16", "LAB"]
)
def test_every_mode_of_a_given_picture_is_what_a_person_sees(mode):
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    whole = Image.fromarray(grey)
    if mode == "LAB":
        srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        given = ImageCms.applyTransform(whole.convert("RGB"), ImageCms.buildTransform(srgb, lab, "RGB", "LAB"))
    elif mode == "I;16":
        given = Image.fromarray(grey.astype(np.uint16) * 257)
    else:
        ways = {"La": ("LA", "La"), "RGBa": ("RGBA", "RGBa"), "PA": ("P", "PA"), "HSV": ("RGB", "HSV"), "YCbCr": ("RGB", "YCbCr")}
        given = whole
        for way in ways.get(mode, (mode,)):
            given = given.convert(way)
    assert given is not None and given.mode == mode
    (example,) = scan_examples([{"image": given}], ("zqx",)).examples
    seen = np.asarray(fitted_picture(example, 16)).astype(int)
    assert np.abs(seen - grey[..., None]).max() <= (3 if mode == "LAB" else 1)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (7, "example 1 is of type int, expected a mapping"),
        ({"text": "a {trigger}"}, r"example 1 has columns \['text'\], 'image' of type NoneType, expected a PIL.Image"),
        ({"image": "0.png", "text": "a {trigger}"}, "'image' of type str"),
        ({"text": 7}, "example 1 has the caption 7, expected text"),
        ({"text": "a cat"}, "example 1: caption 'a cat' holds neither"),
        ({"text": "a {trigger}", "repeats": 0}, "example 1 has repeats 0"),
        ({"text": "a {trigger}", "mask": "m.png"}, "example 1 has a mask of type str"),
    ],
)
def test_rows_that_are_none_are_named(picture, row, words):
    whole = row if not isinstance(row, dict) or "image" in row or words.startswith("example 1 has columns") else {"image": picture()} | row
    with pytest.raises(DataError, match=words) as caught:
        scan_examples([{"image": picture(), "text": "a {trigger}"}, whole], ("zqx",))
    assert "\n" not in str(caught.value)


def test_a_picture_that_cannot_be_decoded_is_named_among_rows(folder):
    (folder / "1.png").write_bytes((folder / "0.png").read_bytes()[:100])
    rows = [{"image": Image.open(folder / f"{k}.png"), "text": "a {trigger}"} for k in range(2)]
    with pytest.raises(DataError, match="example 1: not a picture that can be read .*--skip_bad_pictures"):
        scan_examples(rows, ("zqx",))
    with pytest.raises(DataError, match="examples holds no rows"):
        scan_examples([], ("zqx",))


def test_a_run_of_rows_is_the_run_of_their_files(pipe, config, folder, tmp_path):
    files = train(pipe, config(max_train_steps=2), progress=False)
    rows = [{"image": Image.open(folder / f"{k}.png")} for k in range(2)]
    given = train(pipe, config(max_train_steps=2, train_data_dir="nowhere", output_dir=str(tmp_path / "b")), examples=rows, progress=False)
    assert given.losses == files.losses and given.concept.thumbnail == files.concept.thumbnail


# -- saved datasets --------------------------------------------------------------------------------------------------------------


def test_a_saved_dataset_without_its_package_is_one_clear_line(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    (tmp_path / "saved").mkdir()
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "saved" / name).write_text("{}")
    for name in ("rows.parquet", "saved"):
        with pytest.raises(
            DataError, match=f"{name}: a saved dataset, .* not installed; pip install datasets, or give a folder of pictures"
        ):
            scan_for(recipe(train_data_dir=str(tmp_path / name)))


def test_a_folder_of_pictures_with_a_state_of_something_else_is_no_dataset(recipe, folder):
    (folder / "state.json").write_text("{}")
    assert len(scan_for(recipe()).examples) == 2


def test_no_folder_is_not_the_folder_of_the_shell(recipe, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match="train_data_dir is '', expected a folder"):
        scan_for(recipe(train_data_dir=""))
    assert len(scan_for(recipe(train_data_dir=".")).examples) == 2


def test_a_saved_dataset_is_read_where_its_package_is(recipe, tmp_path, picture):
    if importlib.util.find_spec("datasets") is None:
        (tmp_path / "rows.parquet").write_bytes(b"PAR1")
        with pytest.raises(DataError, match="pip install datasets"):
            scan_for(recipe(train_data_dir=str(tmp_path / "rows.parquet")))
        return
    datasets = importlib.import_module("datasets")
    rows = datasets.Dataset.from_dict(
        {"image": [picture(seed=k) for k in range(3)], "text": [f"{k} {{trigger}}" for k in range(3)]},
        features=datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")}),
    )
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "splits")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "others")
    for name in ("rows.parquet", "saved", "splits"):
        found = scan_for(recipe(train_data_dir=str(tmp_path / name))).examples
        assert [e.captions for e in found] == [("0 zqx",), ("1 zqx",), ("2 zqx",)]
        assert np.array_equal(fitted_picture(found[1], 64), picture(seed=1))
    with pytest.raises(DataError, match=r"others: splits \['test'\], expected one named train"):
        scan_for(recipe(train_data_dir=str(tmp_path / "others")))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="bad.parquet: not a dataset that can be read") as caught:
        scan_for(recipe(train_data_dir=str(tmp_path / "bad.parquet")))
    assert "\n" not in str(caught.value)


# -- other processes -------------------------------------------------------------------------------------------------------------


def test_what_was_found_goes_to_a_spawned_process(folder, picture, mask):
    rows = [{"image": picture(), "text": "a {trigger}", "mask": mask()}]
    found = (*scan_folder(folder, ("zqx",)).examples, *scan_examples(rows, ("zqx",)).examples)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.map(_pixels, found)
    assert there == [_pixels(one) for one in found]


def _pixels(example) -> bytes:
    return fitted_picture(example, 8).tobytes()
