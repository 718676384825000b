"""Views are well-formed, say what they are given, and turn no text into markup."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tiny_engram.registration import NearMiss
from tiny_engram.studio import html as views
from tiny_engram.studio.highlighting import Explained, ExplainRow
from tiny_engram.studio.html_parts import button, clock, date_in_words, empty, file_size, loss_plot, notice, picture, shown_token
from tiny_engram.studio.registering import Chip, Collision, Place, Report, RoleTokens

HOSTILE = "<img src=x onerror=alert(1)>\"' onfocus='alert(2)' </p></div><script>alert(3)</script>&lt;b&gt;"
SHEET = Path(views.__file__).parent / "studio.css"
VOID = {"img", "line", "polyline", "wbr"}
_TAGS = """
article button dd details div dl dt figcaption figure h3 h4 img li line mark p polyline progress section small span strong summary svg
table tbody td th thead tr ul wbr
"""
_ATTRIBUTES = """
alt class data-action data-head data-id data-insert loading max points preserveaspectratio role scope src tabindex title type value
vector-effect viewbox x1 x2 y1 y2
"""
TAGS, ATTRIBUTES = set(_TAGS.split()), set(_ATTRIBUTES.split())


class Reader(HTMLParser):
    """Checks nesting and what is allowed at all; collects the text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        for name, value in attrs:
            assert name in ATTRIBUTES or name.startswith("aria-"), name
            self.attributes.append((tag, name, value))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def views_of(text: str) -> dict[str, str]:
    """Every view, with this text wherever a user's or a stranger's can stand."""
    report = Report(
        text,
        (text,),
        None,
        (RoleTokens("clip_l", ((text, (Chip(text, 3), Chip("b</w>", 4))),), 75),),
        (Place(f"a {text} b", 2, 2 + len(text), True, ""), Place(f"{text} b", 0, len(text), False, text)),
        (NearMiss(text, False, text), NearMiss(text, True, text)),
        (Collision("ab", text, text, True, True, text), Collision("cd", text, text, False, False, text)),
        (text,),
    )
    rows = (ExplainRow("a", text, text, True, (1, 3), 0.5, text), ExplainRow("b", text, text, False, None, None, text))
    mount = {"mount": text, "rho": 2.5, "rows": 1, "bytes": 1, "size": [0.1], "gain": [1.0], "bias": [0.0]}
    told = {"name": text, "trigger": text, "aliases": [text], "untrained": [text], "base": text, "steps": None, "table_bytes": 5}
    told |= {"file_bytes": 10, "created": text, "recipe": {text: {text: text}}}
    told["roles"] = {text: {"mounts": [mount], "maps": [{"map": text, "rank": 1, "channels": 2, "bytes": 3, "size": 0.0}]}}
    picture_settings = {"prompt": text, "negative_prompt": text, "seed": text, "steps": text, "base": text, "width": text, "height": text}
    return {
        "report": views.report(report),
        "problem": views.report(Report(text, (), text)),
        "highlighted": views.highlighted([(text, None, False, ""), (text, "a", True, text), (text, "b", False, text)], {"a": text}),
        "explained": views.explained([Explained("clip_l", False, text, (text, "a</w>"), frozenset({0}), rows, 2)]),
        "inspected": views.inspected(told),
        "refused": views.pictures_refused([(text, text)]),
        "settings": views.settings(picture_settings | {"concepts": [{"trigger": text, "strength": 0.5}]}),
        "notice": notice("error", text),
        "button": button("delete", text, text, about=text),
        "empty": empty(text, text),
    }


@pytest.mark.parametrize("name", list(views_of("x")))
def test_no_text_becomes_markup(name):
    reader = Reader(views_of(HOSTILE)[name])
    assert HOSTILE[:60] in reader.text
    assert not [a for a in reader.attributes if a[1] == "src"], "a source that is no picture of ours is left out"
    plain = Reader(views_of("plain")[name])
    assert [(tag, name) for tag, name, _ in plain.attributes] == [(tag, name) for tag, name, _ in reader.attributes]


@pytest.mark.parametrize("name", list(views_of("x")))
@pytest.mark.parametrize("text", ["\u202etxt.exe", "a\0b", "\ud800", "x" * 5_000, "\U0001f986 \u4e2d\u6587 e\u0301"])
def test_odd_texts(name, text):
    shown = views_of(text)[name]
    Reader(shown)
    shown.encode()
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00]", shown)


def test_empty_states_tell_the_way_out():
    for shown, words in (
        (views.report(Report("", ())), "Type a trigger"),
        (views.highlighted([], {}), "Nothing typed yet"),
        (views.highlighted([("a duck", None, False, "")], {}), "No trigger in this prompt"),
        (views.explained([]), "Nothing to explain"),
    ):
        assert words in Reader(shown).text
    assert views.pictures_refused([]) == ""


