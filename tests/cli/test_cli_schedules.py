"""`tiny-engram generate --schedule`."""

import json

from PIL import Image

DRAWN = ("--prompt", "a zqx", "--num_inference_steps", 4, "--guidance_scale", 2.0)


def test_pictures_with_schedules(run, concept_file, tmp_path):
    def picture(*words):
        code, _, err = run("generate", "--concept", concept_file, *DRAWN, *words, "--output", "p.png")
        assert code == 0 and "UserWarning" not in err
        with Image.open("p.png") as found:
            return found.tobytes(), json.loads(found.info["parameters"]), err

    on, settings, _ = picture()
    assert "schedules" not in settings
    half, settings, err = picture("--schedule", "0..0.5")
    assert settings["schedules"] == ["0..0.5"] and "strength 1 (factor 1, from 50 % of the steps 0)" in err
    assert half != on and picture("--schedule", "zqx=0:1,0.5:0")[0] == half
    assert picture("--schedule", "0:1")[0] == on
    assert picture("--schedule", "linear,0:1,1:0")[0] not in (on, half)


def test_bad_schedules(refused, concept_file):
    generate = ("generate", *DRAWN, "--schedule")
    refused("--schedule '0..0.5': there is no concept; give one with --concept FILE", *generate, "0..0.5")
    loaded = (*generate[:-1], "--concept", concept_file, "--schedule")
    refused("schedule 'half', expected 0:1,0.5:0 or", *loaded, "half")
    refused("start is 0.5 and end 0.2, expected shares of the steps", *loaded, "0.5..0.2")
    refused("no concept 'other'; known: 'zqx'", *loaded, "other=0..0.5")
