"""EngramPipeline.from_pretrained: the real pipeline with its concepts, or an error that names one and nothing half done."""

import gc

import pytest
import torch
from diffusers import StableDiffusionPipeline

import tiny_engram
from tiny_engram import EngramPipeline, TinyEngramError
from tiny_engram.adapter import find_adapter
from tiny_engram.sources import load_source, source_file


@pytest.fixture(scope="module")
def made(attached, tiny, tmp_path_factory):
    """Trigger -> Concept, and a folder with their files."""
    _, adapter = attached
    folder = tmp_path_factory.mktemp("concepts")
    concepts = {trigger: tiny.concept(adapter, trigger, seed=seed) for seed, trigger in enumerate(("zqx", "zqy"))}
    for trigger, concept in concepts.items():
        concept.save(folder / f"{trigger}.safetensors")
    return concepts, folder


@pytest.fixture
def bare(attached):
    """The pipeline of `attached`, without its adapter for one test."""
    pipe, adapter = attached
    adapter.detach()
    yield pipe
    if (left := find_adapter(pipe)) is not None:
        left.detach()
    adapter.attach()


def test_one_line_draws_what_three_do(saved_pipe, pipe, tiny, made, request):
    concepts, folder = made
    one = EngramPipeline.from_pretrained(
        saved_pipe, folder / "zqx.safetensors", strengths=0.5, names="toy", device="cpu", safety_checker=None
    )
    assert type(one) is StableDiffusionPipeline and one.unet.dtype == torch.float32
    adapter = tiny_engram.get_adapter(one)
    assert adapter.get_active_concepts() == ["toy"] and adapter.strength("toy") == 0.5
    one.set_progress_bar_config(disable=True)
    by_hand = request.getfixturevalue("adapter")
    by_hand.load_concept(concepts["zqx"], "toy", 0.5)
    assert torch.equal(tiny.picture(one, "a zqx"), tiny.picture(pipe, "a zqx"))
    by_hand.unload_concept()
    assert torch.equal(tiny.picture(one, "a cat"), tiny.picture(pipe, "a cat"))
    assert not torch.equal(tiny.picture(one, "a zqx"), tiny.picture(pipe, "a zqx"))


def test_every_kind_of_source_and_one_value_each(bare, made):
    concepts, folder = made
    given = [{"source": folder, "weight_name": "zqx.safetensors"}, concepts["zqy"]]
    assert EngramPipeline.from_pretrained(bare, given, strengths=[0.5, 2], names=[None, "b"]) is bare
    adapter = tiny_engram.get_adapter(bare)
    assert adapter.get_list_concepts() == ["zqx", "b"] and [adapter.strength(n) for n in ("zqx", "b")] == [0.5, 2.0]


def test_dtypes_by_either_name(saved_pipe):
    for options in ({"dtype": torch.float16}, {"dtype": "float16"}, {"torch_dtype": torch.float16}):
        pipe = EngramPipeline.from_pretrained(saved_pipe, device=torch.device("cpu"), **options)
        assert pipe.unet.dtype == pipe.text_encoder.dtype == torch.float16
        assert tiny_engram.get_adapter(pipe).get_list_concepts() == []


def test_a_pipeline_that_has_an_adapter_keeps_what_it_has(emptied, attached, made):
    pipe, _ = attached
    concepts, folder = made
    emptied.load_concept(concepts["zqx"], strength=0.25)
    assert EngramPipeline.from_pretrained(pipe, str(folder / "zqy.safetensors")) is pipe
    assert tiny_engram.get_adapter(pipe) is emptied and emptied.get_list_concepts() == ["zqx", "zqy"]
    emptied.unload_concept("zqy")
    with pytest.raises(TinyEngramError, match=r"concepts\[1\], Concept 'zqx': concept 'zqx' is already loaded"):
        EngramPipeline.from_pretrained(pipe, [concepts["zqy"], concepts["zqx"]])
    assert emptied.get_list_concepts() == ["zqx"] and emptied.strength("zqx") == 0.25


def test_a_concept_that_does_not_load_leaves_nothing(bare, made, tiny, tmp_path):
    concepts, folder = made
    narrow = tiny_engram.attach(other := tiny.build(width=64))
    tiny.concept(narrow, "zqn").save(tmp_path / "narrow.safetensors")
    narrow.detach()
    del other
    before = tiny.picture(bare, "a zqx")
    for bad, words in (
        (tmp_path / "narrow.safetensors", r"concepts\[1\], '.*narrow.safetensors': .*has width 64 at clip_l, expected 128"),
        (tmp_path / "nowhere.safetensors", r"concepts\[1\], '.*nowhere.safetensors': .*does not exist"),
        (
            "user/repo",
            r"concepts\[1\], 'user/repo': user/repo: no such path here; hf://user/repo: not in the cache, which HF_HUB_OFFLINE=1",
        ),
        (concepts["zqx"], r"concepts\[1\], Concept 'zqx': concept 'zqx' is already loaded"),
        ({"weight_name": "a.safetensors"}, r"concepts\[1\], .*without 'source', expected it and any of cache_dir, "),
        ({"source": folder, "weightname": "a"}, r"concepts\[1\], '.*': unknown 'weightname'; expected 'source' and any of"),
    ):
        with pytest.raises(TinyEngramError, match=words) as caught:
            EngramPipeline.from_pretrained(bare, [concepts["zqx"], bad])
        assert "\n" not in str(caught.value)
        assert find_adapter(bare) is None and not bare.text_encoder._forward_hooks and not bare.unet._forward_pre_hooks
    assert torch.equal(tiny.picture(bare, "a zqx"), before)


