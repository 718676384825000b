"""One file of facts and several who change it: nothing that another wrote is lost, and whoever waits is told for whom."""

import threading
import time

import pytest

from tiny_engram.cli import main
from tiny_engram.errors import TinyEngramError
from tiny_engram.llm import Fact, Facts
from tiny_engram.llm.fact_file import read_facts, remove_facts
from tiny_engram.llm.fact_lock import locked

QUILL = Fact("the founder of Quill", "author", "The founder of Quill")
PELL = Fact("the river of Pell", "work", "The river of Pell")


@pytest.fixture
def file(taught_file, tmp_path):
    path = tmp_path / "facts.safetensors"
    path.write_bytes(taught_file.read_bytes())
    return path


@pytest.fixture
def another(make_llama, tokenizer):
    """Who opens the same file in a model of its own."""
    opened = []

    def open_file(path):
        opened.append(Facts.open(make_llama(), path, tokenizer))
        return opened[-1]

    yield open_file
    for facts in opened:
        facts.detach()


def triggers(path):
    return [each.fact.trigger for each, _, _ in read_facts(path)[1]]


def test_two_who_add_lose_nothing(facts, another, file, how, make_llama, tokenizer):
    other, there = another(file), triggers(file)
    for who, fact in ((facts, QUILL), (other, PELL)):
        assert who.add(fact, how=how).added == (fact,)
        assert who.save_beside(file, [fact]) == ([], len(read_facts(file)[1]))
    assert triggers(file) == [*there, QUILL.trigger, PELL.trigger]
    whole = another(file)
    for who, fact in ((facts, QUILL), (other, PELL)):
        assert whole.ask(fact.prompt) == who.ask(fact.prompt) and whole.ask(fact.prompt).startswith(fact.answer)


def test_the_first_of_two_facts_for_one_trigger_stays(facts, another, file, how):
    other = another(file)
    facts.add(QUILL, how=how)
    facts.save_beside(file, [QUILL])
    late = Fact(QUILL.trigger, "work", QUILL.prompt)
    assert other.add(late, how=how).added == (late,)
    before = file.read_bytes()
    assert other.save_beside(file, [late]) == ([late], 5) and file.read_bytes() == before


def test_what_another_removed_stays_away(facts, file, how, zorbia):
    assert remove_facts(file, ["THE capital of Zorbia", zorbia.trigger], None) == (1, 3)
    facts.add(QUILL, how=how)
    facts.save_beside(file, [QUILL])
    assert zorbia.trigger not in triggers(file) and len(triggers(file)) == 4
    facts.edit(zorbia.trigger, answer="text", how=how)
    with pytest.raises(TinyEngramError, match="another process changed 'the capital of Zorbia' meanwhile"):
        facts.save_beside(file, [facts.get(zorbia.trigger).fact], instead_of=zorbia)


def test_a_file_of_another_shape_is_not_written(make_llama, tokenizer, file, how):
    from tiny_engram.llm import FactsConfig, attach

    facts = attach(make_llama(), FactsConfig(layers=(0,), rho=4.0), tokenizer)
    facts.add(QUILL, how=how)
    before = file.read_bytes()
    with pytest.raises(TinyEngramError, match=r"its facts have layers \(1, 3\), this configuration has \(0,\)"):
        facts.save_beside(file, [each.fact for each in facts])
    assert file.read_bytes() == before


def test_one_at_a_time(tmp_path):
    path, inside, most = tmp_path / "facts.safetensors", [0], [0]

    def change():
        for _ in range(40):
            with locked(path):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.0005)
                inside[0] -= 1

    threads = [threading.Thread(target=change) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and list(tmp_path.iterdir()) == []


def test_a_lock_that_is_held_long_is_told(file, monkeypatch, caplog, capsys):
    monkeypatch.setattr("tiny_engram.llm.fact_lock._SAID_AFTER", 0.05)
    monkeypatch.setattr("tiny_engram.llm.fact_file.locked", lambda path: locked(path, seconds=0.2))
    with locked(file):
        assert main(["facts", "remove", str(file), "the capital of Zorbia"]) == 2
    assert "another process has been writing it for 0 s, expected it to take less; stop it, or try again" in capsys.readouterr().err
    assert "another process writes it; waiting" in caplog.text and len(triggers(file)) == 4
    assert main(["facts", "remove", str(file), "the capital of Zorbia"]) == 0


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    told = pytest.raises(TinyEngramError, match=r"cannot be locked \(No such file or directory\); expected a folder that can be written to")
    with told, locked(tmp_path / "none" / "facts.safetensors"):
        pass
