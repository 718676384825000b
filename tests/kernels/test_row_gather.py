"""The gather against rows dequantised one by one, by both implementations; the kernel runs in Triton's interpreter without a GPU."""

import random
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tiny_engram.kernels.backend import implementation
from tiny_engram.kernels.block_quant import dequantize_blocks, quantize_blocks
from tiny_engram.kernels.row_gather import row_gather

BOTH = ("reference", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def table(rows: int, width: int, layout: str, seed: int = 0, pad: int = 0, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Every byte pattern there is, in payload and scale; `pad` bytes follow each row and `offset` bytes stand before the first."""
    generator = torch.Generator().manual_seed(seed)
    row = width + width // 32 + pad
    held = torch.randint(0, 256, (offset + rows * row,), generator=generator, dtype=torch.uint8)
    record = held[offset:].view(rows, row)
    payload, scale = record[:, :width].view(torch.float8_e4m3fn), record[:, width : width + width // 32]
    return (payload, scale) if layout == "record" else (payload.clone(memory_format=torch.contiguous_format), scale.contiguous())


def expected(payload: torch.Tensor, scale: torch.Tensor, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Row by row, by the op that dequantises; ids outside give zeros."""
    rows = dequantize_blocks(payload.contiguous(), scale.contiguous()).to(dtype)
    zero = torch.zeros(payload.shape[1], dtype=dtype)
    return torch.stack([rows[i] if 0 <= i < len(rows) else zero for i in ids])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, but for what a NaN carries."""
    if a.dtype == torch.bfloat16 and not torch.cuda.is_available():
        # Triton's interpreter casts float32 subnormals to bfloat16 wrongly; a device does not.
        a, b = (torch.where(x.abs() < 2.0**-126, 0, x) for x in (a, b))
    bits = {4: torch.int32, 2: torch.int16}[a.element_size()]
    nan = a.isnan()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(nan, b.isnan()) and bool(((a.view(bits) == b.view(bits)) | nan).all())


@pytest.mark.parametrize("name", BOTH)
def test_equals_the_dequantised_rows_at_any_shape_and_layout(name):
    draw = random.Random(7)
    for case in range(24):
        width = 32 * draw.choice((1, 2, 3, 5, 8))
        rows = draw.randint(1, 40)
        payload, scale = table(rows, width, draw.choice(("record", "split")), case, draw.choice((0, 0, 1, 2, 7)), draw.choice((0, 1, 4)))
        ids = [draw.randint(-1, rows - 1) for _ in range(draw.randint(1, 90))]
        dtype = DTYPES[case % 3]
        with implementation(name):
            assert same(row_gather(payload, scale, torch.tensor(ids), dtype=dtype), expected(payload, scale, ids, dtype)), (
                case,
                width,
                rows,
            )


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_payload_byte_under_every_scale_byte(name, dtype):
    payload = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(torch.float8_e4m3fn)
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 8)
    with implementation(name):
        out = row_gather(payload, scale, torch.arange(256), dtype=dtype)
    assert same(out, dequantize_blocks(payload, scale).to(dtype))


@pytest.mark.parametrize("width", [32, 96, 256])
def test_the_float8_unit_makes_the_same_values(width):
    """The way that devices with a float8 unit take. The interpreter reads e4m3's two NaNs as +-480; a device test has them."""
    from tiny_engram.kernels.row_gather.fused import launch

    payload, scale = table(70, width, "record", pad=width // 32 * 7 % 8)
    payload.view(torch.uint8)[payload.isnan()] = 126
    ids = torch.tensor([3, -1, 69, 0, 0, 70, *range(64)])
    out, bad = torch.empty(len(ids), width), torch.zeros(2, dtype=torch.int64)
    launch(payload, scale, ids, 0, 70, out, bad, float8=True)
    assert same(out, expected(payload, scale, ids.tolist(), torch.float32)) and bad.tolist() == [1, 70]


def test_ids_of_any_shape_and_stride_and_a_table_of_strided_rows():
    payload, scale = table(9, 64, "record", pad=3)
    ids = torch.arange(24).remainder(9).view(2, 3, 4).transpose(0, 2)[::2]
    for name in BOTH:
        with implementation(name):
            out = row_gather(payload[::2], scale[::2], ids // 2)
            assert out.shape == (2, 3, 2, 64)
            assert same(out.reshape(-1, 64), expected(payload[::2], scale[::2], (ids // 2).flatten().tolist(), torch.float32))


@pytest.mark.parametrize("name", BOTH)
def test_an_absent_slot_does_not_see_a_broken_row_0(name):
    payload = torch.full((1, 32), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with implementation(name):
        out = row_gather(payload, torch.tensor([[255]], dtype=torch.uint8), torch.tensor([-1, 5, -7]), bounds="ignore")
    assert torch.equal(out, torch.zeros(3, 32))


@pytest.mark.parametrize("name", BOTH)
def test_empty_table_and_empty_request(name):
    payload, scale = quantize_blocks(torch.zeros(0, 32))
    with implementation(name):
        assert torch.equal(row_gather(payload, scale, torch.tensor([-1, -1])), torch.zeros(2, 32))
        assert row_gather(payload, scale, torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 4, 32)
        with pytest.raises(IndexError, match=r"row id 0 is outside \[0, 0\)"):
            row_gather(payload, scale, torch.tensor([0]))


@pytest.mark.parametrize("name", BOTH)
def test_fatal_names_the_first_bad_id(name):
    payload, scale = table(7, 32, "split")
    with implementation(name):
        with pytest.raises(IndexError, match=r"row id 7 is outside \[0, 7\), the first of 3 such among 5 ids .*bounds='warn'"):
            row_gather(payload, scale, torch.tensor([-1, 7, 3, -2, 2**62]))
        row_gather(payload, scale, torch.tensor([-1, 6, 0]))


@pytest.mark.parametrize("name", BOTH)
def test_warn_reads_zeros_and_counts(name):
    payload, scale = table(7, 32, "record")
    ids = [-1, 3, 7, -(2**63), 6, 2**63 - 1] + [0] * 150 + [9]
    violations = torch.zeros(2, dtype=torch.int64)
    with implementation(name):
        out = row_gather(payload, scale, torch.tensor(ids), bounds="warn", violations=violations)
        assert same(out, expected(payload, scale, ids, torch.float32)) and violations.tolist() == [4, 7]
        row_gather(payload, scale, torch.tensor([8, 1]), bounds="warn", violations=violations)
        assert violations.tolist() == [5, 7]
        with pytest.warns(RuntimeWarning, match="row id 7 is outside.* 4 such among 157"):
            row_gather(payload, scale, torch.tensor(ids), bounds="warn")
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            row_gather(payload, scale, torch.tensor([-1, 6]), bounds="warn")
            row_gather(payload, scale, torch.tensor(ids), bounds="ignore", violations=violations)
    assert violations.tolist() == [5, 7]


@pytest.mark.parametrize("name", BOTH)
def test_an_id_counts_once_where_several_programs_read_a_row(name):
    payload, scale = table(2, 8224, "record")
    ids, violations = [1, 2, -1, 5], torch.zeros(2, dtype=torch.int64)
    with implementation(name):
        out = row_gather(payload, scale, torch.tensor(ids), bounds="warn", violations=violations)
    assert same(out, expected(payload, scale, ids, torch.float32)) and violations.tolist() == [2, 2]


@pytest.mark.parametrize("name", BOTH)
def test_shards_sum_to_the_whole(name):
    payload, scale = quantize_blocks(torch.randn(11, 64, generator=torch.Generator().manual_seed(0)))
    ids = torch.tensor([10, -1, 0, 3, 4, 5, 9, 4])
    with implementation(name):
        whole = row_gather(payload, scale, ids)
        parts = [
            row_gather(payload[a:b], scale[a:b], ids, first_row=a, rows_total=11, dtype=torch.bfloat16)
            for a, b in ((0, 4), (4, 4), (4, 11))
        ]
        assert torch.equal(sum(part.float() for part in parts), whole)
        with pytest.raises(IndexError, match=r"row id 11 is outside \[0, 11\)"):
            row_gather(payload[:4], scale[:4], torch.tensor([11]), rows_total=11)
        with pytest.raises(IndexError, match=r"outside \[0, 11\)"):
            row_gather(payload[4:], scale[4:], torch.tensor([11]), first_row=4)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_into_the_given_memory(name, dtype):
    payload, scale = table(7, 96, "record")
    ids, out = torch.tensor([[6, 0], [-1, 2]]), torch.empty(2, 2, 96, dtype=dtype)
    with implementation(name):
        assert row_gather(payload, scale, ids, out=out) is out
    assert same(out.view(4, 96), expected(payload, scale, [6, 0, -1, 2], dtype))


def test_the_op_is_sound():
    payload, scale = quantize_blocks(torch.randn(5, 32, generator=torch.Generator().manual_seed(0)))
    # Bytes, since the check itself compares arguments, which torch cannot do on float8.
    payload, ids = payload.view(torch.uint8), torch.tensor([1, -1, 4])
    torch.library.opcheck(torch.ops.tiny_engram.row_gather.default, (payload, scale, ids, 0, 5, "ignore", torch.bfloat16))
    for violations in (None, torch.zeros(2, dtype=torch.int64)):
        out = torch.zeros(3, 32)
        torch.library.opcheck(torch.ops.tiny_engram.row_gather_out.default, (payload, scale, ids, 0, 5, "warn", out, violations))


def test_tensors_without_data_go_through_the_op():
    with FakeTensorMode():
        payload, scale = torch.empty(5, 64, dtype=torch.float8_e4m3fn), torch.empty(5, 2, dtype=torch.uint8)
        out = row_gather(payload, scale, torch.empty(3, 2, dtype=torch.int64), dtype=torch.bfloat16)
    assert out.shape == (3, 2, 64) and out.dtype == torch.bfloat16 and type(out) is not torch.Tensor
    payload, scale = torch.zeros(5, 64, dtype=torch.float8_e4m3fn, device="meta"), torch.zeros(5, 2, dtype=torch.uint8, device="meta")
    out = row_gather(payload, scale, torch.zeros(3, 2, dtype=torch.int64, device="meta"))
    assert out.shape == (3, 2, 64) and out.is_meta


@pytest.mark.parametrize("name", BOTH)
def test_compiles_in_one_graph(name):
    payload, scale = table(6, 32, "split")
    violations = torch.zeros(2, dtype=torch.int64)

    def step(ids, out):
        rows = row_gather(payload, scale, ids + 1, dtype=torch.bfloat16)
        row_gather(payload, scale, ids, bounds="warn", violations=violations, out=out)
        return rows * 2

    ids, out = torch.tensor([4, -2, 0]), torch.empty(3, 32)
    with implementation(name):
        doubled = torch.compile(step, fullgraph=True, backend="aot_eager")(ids, out)
    assert same(doubled, expected(payload, scale, [5, -1, 1], torch.bfloat16) * 2)
    assert same(out, expected(payload, scale, [4, -2, 0], torch.float32)) and violations.tolist() == [1, -2]


def test_refuses_what_does_not_fit():
    payload, scale = quantize_blocks(torch.zeros(2, 64))
    ids = torch.tensor([0])
    with pytest.raises(ValueError, match="int64"):
        row_gather(payload, scale, ids.int())
    with pytest.raises(ValueError, match="D / 32"):
        row_gather(payload, torch.zeros(2, 3, dtype=torch.uint8), ids)
    with pytest.raises(ValueError, match="side by side"):
        row_gather(payload.view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn), scale, ids)
    with pytest.raises(ValueError, match="do not fit"):
        row_gather(payload, scale, ids, first_row=3, rows_total=4)
    with pytest.raises(ValueError, match="'fatal', 'warn'|fatal, warn, ignore"):
        row_gather(payload, scale, ids, bounds="clamp")
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        row_gather(payload, scale, ids, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"contiguous \[1, 64\]"):
        row_gather(payload, scale, ids, out=torch.empty(64))
    with pytest.raises(ValueError, match=r"int64 \[2\]"):
        row_gather(payload, scale, ids, bounds="warn", violations=torch.zeros(1))


# -- on a device


def on_device(payload: torch.Tensor, scale: torch.Tensor, layout: str, home: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rows on the device or in pinned memory, as one array of records or as two."""

    def move(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().cuda() if home == "device" else x.contiguous().pin_memory()

    width, payload = payload.shape[1], payload.view(torch.uint8)
    if layout == "split":
        return move(payload).view(torch.float8_e4m3fn), move(scale)
    record = move(torch.cat((payload, scale), dim=1))
    return record[:, :width].view(torch.float8_e4m3fn), record[:, width:]


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["device", "pinned"])
@pytest.mark.parametrize("layout", ["record", "split"])
def test_gpu_equals_the_cpu_at_odd_sizes(layout, home):
    draw = random.Random(3)
    for width in (32, 64, 96, 160, 256, 320, 1024, 5120):
        rows = draw.randint(1, 3000)
        payload, scale = table(rows, width, "split", seed=width)
        there = on_device(payload, scale, layout, home)
        for dtype, asked in zip(DTYPES, (1, 77, 4099), strict=True):
            ids = torch.tensor([draw.randint(-1, rows - 1) for _ in range(asked)])
            out = row_gather(*there, ids.cuda(), dtype=dtype)
            assert same(out.cpu(), row_gather(payload, scale, ids, dtype=dtype)), (width, dtype, asked)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_every_payload_byte_under_every_scale_byte(dtype):
    payload = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(torch.float8_e4m3fn)
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 8)
    out = row_gather(payload.cuda(), scale.cuda(), torch.arange(256, device="cuda"), dtype=dtype)
    assert same(out.cpu(), dequantize_blocks(payload, scale).to(dtype))


@pytest.mark.gpu
def test_gpu_reads_registered_memory_and_refuses_plain_memory():
    payload, scale = table(500, 256, "record", pad=8, seed=1)
    ids = torch.arange(-1, 500)
    with pytest.raises(ValueError, match="plain host memory.*pin"):
        row_gather(payload, scale, ids.cuda())
    start, held, runtime = payload.data_ptr(), payload.untyped_storage().nbytes(), torch.cuda.cudart()
    assert runtime is not None and int(runtime.cudaHostRegister(start, held, 0)) == 0
    try:
        out = row_gather(payload, scale, ids.cuda()).cpu()
    finally:
        torch.cuda.synchronize()
        assert int(runtime.cudaHostUnregister(start)) == 0
    assert same(out, row_gather(payload, scale, ids))


@pytest.mark.gpu
def test_gpu_bounds_and_shards():
    payload, scale = table(1000, 64, "record")
    there = on_device(payload, scale, "record", "device")
    ids = torch.randint(-3, 1500, (100_000,), generator=torch.Generator().manual_seed(5))
    bad = (ids < -1) | (ids >= 1000)
    violations = torch.zeros(2, dtype=torch.int64, device="cuda")
    out = row_gather(*there, ids.cuda(), bounds="warn", violations=violations)
    assert same(out.cpu(), row_gather(payload, scale, ids, bounds="ignore"))
    count, first = violations.tolist()
    assert count == int(bad.sum()) and first in set(ids[bad].tolist())
    with pytest.raises(IndexError, match=f"row id {int(ids[bad][0])} is outside .* {count} such among 100000"):
        row_gather(*there, ids.cuda())
    good = ids.masked_fill(bad, -1).cuda()
    finite = quantize_blocks(torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)).cuda())
    parts = [row_gather(finite[0][a:b], finite[1][a:b], good, first_row=a, rows_total=1000) for a, b in ((0, 333), (333, 334), (334, 1000))]
    assert torch.equal(parts[0] + parts[1] + parts[2], row_gather(*finite, good))


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["device", "pinned"])
def test_gpu_graph_replays_with_other_ids(home):
    payload, scale = table(3000, 256, "split")
    there = on_device(payload, scale, "record", home)
    ids = torch.zeros(700, dtype=torch.int64, device="cuda")
    out = torch.zeros(700, 256, dtype=torch.bfloat16, device="cuda")
    violations = torch.zeros(2, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        row_gather(*there, ids, bounds="warn", violations=violations, out=out)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row_gather(*there, ids, bounds="warn", violations=violations, out=out)
        own = row_gather(*there, ids, bounds="ignore")
        with pytest.raises(RuntimeError, match="bounds='warn'"):
            row_gather(*there, ids)
    for seed in range(3):
        asked = torch.randint(-1, 3000, (700,), generator=torch.Generator().manual_seed(seed))
        asked[seed] = 3000 + seed
        ids.copy_(asked)
        graph.replay()
        assert same(out.cpu(), row_gather(payload, scale, asked, bounds="ignore", dtype=torch.bfloat16))
        assert same(own.cpu(), row_gather(payload, scale, asked, bounds="ignore"))
    assert violations.tolist() == [3, 3000]


@pytest.mark.gpu
def test_gpu_a_table_beyond_32_bit_offsets():
    rows = 1 << 26
    record = torch.randint(0, 256, (rows, 264), dtype=torch.uint8, device="cuda")
    ids = torch.randint(0, rows, (5000,), generator=torch.Generator().manual_seed(0))
    ids[:4] = torch.tensor([0, rows - 1, (1 << 31) // 264 + 1, (1 << 32) // 264 + 1])
    out = row_gather(record[:, :256].view(torch.float8_e4m3fn), record[:, 256:], ids.cuda()).cpu()
    read = torch.stack([record[i] for i in ids.tolist()]).cpu()
    assert same(out, dequantize_blocks(read[:, :256].contiguous().view(torch.float8_e4m3fn), read[:, 256:].contiguous()))
    del record
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_gpu_more_values_than_32_bits_count():
    payload, scale = quantize_blocks(torch.randn(97, 256, generator=torch.Generator().manual_seed(0)).cuda())
    ids = torch.arange(9_000_000, device="cuda").remainder(97)
    out = row_gather(payload, scale, ids, dtype=torch.bfloat16)
    rows = row_gather(payload, scale, torch.arange(97, device="cuda"), dtype=torch.bfloat16)
    for start in (0, 8_388_600, 8_999_000):
        assert torch.equal(out[start : start + 1000], rows[ids[start : start + 1000]])
    del out
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["device", "pinned"])
def test_gpu_compiles_in_one_graph(home):
    payload, scale = table(600, 256, "split")
    there = on_device(payload, scale, "record", home)
    step = torch.compile(lambda ids: row_gather(*there, ids + 1, bounds="ignore", dtype=torch.bfloat16) * 2, fullgraph=True)
    ids = torch.randint(-2, 599, (333,), generator=torch.Generator().manual_seed(0))
    assert same(step(ids.cuda()).cpu(), row_gather(payload, scale, ids + 1, bounds="ignore", dtype=torch.bfloat16) * 2)
