"""Each tiny pipeline builds, draws what its prompt says, and draws the same again."""

import pytest
import torch

from tests.pipelines.tiny.base import picture
from tests.pipelines.tiny.language import LANGUAGE
from tests.pipelines.tiny.videos import VIDEOS

PROMPT, OTHER = "a photo of a vortex cat on a table", "a photo of an old dog on a table"


@pytest.mark.parametrize("tiny", (*VIDEOS, *LANGUAGE), ids=lambda tiny: tiny.name)
def test_it_draws_what_the_prompt_says_and_the_same_again(tiny):
    pipe = tiny.build()
    drawn = picture(tiny, pipe, PROMPT)
    assert drawn.isfinite().all()
    assert torch.equal(drawn, picture(tiny, tiny.build(), PROMPT))
    assert not torch.equal(drawn, picture(tiny, pipe, OTHER))
