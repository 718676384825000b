"""The concept and its file: round trip, size, atomic save, strict and bounded load."""

import errno
import json
import os
import random
import struct
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CLIPTokenizerFast  # pyright: ignore[reportAttributeAccessIssue] # in all releases, as an alias in newer ones

from tiny_engram.concept import Concept, ConceptFileError
from tiny_engram.config import ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.tokenizer import CompressedTokenizer
from tiny_engram.triggers import compile_trigger

PIXEL = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(scope="module")
def make(repo_root):
    tokenizer = CLIPTokenizerFast.from_pretrained(repo_root / "assets/bases/emoji-sd/tokenizer")
    compressed = CompressedTokenizer(tokenizer)

    def build(trigger="cat-toy", aliases=(), width=128, **options):
        compiled = compile_trigger(trigger, tokenizer, aliases, compressed=compressed)
        concept = Concept.new({"clip_l": compiled}, widths={"clip_l": width}, fingerprints={"clip_l": compressed.fingerprint}, **options)
        old = concept.mount_rows("clip_l")
        torch.manual_seed(1)
        return concept.with_rows(
            "clip_l", torch.randn(old.payload.shape), torch.randn(old.gain.shape), torch.randn(old.bias.shape), rho=0.7
        )

    return build


@pytest.fixture
def saved(make, tmp_path):
    return make("cat-toy", ["cat-toys"], base="emoji-sd").save(tmp_path / "cat.safetensors")


def same(a, b):
    assert a.describe() == b.describe() and a.thumbnail == b.thumbnail
    for role, place in a.roles.items():
        for mount, rows in place.mounts.items():
            other = b.mount_rows(role, mount)
            for x, y in zip(
                (rows.payload, rows.scale, rows.gain, rows.bias), (other.payload, other.scale, other.gain, other.bias), strict=True
            ):
                assert x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_round_trip_keeps_everything(make, tmp_path):
    concept = make("caf\u00e9 zqx", ["zqxs"], name="My caf\u00e9", base="emoji-sd").with_details(
        recipe={"steps": 300, "pictures": ["a.png"]}, thumbnail=PIXEL, untrained=("zqxs",)
    )
    same(concept, Concept.load(concept.save(tmp_path / "c.safetensors")))


def test_metadata_is_text_and_names_the_trigger(make, saved):
    with open(saved, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    meta = header["__metadata__"]
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in meta.items())
    assert meta["modelspec.trigger_phrase"] == "cat-toy" and meta["modelspec.sai_model_spec"] == "1.0.0"
    with_picture = make().with_details(thumbnail=PIXEL)
    assert with_picture.metadata["modelspec.thumbnail"] == PIXEL
    with pytest.raises(ConceptFileError, match="expected a data URI"):
        _ = make().with_details(thumbnail="x.png").metadata


@pytest.mark.parametrize(("width", "limit"), [(128, 8192), (160, 8192), (768, 12288)])
def test_five_tokens_are_small(make, tmp_path, width, limit):
    concept = make("vortex zqx-9 bo", width=width, base="emoji-sd").with_details(
        recipe={"steps": 400, "learning_rate": 0.01, "batch_size": 8, "seed": 0, "pictures": [f"picture_{k}.png" for k in range(6)]}
    )
    assert concept.roles["clip_l"].positions >= 5
    assert concept.save(tmp_path / "c.safetensors").stat().st_size <= limit


