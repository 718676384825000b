"""Table files: every form that is read, every lie that is refused, and a digest that depends on the rows alone."""

import hashlib
import json
import os
import struct

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tiny_engram.errors import TableError
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.header import MAX_HEADER
from tiny_engram.table.mapped import map_rows
from tiny_engram.table.storage import RowStorage
from tiny_engram.table.table_digest import BLOCK_ROWS, digest_blocks, table_digest
from tiny_engram.table.table_file import KEY, TableFile
from tiny_engram.table.table_writer import write_table

PREFIX = "model.layers.1.engram."


def rows_by_rule(rows, head_dim=32, seed=0):
    return FillRule(head_dim, seed).rows(torch.arange(rows))


def same(found, expected):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def big():
    """Three blocks and a bit."""
    return rows_by_rule(3 * BLOCK_ROWS + 1000)


@pytest.fixture
def table(tmp_path):
    payload, scale = rows_by_rule(700, 256)
    path = tmp_path / "table.safetensors"
    write_table(path, (payload, scale), prefix=PREFIX)
    return path, (payload, scale)


def test_what_is_written_is_read_by_anybody(table):
    path, expected = table
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {f"{PREFIX}embed.weight", f"{PREFIX}embed.scale"}
        weight, scale = file.get_tensor(f"{PREFIX}embed.weight"), file.get_tensor(f"{PREFIX}embed.scale")
    assert weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float8_e8m0fnu and same((weight, scale), expected)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert (8 + length) % 4096 == 0
    with TableFile(path) as file:
        assert (file.rows, file.head_dim, file.row_bytes, file.nbytes, file.prefix) == (700, 256, 264, 700 * 264, PREFIX)
        assert same(file.read(0, 700), expected) and same(file.read(699, 1), [x[699:] for x in expected])
        assert file.read(3, 0)[0].shape == (0, 256) and file.verify() == 1
        with pytest.raises(TableError, match="rows 690 to 701 are asked for, the table has 700"):
            file.read(690, 11)
    with pytest.raises(TableError, match="closed"):
        file.read(0, 1)


@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_files_of_others_are_read(tmp_path, scale_dtype):
    payload, scale = rows_by_rule(77, 64)
    others = {"model.embed.weight": torch.zeros(5, 7, dtype=torch.bfloat16), "a.odd": torch.zeros(3, dtype=torch.uint8)}
    tensors = {f"{PREFIX}embed.weight": payload, f"{PREFIX}embed.scale": scale.view(scale_dtype)}
    save_file({**others, **tensors}, tmp_path / "x.safetensors")
    with TableFile(tmp_path / "x.safetensors") as file:
        assert file.digest is None and file.prefix == PREFIX and same(file.read(0, 77), (payload, scale))
        with pytest.raises(TableError, match="stores no digest"):
            file.verify()
    mapped = map_rows(tmp_path / "x.safetensors")  # wherever its data begins
    assert same((mapped.payload, mapped.scale), (payload, scale))


def test_a_checkpoint_with_an_index(tmp_path):
    """As published: two tables, and the two tensors of one of them in different files."""
    one, two = rows_by_rule(40, 64), rows_by_rule(41, 64, seed=1)
    save_file({"layers.1.embed.weight": one[0], "layers.14.embed.scale": two[1]}, tmp_path / "m-1.safetensors")
    save_file({"layers.1.embed.scale": one[1], "layers.14.embed.weight": two[0]}, tmp_path / "m-2.safetensors")
    places = {"layers.1.embed.weight": "m-1.safetensors", "layers.14.embed.scale": "m-1.safetensors"}
    places |= {"layers.1.embed.scale": "m-2.safetensors", "layers.14.embed.weight": "m-2.safetensors", "lm_head": "m-9.safetensors"}
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    for prefix, rows in (("layers.1.", one), ("layers.14", two), ("layers.14.embed.weight", two)):
        with TableFile(index, prefix=prefix) as file:
            assert same(file.read(0, file.rows), rows)
        mapped = map_rows(index, prefix=prefix)
        assert same((mapped.payload, mapped.scale), rows)
    with pytest.raises(TableError, match=r"holds 2 tables, expected a prefix that names one: layers\.1\., layers\.14\."):
        TableFile(index)
    with pytest.raises(TableError, match=r"holds no table 'layers\.2\.' .* under 'layers\.1\.', 'layers\.14\.'"):
        TableFile(index, prefix="layers.2")


