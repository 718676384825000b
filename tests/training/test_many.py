"""Many concepts in one run: each is taught what it would be taught alone, and leaves what it would leave alone."""

import logging
import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.training.conftest import disc
from tiny_engram.checkpoints import list_checkpoints, load_checkpoint
from tiny_engram.concept import Concept
from tiny_engram.errors import FaultsError, TinyEngramError
from tiny_engram.library import ConceptLibrary
from tiny_engram.training import loop, rows, train, train_concepts
from tiny_engram.training.many import Outcome, add_to_library
from tiny_engram.training.summary import summary_table, write_summary

WORDS = ("zqx", "vortex cat", "bolo")


def teach(pipe, configs, **options):
    return train_concepts(pipe, configs, progress=False, **options)


@pytest.fixture
def concepts(config, tmp_path):
    """Configs of concepts of one shape, with pictures, seeds and lengths of trigger of their own, below a folder; changed by keywords."""
    for k, word in enumerate(WORDS):
        (tmp_path / word).mkdir()
        for n in range(2):
            disc(10 * k + n).save(tmp_path / word / f"{n}.png")

    def make(below: str, count: int = len(WORDS), **changes):
        return [
            config(
                **{"train_data_dir": str(tmp_path / word), "trigger": word, "seed": k, "output_dir": str(tmp_path / below / word)} | changes
            )
            for k, word in enumerate(WORDS[:count])
        ]

    return make


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def last(config) -> tuple[dict[str, torch.Tensor], dict]:
    return load_checkpoint(list_checkpoints(Path(config.output_dir))[-1][1])


RICH = {"mounts": ("input", "span", "value"), "share": "block", "bands": 2, "attention_rank": 1, "feedforward_rank": 1}
RICH |= {"gradient_accumulation_steps": 2, "caption_dropout": 0.3, "lr_scheduler": "cosine", "validation_loss_steps": 2}
RICH |= {"validation_loss_samples": 2}
# Adam makes steps of rounding where gradients are all but zero; with this it does not.
CALM = {"adam_epsilon": 1e-3}


@pytest.mark.parametrize("options", [{}, RICH], ids=["span", "everywhere"])
def test_concepts_taught_together_are_those_taught_alone(pipe, concepts, monkeypatch, options):
    monkeypatch.setattr(rows, "fake_quantize", lambda x: x)  # through it a rounded sum may become a step
    together, alone = concepts("together", **options, **CALM), concepts("alone", **options, **CALM)
    outcomes = teach(pipe, together)
    for one, other, outcome in zip(together, alone, outcomes, strict=True):
        single = train(pipe, other, progress=False)
        assert outcome.error is None and outcome.result is not None
        assert outcome.result.losses == pytest.approx(single.losses, rel=1e-5)
        (mine, state), (theirs, wanted) = last(one), last(other)
        assert set(mine) == set(theirs) and state["norms"] == pytest.approx(wanted["norms"], rel=1e-3)
        assert [loss for _, loss in state["measured"]] == pytest.approx([loss for _, loss in wanted["measured"]], rel=1e-5)
        for name in mine:
            largest = max(float(theirs[name].abs().max()), 1e-6)
            torch.testing.assert_close(mine[name] / largest, theirs[name] / largest, rtol=1e-3, atol=1e-4)
        assert tree(Path(one.output_dir)) == tree(Path(other.output_dir))


def test_with_the_quantiser_the_curves_lie_together(pipe, recipe, tmp_path, concepts):
    """By the default recipe, collages included."""
    changes = {"max_train_steps": 6, "train_batch_size": 8, "companions": ("ball",)}
    both = [
        [
            recipe(**changes, train_data_dir=c.train_data_dir, trigger=c.trigger, seed=c.seed, output_dir=c.output_dir)
            for c in concepts(below, 2)
        ]
        for below in ("together", "alone")
    ]
    for outcome, alone in zip(teach(pipe, both[0]), both[1], strict=True):
        assert outcome.result is not None
        assert outcome.result.losses == pytest.approx(train(pipe, alone, progress=False).losses, rel=0.01)


