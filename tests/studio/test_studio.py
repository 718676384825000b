"""Everything behind the page opens and closes as one."""

import argparse

import pytest

from tiny_engram.errors import TinyEngramError
from tiny_engram.studio.studio import Studio
from tiny_engram.studio.workspace import Workspace


def test_it_has_what_the_page_needs(opened_studio):
    assert opened_studio.base == "embedded base"
    assert opened_studio.engine.library is opened_studio.library
    assert opened_studio.runner.store is opened_studio.jobs
    assert opened_studio.registrar.report(opened_studio.registrar.suggest()).ready


def test_closing_gives_the_folder_back_and_once_is_enough(tiny, tmp_path):
    studio = Studio(Workspace.open(tmp_path), tiny.build(), model="some/model")
    assert studio.base == "model"
    with pytest.raises(TinyEngramError, match="another Studio"):
        Workspace.open(tmp_path)
    studio.close()
    studio.close()
    Workspace.open(tmp_path).close()


def test_what_cannot_be_opened_leaves_the_folder_free(tmp_path):
    with pytest.raises(TinyEngramError, match="no-such-model"):
        Studio.open(tmp_path, model="no-such-model")
    with pytest.raises(TinyEngramError, match="expected a loaded diffusers pipeline"):
        Studio(Workspace.open(tmp_path), argparse.Namespace())  # no pipeline at all
    Workspace.open(tmp_path).close()


def test_a_folder_in_use_is_told_before_the_model_is_loaded(tmp_path):
    with Workspace.open(tmp_path), pytest.raises(TinyEngramError, match="another Studio"):
        Studio.open(tmp_path, model="no-such-model")
