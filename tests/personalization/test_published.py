"""The published rules: which parts of a trigger own rows, where they fire, and what is added there."""

import pytest
import torch

from benchmarks.personalization.methods.published import ASSUMPTIONS, AfterTinyEngram, AfterVEngram, SubRuns, sub_runs
from benchmarks.personalization.methods.spans import hooked

TEXTS = ("a 3d {0} on a red background", "{0}", "a rugo and a bin, {0} rugo-bin")


@pytest.fixture
def make(base, run):
    def build(kind, *names: str):
        made = kind(base, [run("after", name, seed=i) for i, name in enumerate(names or ("disc",))])
        with torch.no_grad():
            for i, p in enumerate(made.parameters()):
                p += torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.3
        return made

    return build


def prompts(base, names, texts=TEXTS):
    words = [(base.subject(name).trigger,) for name in names for _ in texts]
    return base.rows(list(texts) * len(names), words, torch.arange(len(names)).repeat_interleave(len(texts))[:, None])


def brute_force(ids, entries):
    """How often each entry covers each position, by comparing lists."""
    counts = torch.zeros(len(entries), len(ids))
    for e, entry in enumerate(entries):
        if entry in entries[:e]:
            continue
        for at in range(len(ids) - len(entry) + 1):
            if tuple(ids[at : at + len(entry)]) == entry:
                counts[e, at : at + len(entry)] += 1
    return counts


def test_as_many_rows_as_published():
    assert len(sub_runs(range(7), 7)) == 21
    # 21 rows and one gate of SD1.5's width: the published 16,896 values
    assert (len(sub_runs(range(7), 7)) + 1) * 768 == 16_896
    assert sub_runs([5, 6, 7, 8], 7) == [(5, 6), (6, 7), (7, 8), (5, 6, 7), (6, 7, 8), (5, 6, 7, 8)]
    longest = sub_runs(range(9), 7)
    assert len(longest) == 8 + 7 + 6 + 5 + 4 + 3 + 1 and longest[-1] == tuple(range(9))
    assert [len(e) for e in sub_runs(range(6), 4)] == [2] * 5 + [3] * 4 + [4] * 3 + [6]
    assert sub_runs([1, 2, 3, 4], 4) == sub_runs([1, 2, 3, 4], 7)


@pytest.mark.parametrize("trigger", [[10, 11, 12, 13], [10, 10, 10], [10, 11, 10, 11, 10, 11]], ids=str)
@pytest.mark.parametrize("longest", [4, 7])
def test_matches_are_those_of_a_plain_search(trigger, longest):
    from benchmarks.personalization.methods.method import Rows

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(9, 14, (8, 30), generator=generator)
    ids[0, 26:] = torch.tensor([trigger[0], trigger[1], trigger[0], trigger[1]])  # a match on the last token
    run = torch.tensor([[0], [0], [-1], [0], [0], [0], [0], [0]])
    table = SubRuns.of([trigger], longest, ids.device)
    counts = table.counts(Rows(ids, torch.zeros(8, 30, 1), run, ()))
    for row in range(8):
        expected = brute_force(ids[row].tolist(), sub_runs(trigger, longest)) * (row != 2)
        assert torch.equal(counts[row, 0], expected)
    assert counts.sum() > 0
    assert table.distinct == (len(set(sub_runs(trigger, longest))),)


@torch.no_grad()
def test_tiny_engram_adds_the_sum_of_its_matches(base, make):
    method = make(AfterTinyEngram, "disc", "spot")
    rows = prompts(base, ("disc", "spot"))
    states = method.states(base, rows)
    for row in range(len(rows.ids)):
        run = row // len(TEXTS)
        trigger = base.word_ids(base.subject(method.runs[run].subject).trigger)
        counts = brute_force(rows.ids[row].tolist(), sub_runs(trigger, 7))
        expected = rows.states[row] + counts.T @ (method.rows[run] * method.gate[run].tanh())
        torch.testing.assert_close(states[row], expected)
        silent = counts.sum(0) == 0
        assert torch.equal(states[row][silent], rows.states[row][silent])
    # parts of the trigger fire elsewhere in the prompt too, which is the rule's own way
    ((_, _, start, length),) = [span for span in rows.spans if span[0] == 2]
    elsewhere = (states[2] != rows.states[2]).any(-1).nonzero().flatten().tolist()
    assert set(elsewhere) > set(range(start, start + length))


def test_tiny_engram_learns_at_two_rates(base, make):
    method = make(AfterTinyEngram)
    assert method.rate_factors == {"gate": 0.1} and method.weight_decay == 0
    method.states(base, prompts(base, ("disc",))).square().sum().backward()
    assert all((p.grad != 0).all() for p in method.parameters())
    assert method.payload(0) == (6 + 1) * 128 * 2


def test_rows_start_as_published_and_by_their_own_seed(base, run):
    for kind in (AfterTinyEngram, AfterVEngram):
        stack = kind(base, [run("after", "disc", seed=0), run("after", "spot", seed=1)])
        alone = kind(base, [run("after", "spot", seed=1)])
        assert torch.equal(stack.rows[1], alone.rows[0]) and not torch.equal(stack.rows[0], stack.rows[1])
        assert (stack.gate == 0.05).all()
        assert abs(stack.rows.std().item() - 0.02) < 0.001