def test_one_concept_is_a_single_run_bit_for_bit(pipe, concepts):
    (one,), (other,) = concepts("together", 1, **RICH), concepts("alone", 1, **RICH)
    (outcome,), single = teach(pipe, [one]), train(pipe, other, progress=False)
    assert outcome.result is not None and outcome.result.losses == single.losses
    (mine, state), (theirs, wanted) = last(one), last(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs) and state["norms"] == wanted["norms"]
    assert (Path(one.output_dir) / "metrics.jsonl").read_bytes() == (Path(other.output_dir) / "metrics.jsonl").read_bytes()


def test_a_concept_leaves_the_batch_at_its_own_end(pipe, concepts, monkeypatch):
    sizes, real = [], loop.denoising_loss
    monkeypatch.setattr(loop, "denoising_loss", lambda *args: sizes.append(args[3].concepts) or real(*args))
    configs = [config for k, config in enumerate(concepts("out", max_train_steps=4))]
    short = concepts("out", max_train_steps=2)[1]
    outcomes = teach(pipe, [configs[0], short, configs[2]])
    assert sizes == [3, 3, 2, 2] and [o.result.steps for o in outcomes if o.result] == [4, 2, 4]


def test_groups_are_said_and_what_cannot_share_a_batch_is_alone(pipe, concepts, caplog, monkeypatch):
    sizes, real = [], loop.denoising_loss
    monkeypatch.setattr(loop, "denoising_loss", lambda *args: sizes.append(args[3].concepts) or real(*args))
    configs = concepts("out", max_train_steps=1)
    buckets = concepts("out", max_train_steps=1, buckets=True)[1]
    with caplog.at_level(logging.INFO):
        teach(pipe, [configs[0], buckets, configs[2]])
    told = [record.message for record in caplog.records if record.message.startswith("group")]
    assert sizes == [2, 1] and told == [
        "group 1 of 2: 2 concepts, zqx, bolo",
        "group 2 of 2: 1 concept, vortex cat, alone: buckets: its steps have sizes of their own",
    ]


# -- going on -----------------------------------------------------------------------------------------------------------------


def stop_at(name: str, last_step: int):
    def on_step(concept: str, step: int, loss: float) -> None:
        if (concept, step) == (name, last_step):
            raise KeyboardInterrupt

    return on_step


def test_a_stop_leaves_checkpoints_that_either_kind_of_run_goes_on_from(pipe, concepts):
    whole = teach(pipe, concepts("whole", max_train_steps=5))
    configs = concepts("out", max_train_steps=5)
    with pytest.raises(KeyboardInterrupt):
        teach(pipe, configs, on_step=stop_at("vortex cat", 3))
    assert [[step for step, _ in list_checkpoints(Path(config.output_dir))] for config in configs] == [[3], [3], [3]]
    # one goes on alone, to its end; another for a step, so that they stand at 5, 4 and 3
    alone = concepts("out", max_train_steps=5, resume_from_checkpoint="latest")
    train(pipe, alone[0], progress=False)
    with pytest.raises(KeyboardInterrupt):
        train(pipe, alone[1], progress=False, on_step=lambda step, loss: stop_at("", 4)("", step, loss))
    outcomes = teach(pipe, configs)
    assert outcomes[0].result is None and [o.result.steps for o in outcomes[1:] if o.result] == [5, 5]
    for config, before in zip(configs, whole, strict=True):
        assert before.result is not None
        assert last(config)[1]["losses"] == pytest.approx(before.result.losses, rel=0.01)


