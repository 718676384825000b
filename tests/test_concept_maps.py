"""Maps in a concept and its file, the second format, and what older readers must still be able to read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_engram.concept import Concept, ConceptFileError, MapFactors
from tiny_engram.concept_rows import map_start
from tiny_engram.config import ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.kernels.fixed_basis import fixed_basis

SHAPES = {"attention.0": (2, 96), "feedforward.0": (2, 96), "feedforward.1": (1, 64)}


@pytest.fixture(scope="module")
def make(tiny):
    from tiny_engram.tokenizer import CompressedTokenizer
    from tiny_engram.triggers import compile_trigger

    tokenizer = tiny.load_tokenizer()
    compressed = CompressedTokenizer(tokenizer)
    compiled = compile_trigger("zqx bolo", tokenizer, ("zqx bolos",), compressed=compressed)

    def build(maps=SHAPES, mounts=("span", "input", "context.up0.value.1of2"), **options):
        about = {"widths": {"clip_l": 128}, "fingerprints": {"clip_l": compressed.fingerprint}}
        return Concept.new({"clip_l": compiled}, mounts={"clip_l": mounts}, maps={"clip_l": maps}, **about, **options)

    return build


@pytest.fixture(scope="module")
def taught(make):
    concept, generator = make(), torch.Generator().manual_seed(0)
    for name, shape in SHAPES.items():
        concept = concept.with_map("clip_l", name, torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    return concept


def bits(rows: MapFactors) -> list[torch.Tensor]:
    return [x.view(torch.uint8) for x in (rows.into_payload, rows.into_scale, rows.out_payload, rows.out_scale)]


def test_an_untrained_map_reads_directions_of_the_fixed_basis_and_adds_nothing(make):
    concept = make()
    maps = concept.roles["clip_l"].maps
    assert list(maps) == list(SHAPES) and {name: (rows.rank, rows.channels) for name, rows in maps.items()} == SHAPES
    basis = fixed_basis(torch.eye(96), width=96, seed=0)
    assert torch.equal(map_start(2, 96), basis[:2]) and torch.equal(map_start(2, 96, number=1), basis[2:4])
    for name, start in {"attention.0": basis[:2], "feedforward.0": basis[2:4]}.items():
        into, out = maps[name].factors()
        assert torch.equal(into, MapFactors.quantized(start, start).factors()[0]) and not out.any()
        assert torch.allclose(into.norm(dim=1), torch.ones(2), atol=0.05)
    # alone at its cross-attention, a map takes the first directions; another seed has others
    assert torch.equal(maps["feedforward.1"].factors()[0], MapFactors.quantized(map_start(1, 64), map_start(1, 64)).factors()[0])
    other = make(config=ConceptConfig(basis_seed=1)).map_factors("clip_l", "attention.0")
    assert not torch.equal(bits(other)[0], bits(maps["attention.0"])[0])
    again = make().roles["clip_l"].maps
    assert all(torch.equal(a, b) for name in SHAPES for a, b in zip(bits(maps[name]), bits(again[name]), strict=True))


def test_bytes_of_maps_count(make):
    size = sum(2 * rank * (channels + channels // 32) for rank, channels in SHAPES.values())
    assert make().nbytes - make(maps={}).nbytes == size == sum(rows.nbytes for rows in make().roles["clip_l"].maps.values())


def test_masters_are_quantised_as_the_file_stores_them(make):
    into, out = torch.randn(2, 96), torch.randn(2, 96)
    rows = make().with_map("clip_l", "attention.0", into, out).map_factors("clip_l", "attention.0")
    for stored, master in zip(rows.factors(), (into, out), strict=True):
        assert torch.allclose(stored, master, rtol=0.07, atol=0.01) and not torch.equal(stored, master)
    assert torch.equal(rows.factors()[1], MapFactors.quantized(*rows.factors()).factors()[1])
    with pytest.raises(TinyEngramError, match="into of map 'attention.0' of 'zqx bolo' has shape \\[1, 96\\], expected \\[2, 96\\]"):
        make().with_map("clip_l", "attention.0", into[:1], out)
    with pytest.raises(TinyEngramError, match="out of map .* holds NaN"):
        make().with_map("clip_l", "attention.0", into, out / 0.0)
    with pytest.raises(TinyEngramError, match="no map 'attention.7' at role 'clip_l'; known: \\['attention.0', 'feedforward.0'"):
        make().with_map("clip_l", "attention.7", into, out)
    with pytest.raises(TinyEngramError, match="known: none"):
        make(maps={}).map_factors("clip_l", "attention.0")


@pytest.mark.parametrize(
    ("maps", "expected"),
    [
        ({"attention": (1, 96)}, "map 'attention' is unknown; expected attention.NUMBER or feedforward.NUMBER"),
        ({"attention.0": (1, 90)}, "has rank 1 and 90 channels; expected a multiple of 32"),
        ({"attention.0": (0, 96)}, "a rank from 1 to 96"),
        ({"attention.0": (49, 96), "feedforward.0": (1, 96)}, "a rank from 1 to 48"),
    ],
)
def test_maps_that_make_no_sense_are_refused(make, maps, expected):
    with pytest.raises(TinyEngramError, match=expected):
        make(maps=maps)


def test_the_file_keeps_maps_and_every_kind_of_mount(taught, tmp_path):
    config = ConceptConfig(mounts=("span", "input", "value"), share="block", bands=2, attention_rank=2, feedforward_rank=2)
    path = taught.with_details(config=config).save(tmp_path / "c.safetensors")
    loaded = Concept.load(path)
    assert loaded.describe() == taught.with_details(config=config).describe() and loaded.nbytes == taught.nbytes
    assert loaded.describe()["format"] == 2 and list(loaded.roles["clip_l"].mounts) == ["span", "input", "context.up0.value.1of2"]
    maps = loaded.roles["clip_l"].maps
    assert list(maps) == list(SHAPES)
    for name, rows in taught.roles["clip_l"].maps.items():
        assert all(torch.equal(a, b) for a, b in zip(bits(rows), bits(maps[name]), strict=True))
    tensors = load_file(path)
    values = 2 * sum(rank * channels for rank, channels in SHAPES.values())
    assert tensors["clip_l.maps.payload"].dtype == torch.float8_e4m3fn and list(tensors["clip_l.maps.payload"].shape) == [values]
    assert list(tensors["clip_l.maps.scale"].shape) == [values // 32] and list(tensors["clip_l.rows.gain"].shape)[0] == 3
    # few tensors, since the header names each: what it says takes no more room than the values do elsewhere
    assert sorted(name.partition(".")[2] for name in tensors) == sorted(
        [*(f"rows.{part}" for part in ("payload", "scale", "gain", "bias")), "maps.payload", "maps.scale"]
    )


def test_what_old_readers_understand_says_so_in_their_words(make):
    old = make(maps={}, mounts=("span", "context.0.key")).describe()
    assert old["format"] == 1 and not {"share", "bands", "attention_rank", "feedforward_rank"} & old["config"].keys()
    assert "maps" not in old["roles"]["clip_l"]
    for new in (
        make(maps={}, mounts=("input",)),
        make(maps={}, mounts=("context.up0.key",)),
        make(maps={}, mounts=("context.0.key.1of2",)),
        make(maps={"attention.0": (1, 96)}, mounts=("span",)),
        make(maps={}, mounts=("span",), config=ConceptConfig(bands=2)),
    ):
        assert new.describe()["format"] == 2 and new.describe()["config"]["share"] == "none"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t, d: t.pop("clip_l.maps.scale"), "tensor clip_l.maps.scale is missing"),
        (lambda t, d: t.pop("clip_l.rows.gain"), "tensor clip_l.rows.gain is missing"),
        (lambda t, d: t.update({"clip_l.rows.gain": t["clip_l.rows.gain"][1:]}), "expected 3 mounts first"),
        (lambda t, d: t.update({"clip_l.maps.scale": torch.zeros(2, 2, dtype=torch.uint8)}), r"clip_l.maps.scale is \[2, 2\], expected"),
        (lambda t, d: t.update({"clip_l.maps.payload": t["clip_l.maps.payload"].float()}), "expected torch.float8_e4m3fn"),
        (lambda t, d: t["clip_l.maps.scale"].fill_(255), "NaN"),
        (lambda t, d: d["maps"].update({"attention.0": [2, 90]}), "channels a multiple of 32"),
        (lambda t, d: d["maps"].update({"attention.0": [2.0, 96]}), "expected \\[rank, channels\\]"),
        (lambda t, d: d["maps"].update({"attention.0": [97, 96]}), "expected \\[rank, channels\\]"),
        (lambda t, d: d["maps"].update({"attention.0": 3}), "does not describe a concept"),
        (lambda t, d: d["maps"].update({"other.0": [2, 96]}), "map 'other.0' of role 'clip_l' is unknown"),
        (lambda t, d: d["maps"].pop("attention.0"), r"clip_l.maps.payload is \[.*, expected"),
        (lambda t, d: t.update({"clip_l.span.gain": torch.zeros(3)}), "unexpected tensors"),
        (lambda t, d: d.update({"maps": ["attention.0"]}), "does not describe a concept"),
    ],
)
def test_maps_that_do_not_fit_together_are_refused(taught, tmp_path, change, expected):
    tensors = load_file(taught.save(tmp_path / "c.safetensors"))
    described = taught.describe()
    change(tensors, described["roles"]["clip_l"])
    save_file(tensors, tmp_path / "bad.safetensors", metadata={"tiny_engram": json.dumps(described)})
    with pytest.raises(ConceptFileError, match=expected) as caught:
        Concept.load(tmp_path / "bad.safetensors")
    assert "\n" not in str(caught.value)
