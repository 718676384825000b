"""How every tab looks, at three widths, light and dark, and what the keyboard reaches.

What the console says is seen to by the fixture `window`.
"""

import pytest
from playwright.sync_api import expect

TABS = ("Register", "Teach", "Create", "Library")
# All that the keyboard should reach in the tab that is open: radio buttons are one stop a group, as browsers have it.
CONTROLS = """() => {
  document.querySelectorAll('[data-stop]').forEach((e) => delete e.dataset.stop);
  const found = [...document.querySelectorAll(
    'a[href], button, input, textarea, select, summary, [tabindex="0"]')].filter((e) =>
      e.checkVisibility({checkOpacity: true, checkVisibilityCSS: true}) && !e.disabled && e.tabIndex >= 0
      && !(e.type === 'radio' && !e.checked) && !(e.type === 'file'));
  found.forEach((e, k) => e.dataset.stop = k);
  return found.map((e) => e.outerHTML.slice(0, 160));
}"""
FOCUSED = """() => {
  const e = document.activeElement, style = getComputedStyle(e), block = getComputedStyle(e.closest('label, .block') || e);
  const ring = (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0) || style.boxShadow !== 'none'
    || block.boxShadow !== 'none' || (block.outlineStyle !== 'none' && parseFloat(block.outlineWidth) > 0);
  return [e.dataset.stop ?? null, ring, e.outerHTML.slice(0, 160)];
}"""


def fill(seen, tab: str) -> None:
    """Bring a tab into the state in which it shows most."""
    if tab == "Register":
        seen.type("register-trigger", "zorblax")
        expect(seen.find("#register-report")).to_contain_text("<img src=x")
    elif tab == "Create":
        seen.type("create-prompt", "a zorblax and a quibble on a beach")
        seen.find("#create-history .tc-thumb").first.click()
        expect(seen.find("#create-stage figure").first).to_be_visible()
    elif tab == "Library":
        seen.find("#library-cards .tl-open").first.click()
        expect(seen.find("#library-title .tl-title")).to_be_visible()


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_every_tab_looks_right(furnished, window, looks, width):
    seen = window(furnished, width=width, dark=width == 390)
    assert seen.page.evaluate("document.body.classList.contains('dark')") == (width == 390), "as the system has it"
    wrong = {}
    for tab in TABS:
        seen.tab(tab)
        fill(seen, tab)
        for scheme in ("dark", "light"):
            seen.paint(scheme)
            seen.keep(f"{tab.lower()}-{width}-{scheme}")
            wrong[f"{tab}, {scheme}"] = looks(seen)
    assert not any(wrong.values()), "\n".join(f"{tab}: {line}" for tab, lines in wrong.items() for line in lines)


def test_the_keyboard_reaches_every_control_and_shows_where_it_is(furnished, window):
    seen = window(furnished)
    for tab in TABS:
        seen.tab(tab)
        fill(seen, tab)
        wanted = dict(enumerate(seen.page.evaluate(CONTROLS)))
        seen.page.evaluate("() => { document.activeElement.blur(); window.scrollTo(0, 0); }")
        bare = set()
        for _ in range(len(wanted) + 20):
            seen.page.keyboard.press("Tab")
            stop, ring, html = seen.page.evaluate(FOCUSED)
            if stop is not None:
                wanted.pop(int(stop), None)
                if not ring:
                    bare.add(html)
            if not wanted:
                break
        assert not wanted, "\n".join([tab, *wanted.values()])
        assert not bare, "\n".join([tab, *bare])


def test_a_reload_comes_back_to_the_tab_that_was_open(furnished, window):
    seen = window(furnished)
    seen.expect_tab("Register")
    for name in ("Library", "Teach"):
        seen.tab(name)
        expect(seen.page).to_have_url(f"{seen.url}/#{name.lower()}")
        seen.reload()
        seen.expect_tab(name)


def test_what_asks_before_it_takes_away_begins_at_the_way_back(furnished, window):
    seen = window(furnished)
    seen.tab("Teach")
    seen.find("#teach-tray button[data-action=clear]").click()
    expect(seen.find("dialog button")).to_have_text(["Go back", "Take all out"])
    expect(seen.find("dialog button").first).to_be_focused()
    seen.page.keyboard.press("Enter")
    expect(seen.find("dialog")).to_have_count(0)
    expect(seen.find("#teach-tray .tt-card")).not_to_have_count(0)


def test_tables_and_thumbnails_are_seen_whole(furnished, window):
    seen = window(furnished)
    seen.tab("Library")
    seen.find("#library-cards .tl-open").last.click()
    expect(seen.find("#library-details .te-table").first).to_be_visible()
    cut = """() => [...document.querySelectorAll('#library-details .te-scroll, #library-side')]
      .filter((e) => e.scrollWidth > e.clientWidth + 1).length"""
    assert seen.page.evaluate(cut) == 0
    fit = "() => [...document.querySelectorAll('.tl-picture img')].map((e) => getComputedStyle(e).objectFit)"
    assert set(seen.page.evaluate(fit)) == {"contain"}


def test_jobs_stay_in_sight_beside_a_long_form(furnished, window):
    seen = window(furnished, width=1024, height=420)  # so that they are higher than the window
    seen.tab("Teach")
    expect(seen.find("#teach-jobs .tt-job")).not_to_have_count(0)
    side, jobs = (seen.find(css).bounding_box() for css in ("#teach-side", "#teach-jobs"))
    assert side is not None and jobs is not None
    assert jobs["x"] == side["x"] and jobs["y"] > side["y"] and jobs["x"] + jobs["width"] <= side["x"] + side["width"]