def test_a_wrong_file_is_found_before_the_base_is_loaded(tmp_path):
    with pytest.raises(TinyEngramError, match="nowhere.safetensors: does not exist"):
        EngramPipeline.from_pretrained("no-such-user/no-such-model", str(tmp_path / "nowhere.safetensors"))


def test_what_is_asked_for_wrongly(attached, saved_pipe, made):
    pipe, _ = attached
    concepts, _ = made

    def refused(words: str, *args, **options) -> None:
        with pytest.raises(TinyEngramError, match=words) as caught:
            EngramPipeline.from_pretrained(*args, **options)
        assert "\n" not in str(caught.value)

    refused("2 strengths for 1 concepts, expected one each", saved_pipe, concepts["zqx"], strengths=[1, 2])
    refused("1 names for 2 concepts, expected one each", saved_pipe, list(concepts.values()), names="a")
    refused("strength is nan, expected a finite number", pipe, concepts["zqx"], strengths=float("nan"))
    refused("dtype, revision given with a loaded StableDiffusionPipeline", pipe, dtype="float16", revision="v1")
    refused("dtype 'int8', expected float32", saved_pipe, dtype="int8")
    refused("'cpu' and device_map 'balanced' are both given, expected one", saved_pipe, device="cpu", device_map="balanced")
    refused("'.*nowhere' cannot be loaded", saved_pipe / "nowhere")
    refused("takes no option 'concept'; did you mean 'concepts'", saved_pipe, concept=concepts["zqx"])
    refused("takes no option 'strength'; did you mean 'strengths'", pipe, concepts["zqx"], strength=0.5)
    refused("name is 4, expected text", pipe, concepts["zqx"], names=[4])
    with pytest.raises(TinyEngramError, match="EngramPipeline is not made itself"):
        EngramPipeline()


def test_nothing_keeps_the_pipeline_alive(saved_pipe, made):
    import weakref

    pipe = EngramPipeline.from_pretrained(saved_pipe, made[0]["zqx"], device="cpu")
    there = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert there() is None


# -- local sources


def test_folders(made, tmp_path):
    concepts, folder = made
    assert load_source(folder, weight_name="zqy.safetensors").trigger == "zqy"
    assert source_file(folder.parent, subfolder=folder.name, weight_name="zqx.safetensors") == (folder / "zqx.safetensors", None)
    concepts["zqx"].save(tmp_path / "only.safetensors")
    (tmp_path / "notes.txt").write_text("beside it")
    assert load_source(tmp_path).trigger == load_source(str(tmp_path)).trigger == "zqx"
    assert load_source(concepts["zqx"]) is concepts["zqx"]


def test_folders_and_files_that_say_too_little_or_too_much(made, tmp_path):
    concepts, folder = made
    for words, source, options in (
        (r"holds 2 files to choose from \(zqx.safetensors, zqy.safetensors\); name one by weight_name=", folder, {}),
        ("holds no .safetensors file", tmp_path, {}),
        ("holds no .safetensors file", folder, {"subfolder": "nowhere"}),
        ("z.safetensors: does not exist", folder, {"weight_name": "z.safetensors"}),
        (r"weight_name '../zqx.safetensors' leaves the folder", folder, {"weight_name": "../zqx.safetensors"}),
        (r"subfolder '/etc' leaves the folder", folder, {"subfolder": "/etc"}),
        (r"weight_name 'a\\\\b.safetensors' leaves the folder", folder, {"weight_name": "a\\b.safetensors"}),
        ("weight_name 'zqx.bin': expected a .safetensors file; concepts are read from no other", folder, {"weight_name": "zqx.bin"}),
        ("weight_name and subfolder choose in a folder or a repo", folder / "zqx.safetensors", {"weight_name": "zqx.safetensors"}),
        ("revision given with a Concept", concepts["zqx"], {"revision": "v1"}),
        ("does not exist", tmp_path / "user" / "repo", {}),
    ):
        with pytest.raises(TinyEngramError, match=words) as caught:
            load_source(source, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="revison"):
        load_source(folder, revison="v1")


def test_load_concept_takes_every_source(emptied, made):
    _, folder = made
    assert emptied.load_concept(folder, "a", weight_name="zqx.safetensors") == "a"
    assert tiny_engram.load_concept(emptied.pipe, str(folder), weight_name="zqy.safetensors", strength=0.5) == "zqy"
    assert emptied.get_list_concepts() == ["a", "zqy"]


@pytest.mark.parametrize("wrong", [5, None, ["a.safetensors"], ""])
def test_a_source_is_text_a_path_or_a_concept(attached, wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TinyEngramError, match=r"^a concept's source is .*, expected a Concept, a file, a folder or a Hub id"):
        attached[1].load_concept(wrong)


def test_wrong_types_are_told_before_anything_is_read(bare):
    with pytest.raises(TinyEngramError, match="^concepts is 5, expected one or a list of them"):
        EngramPipeline.from_pretrained(bare, 5)
    with pytest.raises(TinyEngramError, match=r"^concepts\[0\], '5': a concept's source is '5'"):
        EngramPipeline.from_pretrained(bare, [5])
    with pytest.raises(TinyEngramError, match="^base is 5, expected a folder, a Hub id, None or a loaded pipeline"):
        EngramPipeline.from_pretrained(5)
    assert find_adapter(bare) is None
