"""What the Teach tab says of pictures and jobs, in the words and numbers that their owner knows."""

import io
import re

from PIL import Image

from tiny_engram.studio.job_folder import Job, JobState, Progress, stopped_at
from tiny_engram.studio.presets import fields_of
from tiny_engram.studio.ui import teach_html
from tiny_engram.studio.ui.teach_tray import Tray


def test_a_picture_is_told_by_the_size_that_was_sent(workspace):
    tray, buffer = Tray(workspace), io.BytesIO()
    Image.new("RGB", (4000, 20), "red").save(buffer, "PNG")
    assert tray.add([("long.png", buffer.getvalue())])[0] == 1
    for each in (tray, Tray(workspace)):
        (picture,) = each.pictures
        assert (picture.width, picture.height, picture.size) == (2048, 10, (4000, 20))
    html = teach_html.tray_html([teach_html.Shown(picture=picture, whole="", crop="")], "zed-quack", 128)
    assert "4000 x 20" in html and "more than 99% of it is cut off" in html


def test_a_job_says_one_loss_and_how_it_goes_on():
    job = Job(id="0" * 16, trigger="zed-quack", aliases=(), name="zed-quack", class_word=None, preset="quick", model=None, threads=1,
              created="", pictures=1, fields=fields_of("quick"))  # fmt: skip
    state = JobState(id=job.id, state="running", step=20, steps=40, loss=0.2804)
    html = teach_html.live_html(job, state, [Progress(k, 0.3 + 0.1 * (k % 2), 1.0) for k in range(1, 21)])
    (above,) = re.findall(r"loss (0\.\d+)</p>", html)
    assert f"loss at step 20, smoothed: {above}" in html and "0.2804" not in html
    assert stopped_at("cancelled", 0, 40) == "cancelled; if resumed, it begins anew"
    assert stopped_at("cancelled", 25, 40) == "cancelled; if resumed, it goes on from step 25 of 40"
    assert stopped_at("paused", 25, 40) == "paused; goes on from step 25 of 40"