def test_names_that_only_look_like_a_table(tmp_path):
    rows, others = rows_by_rule(9, 64), rows_by_rule(8, 32)
    tensors = {"tok_embed.weight": others[0], "tok_embed.scale": others[1], "embed.embed.weight": rows[0], "embed.embed.scale": rows[1]}
    save_file(tensors, tmp_path / "x.safetensors")
    for prefix in (None, "embed.", "embed.embed", "embed.embed.weight"):
        with TableFile(tmp_path / "x.safetensors", prefix=prefix) as file:
            assert file.prefix == "embed." and same(file.read(0, 9), rows)
    with pytest.raises(TableError, match="holds no table 'tok_'|'tok_.'"):
        TableFile(tmp_path / "x.safetensors", prefix="tok_")


def test_the_digest_depends_on_rows_alone(tmp_path, big):
    rows = len(big[0])
    blocks = []
    for first in range(0, rows, BLOCK_ROWS):
        found = hashlib.sha256(big[0][first : first + BLOCK_ROWS].view(torch.uint8).numpy().tobytes())
        found.update(big[1][first : first + BLOCK_ROWS].numpy().tobytes())
        blocks.append(found.digest())
    digest = table_digest(rows, 32, blocks)
    storage = RowStorage.allocate(rows, 32, home="pageable", layout="record")
    storage.write(0, *big)
    steps = []
    found = write_table(tmp_path / "one.safetensors", storage, progress=lambda done, total: steps.append((done, total)))
    assert found == digest and steps == [(min((k + 1) * BLOCK_ROWS, rows), rows) for k in range(4)]
    assert write_table(tmp_path / "parts.safetensors", big, shard_bytes=2 * BLOCK_ROWS * 33, prefix=PREFIX) == digest
    index = tmp_path / "parts.safetensors.index.json"
    with TableFile(index) as parts, TableFile(tmp_path / "one.safetensors") as one:
        assert [p.name for p in parts.files] == ["parts-00001-of-00002.safetensors", "parts-00002-of-00002.safetensors"]
        assert parts.digest == one.digest == digest and parts.blocks == one.blocks == blocks == digest_blocks(map_rows(index))
        across = slice(2 * BLOCK_ROWS - 5, 2 * BLOCK_ROWS + 7)
        assert same(parts.read(across.start, 12), [x[across] for x in big])
        assert parts.verify() == 4
        assert write_table(tmp_path / "back.safetensors", parts) == digest
    assert (tmp_path / "back.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    changed = big[1].clone()
    changed[-1, 0] ^= 1
    assert write_table(tmp_path / "other.safetensors", (big[0], changed)) != digest
    assert write_table(tmp_path / "fewer.safetensors", (big[0][:-1], big[1][:-1])) != digest


def test_damage_is_named(tmp_path, big):
    path = tmp_path / "table.safetensors"
    write_table(path, big)
    with TableFile(path) as file:
        span = file.parts[0].scale
        with open(path, "r+b") as raw:
            raw.seek(span.offset + 2 * BLOCK_ROWS + 17)
            byte = raw.read(1)
            raw.seek(-1, os.SEEK_CUR)
            raw.write(bytes([byte[0] ^ 0x10]))
        with pytest.raises(TableError, match=rf"rows {2 * BLOCK_ROWS} to {3 * BLOCK_ROWS - 1} \(block 2 of 4\) are damaged"):
            file.verify()
        assert file.verify(0, 2 * BLOCK_ROWS) == 2 and file.verify(3 * BLOCK_ROWS) == 1
        with pytest.raises(TableError, match="block 2 of 4"):
            file.verify(2 * BLOCK_ROWS + 100, 1)
        with pytest.raises(TableError, match="rows 5:4 are asked for"):
            file.verify(5, -1)


def test_an_empty_table(tmp_path):
    digest = write_table(tmp_path / "none.safetensors", rows_by_rule(0))
    assert write_table(tmp_path / "none2.safetensors", rows_by_rule(0), shard_bytes=1) == digest
    for name in ("none.safetensors", "none2.safetensors.index.json"):
        with TableFile(tmp_path / name) as file:
            assert file.rows == 0 and file.verify() == 0 and file.head_dim == 32
        assert map_rows(tmp_path / name).rows == 0


# -- files that lie ----------------------------------------------------------------------------------------------------------


def rebuilt(path, change):
    """The file with another header in place of its own."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def edit(name, **fields):
    def change(header):
        header[f"{PREFIX}{name}"].update(fields)

    return change


def metadata(**fields):
    def change(header):
        about = json.loads(header["__metadata__"][KEY])
        header["__metadata__"][KEY] = json.dumps({**about, **fields})

    return change


def drop(name):
    return lambda header: header.pop(f"{PREFIX}{name}") and None


W, S = 700 * 256, 700 * 8
LIES = {
    "beyond the file": (edit("embed.scale", data_offsets=[W, W + S + 1], shape=[S + 1, 1]), "offsets .* truncated"),
    "far beyond": (edit("embed.scale", data_offsets=[2**62, 2**62 + S]), "truncated"),
    "overlapping": (edit("embed.scale", data_offsets=[W - 8, W + S - 8]), r"begins at byte \d+, inside .*embed\.weight"),
    "backwards": (edit("embed.scale", data_offsets=[W + S, W]), "offsets .* are none"),
    "no offsets": (edit("embed.scale", data_offsets=["a", "b"]), "offsets a..b are none"),
    "dtype of rows": (edit("embed.weight", dtype="U8"), r"is U8 \[700, 256\], expected F8_E4M3"),
    "dtype of scales": (edit("embed.scale", dtype="I8"), "is I8 .*, expected F8_E8M0 or U8"),
    "unknown dtype": (edit("embed.scale", dtype="F6"), "type 'F6' is unknown"),
    "no dtype": (lambda header: header[f"{PREFIX}embed.scale"].pop("dtype") and None, "'dtype' is missing"),
    "flat": (edit("embed.weight", shape=[W]), r"F8_E4M3 \[179200\], expected F8_E4M3 \[rows"),
    "rows differ": (edit("embed.scale", shape=[1400, 4]), "one scale per 32 values"),
    "odd width": (edit("embed.weight", shape=[W // 40, 40]), "one scale per 32 values"),
    "size": (edit("embed.weight", shape=[701, 256]), "179200 bytes for F8_E4M3 .*, expected 179456"),
    "negative": (edit("embed.weight", shape=[-700, -256]), "shape .* is none"),
    "many sides": (edit("embed.weight", shape=[2**40] * 9), "shape .* is none"),
    "no scale": (drop("embed.scale"), "holds no table of embed.weight and embed.scale; .* has no scale beside it"),
    "no rows": (drop("embed.weight"), "holds no table"),
    "a list": (lambda header: [header], "no JSON object"),
    "metadata": (lambda header: header.update(__metadata__={"a": 1}), "metadata is not text to text"),
    "digest": (metadata(digest="00"), "digest in its metadata cannot be read"),
    "another digest": (metadata(digest="0" * 64), "it is not that of its blocks"),
    "blocks": (metadata(blocks=""), "0 block digests for 1 blocks"),
    "other rows": (metadata(rows=701), "says 701 rows of 256, 700 of 256 are there"),
    "format": (metadata(format=9), "table format 9, expected 1"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(table, lie):
    path, _ = table
    change, words = LIES[lie]
    rebuilt(path, change)
    before = path.read_bytes()
    for read in (TableFile, map_rows):
        with pytest.raises(TableError, match=words) as caught:
            read(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes, expected at least a header"),
        (b"\x02", "1 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "header of 9223372036854775808 bytes, expected 2 to"),
        (struct.pack("<Q", MAX_HEADER + 1) + b"{}", "expected 2 to"),
        (struct.pack("<Q", 5000) + b"{}", "header of 5000 bytes in a file of 10: truncated"),
        (struct.pack("<Q", 4) + b"nope", "no sound JSON"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}", "no sound JSON"),
        (struct.pack("<Q", 40_000) + b"[" * 40_000, "no sound JSON"),
        (struct.pack("<Q", 13) + b'{"a":1,"a":2}', "a key stands twice"),
        (struct.pack("<Q", 6) + b'{"a":1' + b"}", "no sound JSON"),
        (struct.pack("<Q", 2) + b"{}", "holds no table"),
    ],
)
def test_files_that_are_none(tmp_path, content, words):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(TableError, match=words):
        TableFile(path)
    with pytest.raises(TableError, match=words):
        map_rows(path)


@pytest.mark.parametrize("kept", [0, 7, 100, 4096, 5000, -1])
def test_a_truncated_file(table, kept):
    path, _ = table
    raw = path.read_bytes()
    path.write_bytes(raw[:kept])
    with pytest.raises(TableError, match="truncated|at least a header"):
        TableFile(path)


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, words in ((tmp_path, "is a folder"), (tmp_path / "none", "No such file"), (tmp_path / "pipe", "neither a file")):
        with pytest.raises(TableError, match=words):
            TableFile(path)


def test_a_file_cut_while_open(table):
    path, _ = table
    with TableFile(path) as file:
        os.truncate(path, path.stat().st_size - 10)
        with pytest.raises(TableError, match="ends at byte .* open the table again"):
            file.read(0, 700)


@pytest.fixture
def parts(tmp_path):
    rows = rows_by_rule(2 * BLOCK_ROWS + 10)
    write_table(tmp_path / "p.safetensors", rows, shard_bytes=1)
    return tmp_path / "p.safetensors.index.json"


def reindexed(index, change):
    found = json.loads(index.read_text())
    change(found)
    index.write_text(json.dumps(found))


def test_parts_that_do_not_fit(parts):
    first, second, third = (parts.with_name(f"p-0000{k}-of-00003.safetensors") for k in (1, 2, 3))
    for alone in (first, third):
        with pytest.raises(TableError, match="a part is missing|a shard is missing"):
            TableFile(alone)
    text = parts.read_text()
    reindexed(parts, lambda found: [found["weight_map"].pop(f"embed.{x}.rows.{BLOCK_ROWS}") for x in ("weight", "scale")])
    with pytest.raises(TableError, match=rf"begins at row {2 * BLOCK_ROWS}, expected {BLOCK_ROWS}: a part is missing"):
        TableFile(parts)
    parts.write_text(text)
    reindexed(parts, lambda found: [found["weight_map"].pop(f"embed.{x}.rows.{2 * BLOCK_ROWS}") for x in ("weight", "scale")])
    with pytest.raises(TableError, match="a shard is missing"):
        TableFile(parts)
    parts.write_text(text)
    reindexed(parts, lambda found: found["weight_map"].update({"embed.weight.rows.0": "../x.safetensors"}))
    with pytest.raises(TableError, match="names the file '../x.safetensors', expected a file of the same folder"):
        TableFile(parts)
    parts.write_text(text)
    with pytest.raises(TableError, match=r"p\.safetensors: cannot open the table .*; open .*p\.safetensors\.index\.json"):
        TableFile(parts.with_suffix("").with_suffix(""))
    second.rename(second.with_suffix(".gone"))
    with pytest.raises(TableError, match="p-00002-of-00003.*No such file"):
        TableFile(parts)
    second.write_bytes(third.read_bytes())
    with pytest.raises(TableError, match="lacks 'embed.weight.rows.65536', which the index places there"):
        TableFile(parts)
    reindexed(parts, lambda found: found["weight_map"].update({"embed.weight.rows.0": "a\0b"}))
    with pytest.raises(TableError, match="cannot open the table"):
        TableFile(parts)
    for bad in ("[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'):
        parts.write_text(bad)
        with pytest.raises(TableError, match="index"):
            TableFile(parts)


def test_a_closed_file_is_not_read_by_the_number_of_another(tmp_path):
    write_table(tmp_path / "t", rows_by_rule(100))
    with TableFile(tmp_path / "t") as file:
        part = file.parts[0]
    with open(tmp_path / "t", "rb"), pytest.raises(TableError, match="Bad file descriptor"):
        part.payload_file.read_into(0, np.empty(4, np.uint8))