def test_file_rows_are_in_position_order_and_hold_no_address(make, saved):
    tensors = load_file(saved)
    assert set(tensors) == {f"clip_l.span.{what}" for what in ("payload", "scale", "gain", "bias")}
    assert tensors["clip_l.span.payload"].dtype == torch.float8_e4m3fn and list(tensors["clip_l.span.payload"].shape) == [6, 4, 32]
    expected = make("cat-toy", ["cat-toys"]).mount_rows("clip_l").payload
    assert torch.equal(tensors["clip_l.span.payload"].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_save_keeps_the_old_file_and_leaves_nothing(make, saved, monkeypatch, code, call):
    before = saved.read_bytes()

    def fail(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(ConceptFileError, match=os.strerror(code)) as caught:
        make("zqx").save(saved)
    assert "\n" not in str(caught.value)
    assert saved.read_bytes() == before and [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_no_permission_and_missing_folder_are_one_line(make, tmp_path, monkeypatch):
    with pytest.raises(ConceptFileError, match="No such file or directory"):
        make().save(tmp_path / "nowhere" / "c.safetensors")

    def deny(**options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "mkstemp", deny)
    with pytest.raises(ConceptFileError, match="Permission denied; free|Permission denied"):
        make().save(tmp_path / "c.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_the_file(make, tmp_path):
    (tmp_path / "c").mkdir()
    with pytest.raises(ConceptFileError, match="cannot write"):
        make().save(tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    with pytest.raises(ConceptFileError, match="is a folder"):
        Concept.load(tmp_path / "c")
    with pytest.raises(ConceptFileError, match="does not exist"):
        Concept.load(tmp_path / "d")


def write_with_header(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def tensor(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"not json", "no JSON"),
        (b"[1, 2]", "no JSON object"),
        (b"[" * 100_000, "no JSON"),
        (b"\xff\xfe{}", "no JSON"),
        ({}, "no 'tiny_engram' in its metadata"),
        ({"__metadata__": {"a": 1}}, "metadata is not text"),
        ({"__metadata__": []}, "metadata is not text"),
        ({"x": 3}, "tensor 'x'"),
        ({"x": tensor("F64")}, "type F64"),
        ({"x": tensor(shape=(10**9, 10**9))}, "shape"),
        ({"x": tensor(shape=(-1,))}, "shape"),
        ({"x": tensor(shape=(True, 1))}, "4 bytes|no 'tiny_engram'"),
        ({"x": tensor(offsets=(0, 400))}, "truncated"),
        ({"x": tensor(offsets=(-4, 0))}, "offsets"),
        ({"x": tensor(shape=(2,))}, "bytes for F32"),
        ({"__metadata__": {"tiny_engram": "{"}}, "no JSON"),
        ({"__metadata__": {"tiny_engram": "[]"}}, "format version None"),
        ({"__metadata__": {"tiny_engram": '{"format": 99}'}}, "format version 99, expected 1 to 3; update"),
        ({"__metadata__": {"tiny_engram": '{"format": 1}'}}, "not fully covered"),
    ],
)
def test_unsound_headers_are_refused_in_one_line(tmp_path, header, expected):
    path = write_with_header(tmp_path / "bad.safetensors", header, b"\0\0\0\0")
    with pytest.raises(ConceptFileError, match=expected) as caught:
        Concept.load(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9, 5 * 2**20])
def test_huge_headers_are_refused_before_they_are_read(tmp_path, length):
    path = tmp_path / "huge.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(ConceptFileError, match="expected at most"):
        Concept.load(path)


def test_a_shape_of_many_large_sides_is_refused_at_once(tmp_path):
    path = write_with_header(tmp_path / "c.safetensors", {"a": tensor(shape=[2**28] * 100_000)}, b"1234")
    begin = time.perf_counter()
    with pytest.raises(ConceptFileError) as caught:
        Concept.load(path)
    assert time.perf_counter() - begin < 1.0 and len(str(caught.value)) < 500


def test_a_huge_file_is_refused_by_its_size(tmp_path):
    path = tmp_path / "huge.safetensors"
    with open(path, "wb") as file:
        file.truncate(2**31)
    with pytest.raises(ConceptFileError, match="this is no concept file"):
        Concept.load(path)


def test_every_truncation_is_refused(saved, tmp_path):
    blob = saved.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in {0, 1, 7, 8, 9, *range(10, len(blob), 97), len(blob) - 1}:
        cut.write_bytes(blob[:size])
        with pytest.raises(ConceptFileError):
            Concept.load(cut)


@pytest.mark.parametrize("number", ["1e999", "Infinity", "NaN"])
def test_numbers_that_are_no_integers_are_refused(saved, number):
    blob = saved.read_bytes()
    at = blob.index(b'ids\\":[') + len(b'ids\\":[')
    end = min(blob.index(mark, at) for mark in (b",", b"]"))
    (length,) = struct.unpack("<Q", blob[:8])
    saved.write_bytes(struct.pack("<Q", length + len(number) - (end - at)) + blob[8:at] + number.encode() + blob[end:])
    with pytest.raises(ConceptFileError, match="does not describe a concept"):
        Concept.load(saved)


def test_damaged_bytes_never_give_another_error(saved, tmp_path):
    blob, rng, refused = saved.read_bytes(), random.Random(0), 0
    bad = tmp_path / "bad.safetensors"
    for _ in range(400):
        damaged = bytearray(blob)
        for _ in range(rng.choice([1, 1, 3, 20])):
            damaged[rng.randrange(len(blob))] = rng.randrange(256)
        bad.write_bytes(damaged)
        try:
            Concept.load(bad)
        except ConceptFileError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t, d: t.pop("clip_l.span.scale"), "tensor clip_l.span.scale is missing"),
        (lambda t, d: t.update({"clip_l.span.gain": torch.ones(5)}), "expected torch.float32 \\[6\\]"),
        (lambda t, d: t.update({"clip_l.span.gain": torch.full((6,), float("nan"))}), "NaN"),
        (lambda t, d: t.update({"clip_l.span.scale": torch.full((6, 4, 1), 255, dtype=torch.uint8)}), "NaN"),
        (lambda t, d: t.update({"extra": torch.ones(1)}), "unexpected tensors"),
        (lambda t, d: d["config"].update({"vocab": -1}), "vocab"),
        (lambda t, d: d["config"].update({"max_ngram": 10**6}), "expected at most 128 rows"),
        (lambda t, d: d["config"].update({"other": 1}), "other"),
        (lambda t, d: d["roles"]["clip_l"].update({"width": 10**9}), "width"),
        (lambda t, d: d["roles"]["clip_l"]["variants"][0].update({"group": 7}), "do not fit together"),
        (lambda t, d: d["roles"]["clip_l"]["variants"][0].update({"ids": [1]}), "do not fit together"),
        (lambda t, d: d.update({"roles": {}}), "unexpected tensors"),
        (lambda t, d: d.update({"roles": 3}), "does not describe"),
        (lambda t, d: d.pop("trigger"), "does not describe"),
        (lambda t, d: d["roles"]["clip_l"]["rho"].update({"span": float("inf")}), "rho"),
    ],
)
def test_contents_that_do_not_fit_together_are_refused(saved, tmp_path, change, expected):
    described = Concept.load(saved).describe()
    tensors = load_file(saved)
    change(tensors, described)
    path = tmp_path / "other.safetensors"
    save_file(tensors, path, metadata={"tiny_engram": json.dumps(described)})
    with pytest.raises(ConceptFileError, match=expected):
        Concept.load(path)


