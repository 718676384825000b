"""`tiny-engram scan`: what is in a folder, without a model; and options of other trainers that are refused with the reason."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from tiny_engram.cli import main


def test_a_folder_is_told_of_without_a_model(run, folder):
    (folder / "0.txt").write_text("a cat")
    (folder / "notes.md").write_text("")
    code, out, err = run("scan", folder)
    assert code == 0 and err == "" and "2 pictures, 1 with captions of their own, 0 with masks" in out and "sizes 64x64: 2" in out
    code, out, _ = run("scan", folder, "--json", "--resolution", 128, "--buckets", "--bucket_steps", 32, "--subject_type", "person")
    about = json.loads(out)
    assert code == 0 and (about["pictures"], about["ignored"], about["captions"]) == (2, 1, 6) and about["buckets"] == {"128x128": 2}


def test_captions_are_asked_for_the_trigger_where_it_is_given(run, refused, folder):
    (folder / "0.txt").write_text("a cat")
    refused("0.txt: caption 'a cat' holds neither", "scan", folder, "--trigger", "zqx")
    assert run("scan", folder, "--trigger", "zqx", "--aliases", "cat")[0] == 0


def test_bad_pictures_are_named_and_the_code_says_so(run, folder):
    (folder / "2.png").write_bytes(b"no")
    code, out, _ = run("scan", folder)
    assert code == 2 and "2 pictures" in out and "left out: " in out and "2.png: not a picture that can be read" in out


def test_options_of_folders(run, folder):
    (folder / "5_more").mkdir()
    Image.new("RGBA", (30, 60), (1, 2, 3, 128)).save(folder / "5_more" / "2.png")
    code, out, _ = run(
        "scan", folder, "--json", "--recursive", "--folder_repeats", "--alpha_mask", "--resolution", 64, "--buckets", "--bucket_no_upscale"
    )
    about = json.loads(out)
    assert code == 0 and (about["pictures"], about["samples"], about["masked"]) == (3, 7, 1)
    assert about["small"] == ["5_more/2.png"]


def test_nonsense_is_one_line(refused, folder):
    refused("nowhere: no such folder", "scan", "nowhere")
    refused("bucket_steps is 64, expected None without buckets", "scan", folder, "--bucket_steps", 64)
    refused("subject_type is 'thing', expected one of object, style", "scan", folder, "--subject_type", "thing")


def test_scan_loads_nothing_heavy(folder):
    code = (
        "import sys; from tiny_engram.cli import main; main(['scan', sys.argv[1]]); "
        "print([n for n in ('torch', 'diffusers', 'transformers', 'accelerate') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True).stdout
    assert out.strip().endswith("[]"), out


@pytest.mark.parametrize(
    "option",
    [
        ("--with_prior_preservation",),
        ("--class_data_dir", "dogs"),
        ("--class_prompt", "a dog"),
        ("--num_class_images", "200"),
        ("--num_class_pictures", "200"),
        ("--prior_loss_weight", "1.0"),
        ("--prior_loss_weight=1.0",),
        ("--reg_data_dir", "dogs"),
    ],
)
def test_class_pictures_are_refused_with_the_reason(capsys, folder, option):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--train_data_dir", str(folder), "--trigger", "zqx", *option])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith(f"tiny-engram: {option[0].partition('=')[0]}: pictures of a class can teach nothing here") and "--collages" in err


def test_help_says_nothing_of_what_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "class_data_dir" not in capsys.readouterr().out