def test_the_same_command_skips_what_is_there_and_refuses_other_settings(pipe, concepts, caplog):
    configs = concepts("out", max_train_steps=2)
    teach(pipe, configs)
    before = {path: path.read_bytes() for config in configs for path in Path(config.output_dir).rglob("*") if path.is_file()}
    with caplog.at_level(logging.INFO):
        assert all(outcome.result is None and outcome.error is None for outcome in teach(pipe, configs))
    assert "there already, taught with these settings: 3 concepts, zqx, vortex cat, bolo" in caplog.messages
    changed = concepts("out", max_train_steps=2, learning_rate=1e-2)
    with pytest.raises(FaultsError, match=r"concept 2 \('vortex cat'\): .*finished with another learning_rate; choose another") as caught:
        teach(pipe, [configs[0], *changed[1:]])
    assert len(caught.value.faults) == 2 and all(path.read_bytes() == blob for path, blob in before.items())
    again = teach(pipe, [configs[0], *changed[1:]], again=True)
    assert [outcome.result is not None for outcome in again] == [False, True, True]
    assert Concept.load(again[1].path).recipe["learning_rate"] == 1e-2
    longer = teach(pipe, concepts("out", 1, max_train_steps=3))
    assert longer[0].result is not None and longer[0].result.losses[:2] == pytest.approx(last(configs[0])[1]["losses"][:2])


def test_one_that_is_begun_again_and_stopped_is_not_taken_for_finished(pipe, concepts):
    (config,), (changed,) = concepts("out", 1, max_train_steps=2), concepts("out", 1, max_train_steps=2, learning_rate=1e-2)
    teach(pipe, [config])

    def killed(*_):
        raise RuntimeError("as if killed: nothing is written on the way out")

    with pytest.raises(RuntimeError):
        teach(pipe, [changed], again=True, on_step=killed)
    assert list_checkpoints(Path(config.output_dir)) == [] and config.concept_path.exists()
    (outcome,) = teach(pipe, [changed])
    assert outcome.result is not None and Concept.load(outcome.path).recipe["learning_rate"] == 1e-2