def test_a_lora_is_told_apart(tmp_path):
    save_file({"lora_A": torch.ones(2, 2)}, tmp_path / "lora.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConceptFileError, match="is this a LoRA"):
        Concept.load(tmp_path / "lora.safetensors")


def test_rows_of_another_shape_role_or_value_are_refused(make):
    concept = make()
    old = concept.mount_rows("clip_l")
    for rows, gain, role, expected in [
        (torch.zeros(1, 4, 32), old.gain, "clip_l", "rows of 'cat-toy' have shape \\[1, 4, 32\\], expected \\[3, 4, 32\\]"),
        (old.rows(), torch.ones(2), "clip_l", "gain of"),
        (old.rows() * float("nan"), old.gain, "clip_l", "NaN"),
        (old.rows(), old.gain, "t5", "no role 't5'; known: \\['clip_l'\\]"),
    ]:
        with pytest.raises(TinyEngramError, match=expected):
            concept.with_rows(role, rows, gain, old.bias)
    for wrong, kind in ((old.rows().numpy(), "ndarray"), ([[1.0]], "list")):
        with pytest.raises(TinyEngramError, match=f"rows of 'cat-toy' is a {kind}, expected a tensor \\[3, 4, 32\\]"):
            concept.with_rows("clip_l", wrong, old.gain, old.bias)
    with pytest.raises(TinyEngramError, match="no mount 'deep'"):
        concept.mount_rows("clip_l", "deep")


def test_shown_in_one_line_without_its_values(make):
    concept = make()
    shown = repr(concept)
    assert shown.startswith("Concept('cat-toy', trigger='cat-toy'") and "\n" not in shown and "tensor" not in shown
    assert shown.endswith(f"rows at clip_l: span, {concept.nbytes:,} bytes)")


def test_a_new_concept_is_all_zero_but_its_gates(make):
    config = ConceptConfig(max_ngram=4, rho=0.5)
    concept = make(config=config)
    assert list(concept.mount_rows("clip_l").payload.shape) == [3, 3 * config.heads_at(128), 32]
    assert concept.nbytes == 3 * 3 * config.heads_at(128) * 33 + 2 * 3 * 4


def test_a_byte_that_changed_is_noticed(make, tmp_path):
    taught = make()
    path = taught.save(tmp_path / "c.safetensors")
    blob = bytearray(path.read_bytes())
    blob[-5] ^= 1
    path.write_bytes(blob)
    with pytest.raises(ConceptFileError, match="its data is not what was saved"):
        Concept.load(path)
    # files of others, without a digest, load
    with safe_open(path, "pt") as file:
        metadata = {k: v for k, v in file.metadata().items() if k != "modelspec.hash_sha256"}
    save_file(load_file(path), path, metadata=metadata)
    assert Concept.load(path).trigger == taught.trigger
