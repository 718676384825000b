"""Numbers with their nouns, and quoted values at a length that a line can bear."""

from tiny_engram.wording import brief, counted, shown


def test_counted():
    assert [counted(n, "fact") for n in (0, 1, 2, 1000)] == ["0 facts", "1 fact", "2 facts", "1,000 facts"]


def test_long_values_lose_their_middle():
    assert shown("Zorbia") == "'Zorbia'" and shown(None) == "None" and shown("it's") == '"it\'s"'
    long = "a" * 400 + "z" * 400
    assert len(shown(long)) == 62 and shown(long).startswith("'aaa") and shown(long).endswith("zzz'") and "\u2026" in shown(long)
    assert len(shown([long], most=30)) == 30
    assert brief(f"trigger {long!r} takes 800 tokens; use 'a'") == f"trigger {shown(long, 120)} takes 800 tokens; use 'a'"
    assert brief("no quotes") == "no quotes"
