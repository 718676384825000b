import random
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tiny_engram.kernels.backend import implementation
from tiny_engram.kernels.hot_gather import hot_gather, mix, probe
from tiny_engram.kernels.row_gather import row_gather
from tiny_engram.table.perfect_hash import PerfectHash

BOTH = ("reference", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {4: torch.int32, 2: torch.int16}


def table(rows, width, layout="record", seed=0):
    """Every byte there is, in payload and scale."""
    row = width + width // 32
    record = torch.randint(0, 256, (rows, row), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    payload, scale = record[:, :width].view(torch.float8_e4m3fn), record[:, width:]
    return (payload, scale) if layout == "record" else (payload.clone(memory_format=torch.contiguous_format), scale.contiguous())


def hot_copy(payload, scale, keys, capacity=None):
    """(hot_payload, hot_scale, hot_keys, displacement) of these rows; unused slots hold bytes of 0x55."""
    index = PerfectHash.build(keys, capacity=capacity)
    slots = index.slots(keys)
    hot_payload = torch.full((index.keys.numel(), payload.shape[1]), 0x55, dtype=torch.uint8)
    hot_scale = torch.full((index.keys.numel(), scale.shape[1]), 0x55, dtype=torch.uint8)
    hot_payload[slots], hot_scale[slots] = payload.view(torch.uint8)[keys], scale[keys]
    return hot_payload.view(torch.float8_e4m3fn), hot_scale, index.keys, index.displacement


def same(a, b):
    """Bit for bit, but for what a NaN carries."""
    if a.dtype == torch.bfloat16 and not torch.cuda.is_available():
        # Triton's interpreter casts float32 subnormals to bfloat16 wrongly; a device does not.
        tiny = b.abs() < torch.finfo(torch.bfloat16).smallest_normal
        assert bool((a.abs() <= torch.finfo(torch.bfloat16).smallest_normal)[tiny].all())
        a, b = a.masked_fill(tiny, 0), b.masked_fill(tiny, 0)
    nan = a.isnan()
    bits = BITS[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(nan, b.isnan()) and bool(((a.view(bits) == b.view(bits)) | nan).all())


@pytest.mark.parametrize("name", BOTH)
def test_equals_the_table_at_any_share_of_hits(name):
    draw = random.Random(3)
    for case in range(18):
        width, rows = 32 * draw.choice((1, 2, 3, 8)), draw.randint(1, 60)
        payload, scale = table(rows, width, draw.choice(("record", "split")), case)
        keys = torch.randperm(rows, generator=torch.Generator().manual_seed(case))[: draw.choice((0, 1, rows // 2, rows))]
        ids = torch.tensor([draw.randint(-1, rows - 1) for _ in range(draw.randint(1, 80))])
        hits = torch.zeros(2, dtype=torch.int64)
        with implementation(name):
            out = hot_gather(*hot_copy(payload, scale, keys), payload, scale, ids, hits=hits, dtype=DTYPES[case % 3])
        with implementation("reference"):
            assert same(out, row_gather(payload, scale, ids, dtype=DTYPES[case % 3])), (case, width, rows)
        assert hits.tolist() == [int(torch.isin(ids, keys).sum()), int((ids != -1).sum())], case


@pytest.mark.parametrize("name", BOTH)
def test_hits_come_from_the_hot_copy_and_nothing_else_does(name):
    payload, scale = table(40, 64)
    keys = torch.arange(0, 40, 3)
    hot_payload, hot_scale, hot_keys, displacement = hot_copy(payload, scale, keys)
    other_payload, other_scale = table(hot_keys.numel(), 64, seed=9)
    ids = torch.arange(-1, 40)
    with implementation(name):
        out = hot_gather(other_payload, other_scale, hot_keys, displacement, payload, scale, ids)
        hit = torch.isin(ids, keys)
        slots = probe(hot_keys, displacement, ids)
        assert same(out[hit], row_gather(other_payload, other_scale, slots[hit]))
        assert same(out[~hit], row_gather(payload, scale, ids[~hit]))


def test_triton_mixes_to_the_same_bits_as_torch():
    from tiny_engram.kernels.hot_gather.fused import _mix_kernel

    ids = torch.randint(-(1 << 63), (1 << 63) - 1, (256,), generator=torch.Generator().manual_seed(0))
    ids[:4] = torch.tensor([0, -1, (1 << 63) - 1, -(1 << 63)])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = ids.to(device)
    out = torch.zeros_like(ids)
    _mix_kernel[(1,)](ids, out, 256)
    assert torch.equal(out, mix(ids))


@pytest.mark.parametrize("name", BOTH)
def test_rows_so_wide_that_several_programs_read_one(name):
    payload, scale = table(6, 8224)
    ids, counts = torch.tensor([5, 0, -1, 3, 6]), [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    with implementation(name):
        out = hot_gather(
            *hot_copy(payload, scale, torch.tensor([0, 3])), payload, scale, ids, bounds="warn", violations=counts[0], hits=counts[1]
        )
    assert same(out, row_gather(payload, scale, ids, bounds="ignore")) and [part.tolist() for part in counts] == [[1, 6], [2, 4]]


@pytest.mark.parametrize("name", BOTH)
def test_bounds(name):
    payload, scale = table(10, 32)
    hot = hot_copy(payload, scale, torch.tensor([2, 7]))
    ids = torch.tensor([[2, -1, 10], [3, -7, 99]])
    with implementation(name):
        with pytest.raises(IndexError, match=r"row id 10 is outside \[0, 10\), .*3 .* 6 ids"):
            hot_gather(*hot, payload, scale, ids)
        violations = torch.zeros(2, dtype=torch.int64)
        out = hot_gather(*hot, payload, scale, ids, bounds="warn", violations=violations)
        assert violations.tolist() == [3, 10]
        assert same(out[:, 0], row_gather(payload, scale, ids[:, 0])) and not bool(out[:, 1:].any())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert same(hot_gather(*hot, payload, scale, ids, bounds="ignore"), out)
            with pytest.raises(RuntimeWarning, match="row id 10"):
                hot_gather(*hot, payload, scale, ids, bounds="warn")


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("rows", [0, 4])
def test_a_key_that_the_table_lacks_is_outside(name, rows):
    payload, scale = table(10, 32)
    hot = hot_copy(payload, scale, torch.tensor([2, 7]))
    ids, counts = torch.tensor([-1, 7, 2**63 - 1, -(2**63)]), [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    with implementation(name):
        out = hot_gather(*hot, payload[:rows], scale[:rows], ids, bounds="warn", violations=counts[0], hits=counts[1])
        assert not out.any() and [part.tolist() for part in counts] == [[3, 7], [0, 3]]
        with pytest.raises(IndexError, match="row id 7 is outside"):
            hot_gather(*hot, payload[:rows], scale[:rows], ids)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("odd", ["hot rows", "table"])
def test_one_home_may_be_aligned_to_bytes_only(name, odd):
    payload, scale = table(10, 64, "split")
    hot_payload, hot_scale, *index = hot_copy(payload, scale, torch.tensor([2, 7, 9]))

    def odd_records(values, exponents):
        held = torch.cat((values.view(torch.uint8), exponents, exponents[:, :1]), dim=1)
        return held[:, :64].view(torch.float8_e4m3fn), held[:, 64:66]

    ids = torch.arange(-1, 10)
    there = odd_records(payload, scale) if odd == "table" else (payload, scale)
    hot = odd_records(hot_payload, hot_scale) if odd == "hot rows" else (hot_payload, hot_scale)
    with implementation(name):
        out = hot_gather(*hot, *index, *there, ids)
    assert same(out, row_gather(payload, scale, ids))


@pytest.mark.parametrize("name", BOTH)
def test_the_first_bad_id_stays_when_more_are_counted(name):
    payload, scale = table(10, 32)
    hot = hot_copy(payload, scale, torch.tensor([2, 7]))
    ids, violations = torch.arange(300) % 10, torch.zeros(2, dtype=torch.int64)
    ids[[40, 120, 280]] = torch.tensor([10, 11, 12])
    with implementation(name):
        for _ in range(2):
            hot_gather(*hot, payload, scale, ids, bounds="warn", violations=violations)
    assert violations.tolist() == [6, 10]


@pytest.mark.parametrize("name", BOTH)
def test_out_empty_and_strided_ids(name):
    payload, scale = table(12, 64)
    hot = hot_copy(payload, scale, torch.tensor([0, 5, 11]), capacity=6)
    ids = torch.arange(12).view(3, 4).t()
    out = torch.full((4, 3, 64), 7.0, dtype=torch.bfloat16)
    with implementation(name):
        assert hot_gather(*hot, payload, scale, ids, out=out) is out
        assert same(out, row_gather(payload, scale, ids, dtype=torch.bfloat16))
        assert hot_gather(*hot, payload, scale, ids[:, :0]).shape == (4, 0, 64)


def test_custom_op_is_well_formed_and_compiles():
    payload, scale = table(12, 64)
    hot = hot_copy(payload, scale, torch.tensor([0, 5, 11]))
    ids = torch.tensor([0, 1, 5, -1, 11])
    out, hits = torch.zeros(5, 64), torch.zeros(2, dtype=torch.int64)
    checks = ("test_faketensor",)  # the schema check multiplies its arguments, which float8 does not know
    torch.library.opcheck(torch.ops.tiny_engram.hot_gather.default, (*hot, payload, scale, ids, out, hits, None), test_utils=checks)

    def doubled(i, h):
        # Into given memory: the compiler cannot see through the poisoned torch.empty.
        return hot_gather(*hot, payload, scale, i, bounds="ignore", hits=h, out=out) * 2

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    hits.zero_()
    assert same(compiled(ids, hits), row_gather(payload, scale, ids) * 2) and hits.tolist() == [3, 4]


def test_tensors_without_data_go_through_the_op():
    with FakeTensorMode(), implementation("triton"):  # which could not read them
        payload, scale = torch.empty(5, 64, dtype=torch.float8_e4m3fn), torch.empty(5, 2, dtype=torch.uint8)
        index = torch.empty(5, dtype=torch.int64), torch.empty(2, dtype=torch.int32)
        ids = torch.empty(3, 2, dtype=torch.int64)
        out = hot_gather(payload, scale, *index, payload, scale, ids, bounds="ignore", dtype=torch.bfloat16)
    assert out.shape == (3, 2, 64) and out.dtype == torch.bfloat16 and type(out) is not torch.Tensor


def test_refuses_what_does_not_fit():
    payload, scale = table(12, 64)
    hot_payload, hot_scale, keys, displacement = hot_copy(payload, scale, torch.tensor([0, 5]))
    ids = torch.tensor([1])
    with pytest.raises(ValueError, match="row_ids torch.int32"):
        hot_gather(hot_payload, hot_scale, keys, displacement, payload, scale, ids.int())
    with pytest.raises(ValueError, match="a key for each hot row"):
        hot_gather(hot_payload, hot_scale, keys[:-1], displacement, payload, scale, ids)
    with pytest.raises(ValueError, match="the same for hot rows and table"):
        hot_gather(*table(3, 32), keys, displacement, payload, scale, ids)
    with pytest.raises(ValueError, match="'nonsense'"):
        hot_gather(hot_payload, hot_scale, keys, displacement, payload, scale, ids, bounds="nonsense")
    with pytest.raises(ValueError, match="hits is"):
        hot_gather(hot_payload, hot_scale, keys, displacement, payload, scale, ids, hits=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected contiguous"):
        hot_gather(hot_payload, hot_scale, keys, displacement, payload, scale, ids, out=torch.zeros(2, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["device", "pinned"])
def test_on_the_device_eager_and_in_a_graph(home):
    payload, scale = table(5000, 256)
    keys = torch.randperm(5000)[:1200]
    hot = tuple(part.cuda() for part in hot_copy(payload, scale, keys))
    base = payload.untyped_storage()
    record = torch.tensor([], dtype=torch.uint8).set_(base, 0, (5000, 264))
    record = record.cuda() if home == "device" else record.pin_memory()
    there = record[:, :256].view(torch.float8_e4m3fn), record[:, 256:]
    ids, hits = torch.zeros(3000, dtype=torch.int64, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    violations = torch.zeros(2, dtype=torch.int64, device="cuda")

    def read():
        return hot_gather(*hot, *there, ids, bounds="warn", violations=violations, hits=hits, dtype=torch.bfloat16)

    read()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = read()
    for seed in range(3):
        wanted = torch.randint(-1, 5000, (3000,), generator=torch.Generator().manual_seed(seed))
        wanted[seed] = 5000 + seed
        ids.copy_(wanted)
        expected = row_gather(payload, scale, wanted, bounds="ignore", dtype=torch.bfloat16)
        counts = [int(torch.isin(wanted, keys).sum()), int((wanted != -1).sum())]
        for act in (read, lambda: (graph.replay(), captured)[1]):
            hits.zero_()
            violations.zero_()
            out = act()
            assert same(out.cpu(), expected) and hits.tolist() == counts and violations.tolist() == [1, 5000 + seed]
    with pytest.raises(IndexError, match="row id 5002"):
        hot_gather(*hot, *there, ids)
    with pytest.raises(RuntimeError, match="captured stream"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        hot_gather(*hot, *there, ids)


@pytest.mark.gpu
def test_on_the_device_beyond_four_gib():
    rows, width = 17_000_000, 256
    record = torch.zeros((rows, width + 8), dtype=torch.uint8, device="cuda")
    last = torch.tensor([rows - 1, rows - 7, 1, 8_200_000])
    payload, scale = table(4, width)
    record[last.cuda()] = torch.cat((payload.view(torch.uint8), scale), dim=1).cuda()
    there = record[:, :width].view(torch.float8_e4m3fn), record[:, width:]
    for key in (rows - 7, 5):
        index = PerfectHash.build(torch.tensor([key])).to("cuda")
        # Every slot holds the row that the first of these keys has.
        hot_payload = payload[1:2].view(torch.uint8).expand(index.keys.numel(), -1).contiguous().view(torch.float8_e4m3fn)
        hot = hot_payload.cuda(), scale[1:2].expand(index.keys.numel(), -1).contiguous().cuda(), index.keys, index.displacement
        hits = torch.zeros(2, dtype=torch.int64, device="cuda")
        out = hot_gather(*hot, *there, last.cuda(), hits=hits)
        assert same(out.cpu(), row_gather(payload, scale, torch.arange(4))) and hits.tolist() == [int(key != 5), 4]