def test_report_says_what_stands_in_the_way():
    def place(fires):
        return Place("a zed", 2, 5, fires, "" if fires else "fuses")

    roles = (RoleTokens("clip_l", (("zed", (Chip("zed</w>", 1),)),), 75),)
    assert "A good trigger" in views.report(Report("zed", (), None, roles, (place(True),)))
    assert "works, with warnings" in views.report(Report("zed", (), None, roles, (place(True),), (), (), ("rare",)))
    assert "not fire everywhere" in views.report(Report("zed", (), None, roles, (place(True), place(False))))
    taken = views.report(Report("zed", (), None, roles, (place(True),), (), (Collision("a", "duck", "zed", False, True, "has it"),)))
    assert "Taken" in taken and "concept &#x27;duck&#x27; (zed) has it" in taken


def test_pictures_come_from_here_alone():
    for good in ("data:image/png;base64,AAAA", "data:image/webp;base64,AA==", "/gradio_api/file=/tmp/x/step_000050.png"):
        assert good in picture(good, "")
    for bad in (
        None,
        "",
        "javascript:alert(1)",
        "http://example.org/x.png",
        "//example.org/x.png",
        "data:image/svg+xml;base64,AAAA",
        "/a b",
        '/"',
    ):
        assert picture(bad, "") == ""
    assert picture("data:text/html;base64,AAAA", "") == ""


@pytest.mark.parametrize(
    "losses",
    [
        [(1, 0.5)],
        [(1, 0.5), (2, 0.5)],
        [(1, math.nan), (2, 0.4), (3, math.inf)],
        [(k, 1e-9 * k) for k in range(1, 4)],
        [(k, 0.3) for k in range(1, 5_001)],
        [(400, -1.0), (500, 1e6)],
    ],
)
def test_plots_stay_inside(losses):
    shown = loss_plot(losses, 300)
    reader = Reader(shown)
    assert "nan" not in shown and "inf" not in shown and len(shown) < 20_000
    for _, name, value in reader.attributes:
        if name == "points":
            assert value is not None
            for point in value.split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= 600.1 and 0 <= y <= 160


def test_plot_without_a_number():
    for losses in ([], [(1, math.nan)]):
        assert "No loss yet" in loss_plot(losses, 300)


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("zed</w>", ("zed", False)),
        ("qu", ("qu", False)),
        ("caf\u00c3\u00a9</w>", ("caf\u00e9", False)),
        ("\u2581word", ("word", False)),
        ("\u0120word", ("word", False)),
        ("\u2581", ("\u2423", False)),
        ("<|startoftext|>", ("start", True)),
        ("<|endoftext|>", ("end", True)),
        ("</s>", ("end", True)),
        ("<pad>", ("pad", True)),
        ("<</w>", ("<", False)),
        ("></w>", (">", False)),
    ],
)
def test_tokens_as_people_read_them(token, shown):
    assert shown_token(token) == shown


def test_small_words():
    assert [file_size(n) for n in (0, 999, 15_480, 2_300_000)] == ["0 B", "999 B", "15.5 kB", "2.3 MB"]
    assert [clock(s) for s in (-1, 0, 12, 61, 3_600, 5_400, math.inf)] == ["5 s", "5 s", "15 s", "2 min", "1 h 0 min", "1 h 30 min", "days"]
    assert date_in_words("2026-11-03T10:00:00Z") == "3 Nov 2026" and date_in_words("soon") == "soon"


def test_style_sheet():
    """It is part of the package, speaks of `.te` alone, and every class that views use has its rule there, or needs none."""
    text = SHEET.read_text(encoding="utf-8")
    bare = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    assert bare.count("{") == bare.count("}") and "url(" not in bare and "@import" not in bare
    selectors = [
        each.strip() for block in re.findall(r"([^{}]+)\{", bare) for each in block.split(",") if not block.strip().startswith("@")
    ]
    assert selectors and all(each.startswith((".te", ".dark .te")) for each in selectors)
    used = {kind for shown in views_of("x").values() for names in re.findall(r'class="([^"]*)"', shown) for kind in names.split()}
    known = set(re.findall(r"\.(te[\w-]*)", bare))
    assert used - known <= {"te-pause", "te-info"}, used - known
    light, dark = (dict(re.findall(r"(--te-[\w-]+): (#\w{6})", block)) for block in re.findall(r"\{([^}]*--te-text[^}]*)\}", bare)[:2])
    assert light.keys() == dark.keys() and len(light) == 14


def luminance(colour: str) -> float:
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast():
    """WCAG AA, 4.5 to 1, of every text on every ground that it stands on, in both themes."""
    blocks = re.findall(r"\{([^}]*--te-text[^}]*)\}", SHEET.read_text(encoding="utf-8"))[:2]
    for block in blocks:
        colour = dict(re.findall(r"--te-([\w-]+): (#\w{6})", block))
        pairs = [("text", "panel"), ("text", "sunken"), ("soft", "panel"), ("soft", "sunken"), ("accent", "panel")]
        pairs += [(mood, f"{mood}-ground") for mood in ("good", "warning", "bad", "info")]
        for one, other in pairs:
            bright, dim = sorted((luminance(colour[one]), luminance(colour[other])), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (one, other)


def test_files_that_were_left_out_for_one_reason_are_one_line():
    told = views.pictures_refused([(f"{k}.png", "more than 64 pictures") for k in range(9)] + [("a.txt", "not a picture")])
    assert told.count("<li>") == 2 and "0.png, 1.png, 2.png, 3.png and 5 more" in told and "10 files left out" in told