def test_memory_that_runs_out_halves_the_group(pipe, concepts, caplog, monkeypatch):
    whole = teach(pipe, concepts("whole"))
    sizes, real = [], loop.denoising_loss

    def small(*args):
        sizes.append(args[3].concepts)
        if args[3].concepts > 2 and len(sizes) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args)

    monkeypatch.setattr(loop, "denoising_loss", small)
    outcomes = teach(pipe, concepts("out"))
    assert sizes == [3, 3, 3, 2, 2, 1, 1] and "out of memory with 3 concepts at once: going on with 2" in caplog.messages
    for outcome, before in zip(outcomes, whole, strict=True):
        assert outcome.result is not None and before.result is not None
        assert outcome.result.losses == pytest.approx(before.result.losses, rel=0.01)

    monkeypatch.setattr(loop, "denoising_loss", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")))
    (outcome,) = teach(pipe, concepts("none", 1))
    assert outcome.error == "out of memory; lower train_batch_size or resolution"


def test_a_concept_that_fails_does_not_end_the_others(pipe, concepts, tmp_path, monkeypatch):
    """One whose caption is cut off before the trigger, which no scan can see, and one whose loss is no number any more."""
    (tmp_path / WORDS[0] / "0.txt").write_text(" and so on" * 100 + " {trigger}")
    real, steps = loop.denoising_loss, []

    def wild(*args):
        steps.append(args[3].concepts)
        factor = torch.tensor([math.nan, 1.0]) if len(steps) == 2 else torch.ones(args[3].concepts)
        return real(*args) * factor

    with monkeypatch.context() as patch:
        patch.setattr(loop, "denoising_loss", wild)
        outcomes = teach(pipe, concepts("out"))
    assert steps == [2, 2, 1, 1] and [outcome.error is None for outcome in outcomes] == [False, False, True]
    assert outcomes[0].error is not None and "does not fire in it" in outcomes[0].error
    assert outcomes[1].error == "the loss of step 2 is nan, expected a number; lower learning_rate"
    single = train(pipe, concepts("alone")[2], progress=False)
    assert outcomes[2].result is not None and outcomes[2].result.losses == pytest.approx(single.losses, rel=0.01)
    assert not outcomes[1].path.exists()
    table = summary_table(outcomes).splitlines()
    assert len(table) == 4 and [line.split()[1] for line in table[1:3]] == ["failed", "cat"] and table[3].endswith("concept.safetensors")


# -- before anything is begun --------------------------------------------------------------------------------------------------


def test_all_that_is_wrong_is_said_at_once_and_nothing_is_written(pipe, adapter, tiny, concepts, config, tmp_path):
    adapter.load_concept(tiny.concept(adapter, "taken word"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "0.png").write_bytes(b"no picture")
    out = concepts("out")
    other = config(trigger="mip", output_dir=str(tmp_path / "mine"))
    train(pipe, other, progress=False)
    given = [
        out[0],
        config(trigger="Zqx", output_dir=str(tmp_path / "a")),
        config(trigger="big zqx", output_dir=out[0].output_dir),
        config(trigger="one", train_data_dir=str(tmp_path / "empty"), output_dir=str(tmp_path / "b")),
        config(trigger="two", train_data_dir=str(tmp_path / "broken"), output_dir=str(tmp_path / "c")),
        config(trigger="three", train_data_dir=str(tmp_path / "none"), output_dir=str(tmp_path / "d")),
        config(trigger="four", name="zqx", output_dir=str(tmp_path / "e")),
        config(trigger="five", output_dir=str(tmp_path / "mine")),
        config(trigger="six", output_dir=str(tmp_path / "g"), validation_loss_steps=1, validation_data_dir=str(tmp_path / "empty")),
    ]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FaultsError) as caught:
        teach(pipe, given)
    said = "\n".join(caught.value.faults)
    for words in (
        "concept 2 ('Zqx'): its trigger 'Zqx' is that of concept 1 ('zqx'), 'zqx'; give it another",
        "concept 3 ('big zqx'): its trigger 'big zqx' holds that of concept 1 ('zqx'), 'zqx'; give it another",
        "concept 3 ('big zqx'): its output_dir",
        "concept 4 ('one'): ",
        "concept 5 ('two'): ",
        "concept 6 ('three'): ",
        "concept 7 ('zqx'): its name 'zqx' is that of concept 1 ('zqx'); give it another",
        "concept 8 ('five'): ",
        "concept 9 ('six'): ",
    ):
        assert words in said, (words, said)
    with pytest.raises(TinyEngramError, match=r"concept 1 \('taken word'\)"):
        teach(pipe, [config(trigger="taken word", output_dir=str(tmp_path / "f"))])
    with pytest.raises(TinyEngramError, match="concepts_together is 0, expected a whole number from 1"):
        teach(pipe, out, concepts_together=0)
    assert sorted(tmp_path.rglob("*")) == before


# -- all of them -----------------------------------------------------------------------------------------------------------------


def test_a_page_and_a_library_of_all(pipe, concepts, tmp_path):
    outcomes = teach(pipe, concepts("out", max_train_steps=1))
    page = write_summary(tmp_path / "out", outcomes).read_text()
    assert page.count("data:image/webp") == 3 and 'href="vortex cat/report.html"' in page
    path = tmp_path / "all.engrams"
    assert add_to_library(path, outcomes) == 3
    before = path.read_bytes()
    assert add_to_library(path, outcomes) == 3 and path.read_bytes() == before
    shutil.rmtree(outcomes[0].config.output_dir)
    new = teach(pipe, concepts("out", max_train_steps=2)[:1])
    add_to_library(path, new)
    with ConceptLibrary.open(path) as library:
        assert sorted(entry.name for entry in library) == sorted(WORDS) and library.get("zqx").recipe["step"] == 2
    with pytest.raises(TinyEngramError, match="is the concept of 'zqx' there, not of 'bolo'; choose another library"):
        add_to_library(path, [Outcome("zqx", outcomes[2].config)])