@torch.no_grad()
def test_without_parts_of_the_trigger_nothing_moves(base, make):
    for kind in (AfterTinyEngram, AfterVEngram):
        method = make(kind)
        rows = base.rows(["a red ball", "a flat fox"], [(), ()], torch.tensor([[0], [-1]]))
        states = method.states(base, rows)
        assert torch.equal(states, rows.states)
        latents, at = torch.ones(2, *base.latent_shape), torch.tensor([500, 500])
        with method.attached(base, rows, states):
            drawn = base.denoiser(latents, at, states)[0]
        assert torch.equal(drawn, base.denoiser(latents, at, states)[0])
    assert not any(m._forward_pre_hooks for m in base.denoiser.modules())


def reading(base, method, rows):
    """States, and what the key and value projections of each cross-attention read."""
    states, seen = method.states(base, rows), []
    hooks = [
        (projection, lambda _m, args, _k, _out: seen.append(args[0]), False)
        for _, module in base.cross_attentions
        for projection in (module.to_k, module.to_v)
    ]
    with hooked(hooks), method.attached(base, rows, states):
        out = base.denoiser(torch.ones(len(rows.ids), *base.latent_shape), torch.full((len(rows.ids),), 500), states)[0]
    return states, seen, out


@torch.no_grad()
def test_v_engram_adds_shares_of_the_mean_norm(base, make):
    method = make(AfterVEngram, "disc", "spot")
    rows = prompts(base, ("spot",))
    rows = type(rows)(rows.ids, rows.states, torch.ones_like(rows.run), rows.spans)
    states, seen, _ = reading(base, method, rows)
    entries = sub_runs(base.word_ids(base.subject("spot").trigger), 4)
    norms = states.norm(dim=-1).mean(1)
    assert len(seen) == 14
    for mount in range(7):
        e, gate = method.rows[1, 1 + mount], method.gate[1, 1 + mount].tanh()
        shares = e / (e.norm(dim=-1, keepdim=True) + 1e-6) * gate[:, None]
        for row in range(len(rows.ids)):
            expected = states[row] + norms[row] * (brute_force(rows.ids[row].tolist(), entries).T @ shares)
            torch.testing.assert_close(seen[2 * mount][row], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(seen[2 * mount], seen[2 * mount + 1])


@torch.no_grad()
def test_v_engram_inside_the_encoder_moves_what_follows(base, make):
    method = make(AfterVEngram)
    rows = prompts(base, ("disc",), TEXTS[:1])
    ((_, _, start, _),) = rows.spans
    moved = (method.states(base, rows) - rows.states).abs().amax(-1)[0]
    assert moved[:start].max() < 1e-5 < 1e-2 < moved[start:].min()
    layers = base.text_encoder.encoder.layers
    read = []
    with hooked([(layers[2], lambda _m, args, _k, _o: read.append(args[0]), False)]):
        method.states(base, rows)
        base.encode(rows.ids)
    delta = (read[0] - read[1])[0]
    entries = sub_runs(base.word_ids("rugo-bin"), 4)
    e = method.rows[0, 0]
    shares = e / (e.norm(dim=-1, keepdim=True) + 1e-6) * method.gate[0, 0].tanh()[:, None]
    expected = read[1][0].norm(dim=-1).mean() * (brute_force(rows.ids[0].tolist(), entries).T @ shares)
    torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-4)


def test_v_engram_gradients_reach_every_value(base, make):
    method = make(AfterVEngram)
    reading(base, method, prompts(base, ("disc",), TEXTS[:1]))[2].square().sum().backward()
    assert all((p.grad != 0).all() and p.grad.isfinite().all() for p in method.parameters())
    assert method.payload(0) == 8 * 6 * (128 + 1) * 2


@torch.no_grad()
def test_two_subjects_each_add_their_own(base, make):
    method = make(AfterTinyEngram, "disc", "spot")
    words = tuple(base.subject(name).trigger for name in ("spot", "disc"))
    rows = base.rows(["a {0} next to a {1}"], [words], torch.tensor([[1, 0]]))
    change = method.states(base, rows) - rows.states
    alone = [method.states(base, type(rows)(rows.ids, rows.states, torch.tensor([[run]]), ())) - rows.states for run in (0, 1)]
    assert all(one.abs().sum() > 0 for one in alone)
    torch.testing.assert_close(change, alone[0] + alone[1])


def test_triggers_of_several_lengths_share_a_stack(base):
    from benchmarks.personalization.methods.method import Rows

    table, ids = SubRuns.of([[5, 6], [5, 6, 7]], 7, base.device), torch.tensor([[1, 5, 6, 7, 2]])
    assert table.distinct == table.entries == (1, 3)
    for run, trigger in enumerate(([5, 6], [5, 6, 7])):
        counts = table.counts(Rows(ids, torch.zeros(1, 5, 1), torch.tensor([[run]]), ()))[0, 0]
        expected = brute_force(ids[0].tolist(), sub_runs(trigger, 7))
        assert torch.equal(counts[: len(expected)], expected) and not counts[len(expected) :].any()


def test_triggers_of_one_token_are_refused(base):
    with pytest.raises(ValueError, match="2 or more"):
        SubRuns.of([[5]], 7, base.device)


def test_assumptions_are_told():
    assert set(ASSUMPTIONS) == {"after-tiny-engram", "after-v-engram"}
    assert all(line.endswith(".") for lines in ASSUMPTIONS.values() for line in lines)
