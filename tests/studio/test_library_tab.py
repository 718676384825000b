"""The Library tab: cards of everything that is kept, looking inside, using, respelling, sharing, deleting with a way back."""

import dataclasses

import gradio as gr
import pytest

from tiny_engram.concept import Concept
from tiny_engram.studio.ui.library_tab import build_library, cards_value
from tiny_engram.studio.ui.picking import picked

NASTY = "<img src=x onerror=alert(1)>\"'&${alert(2)}{{3}}"
# where they stand in what handlers of the listing return
CARDS, UNDO, TITLE, DETAILS, EDITING, USE, EXPORT, NAME, ALIAS, RESPELLING, OLD, CHOSEN = range(12)


def event(act: str, id: str = "") -> gr.EventData:
    return gr.EventData(None, {"act": act, "id": id})


@pytest.fixture
def tab(whole, built):
    """(the tab, its handlers by name)"""
    return built(build_library, whole)


@pytest.fixture
def duck(whole, concept_of):
    return whole.library.add(concept_of("zed-quack", aliases=("zedquack",), seed=1))


def on_card(tab, act, id="", *, search="", chosen=None, deleted=()):
    return tab[1]["on_card"](search, chosen, list(deleted), event(act, id))


# -- cards


def test_an_empty_library_says_what_to_do(whole):
    assert "Your library is empty" in cards_value(whole) and "Nothing here is called" in cards_value(whole, "octopus")


def test_cards_say_what_is_kept_and_offer_what_can_be_done(whole, duck):
    draft = whole.library.save_draft("tako-belu", ("tako belu",), "octopus")
    shown = cards_value(whole)
    assert f'data-act="use" data-id="{duck}"' in shown and f'data-act="inspect" data-id="{duck}"' in shown and "also zedquack" in shown
    assert f'data-act="teach" data-id="{draft}"' in shown and "not taught yet" in shown and "emoji-sd" in shown and " kB" in shown
    whole.engine.load(duck)
    assert f'data-act="away" data-id="{duck}"' in cards_value(whole) and "In use" in cards_value(whole)


def test_search_while_typing(whole, duck, tab, concept_of):
    other = whole.library.add(concept_of("tako-belu", seed=2))
    assert other not in tab[1]["on_search"]("quack", None) and duck in tab[1]["on_search"]("QUACK", None)
    assert "tl-chosen" in tab[1]["on_search"]("", duck)


def test_a_damaged_file_is_a_card_that_can_be_deleted(whole, duck, tab):
    broken = "deadbeefdeadbeef"
    (whole.workspace.concepts / f"{broken}.safetensors").write_bytes(b"no concept" * 9)
    shown = cards_value(whole)
    assert "Damaged" in shown and f'data-act="use" data-id="{broken}"' not in shown and str(whole.workspace.root) not in shown
    with pytest.raises(gr.Error):
        on_card(tab, "inspect", broken)
    assert broken not in on_card(tab, "delete", broken)[CARDS] and duck in cards_value(whole)


def test_concepts_of_another_base_are_shown_and_not_offered(whole, duck, tab):
    foreign = whole.library.get(duck).with_details(name="foreign")
    id = whole.library.add(dataclasses.replace(foreign, base="another-base"))
    assert "Another base" in cards_value(whole) and f'data-act="use" data-id="{id}"' not in cards_value(whole)
    assert not on_card(tab, "inspect", id)[USE].interactive


def test_texts_of_users_are_escaped(whole, duck, tab):
    whole.library.rename(duck, NASTY)
    whole.library.save_draft(NASTY)
    listed = on_card(tab, "inspect", duck, search=NASTY)
    deleted = on_card(tab, "delete", duck)
    for made in (cards_value(whole), cards_value(whole, NASTY + "!"), listed[TITLE], listed[DETAILS], deleted[UNDO].value):
        assert "<img src=x" not in made and "&lt;img src=x" in made


@pytest.mark.parametrize("sent", [None, [], {"act": 3}, {"act": "x" * 999, "id": ["../.."]}])
def test_a_browser_may_send_anything(tab, sent):
    act, id = picked(gr.EventData(None, sent))
    assert len(act) <= 40 and len(id) <= 80
    tab[1]["on_card"]("", None, [], gr.EventData(None, sent))  # an act that is none changes nothing
    for act in ("inspect", "use", "delete"):
        with pytest.raises(gr.Error, match="reload the page"):
            on_card(tab, act, "../../etc/passwd")


# -- inside


def test_inside_are_rows_gates_recipe_and_the_file(whole, duck, tab):
    listed = on_card(tab, "inspect", duck)
    assert listed[CHOSEN] == duck and "zed-quack" in listed[TITLE] and "Rows and gates at the text encoder (clip_l)" in listed[DETAILS]
    assert listed[EDITING].visible and listed[NAME] == "zed-quack" and listed[OLD].value == "zedquack" and listed[USE].value == "Use"
    path = listed[EXPORT].value["path"] if isinstance(listed[EXPORT].value, dict) else listed[EXPORT].value
    assert Concept.load(path).trigger == "zed-quack" and str(path).endswith("zed-quack.safetensors")


def test_use_puts_it_on_the_shelf_and_away_again(whole, duck, tab):
    *listed, _, used, _ = on_card(tab, "use", duck)
    assert used[0] == duck and [each.id for each in whole.engine.loaded()] == [duck] and "In use" in listed[CARDS]
    assert on_card(tab, "use", duck)[-2] == gr.skip()  # another page was quicker
    *listed, used = tab[1]["on_use"]("", duck, [])
    assert used == gr.skip() and whole.engine.loaded() == () and listed[USE].value == "Use"
    on_card(tab, "away", duck)
    assert whole.engine.loaded() == ()


def test_a_draft_is_handed_on_to_be_taught(whole, tab):
    draft = whole.library.save_draft("tako-belu")
    assert on_card(tab, "teach", draft)[-1] == draft


def test_name_and_aliases_change(whole, duck, tab):
    library, engine = whole.library, whole.engine
    engine.load(duck)
    assert "Goose" in tab[1]["on_rename"]("", duck, [], "Goose")[TITLE] and library.get(duck).name == "Goose"
    listed = tab[1]["on_add"]("", duck, [], "zed quack")
    assert library.get(duck).aliases == ("zedquack", "zed quack") and "zed quack" in listed[DETAILS] and listed[ALIAS] == ""
    tab[1]["on_respell"]("", duck, [], "zed quack", "zed duck")
    assert library.get(duck).aliases == ("zedquack", "zed duck")
    listed = tab[1]["on_remove"]("", duck, [], "zedquack")
    assert library.get(duck).aliases == ("zed duck",) and listed[OLD].value == "zed duck" and engine.loaded()[0].aliases == ("zed duck",)
    for handler, texts, says in (
        ("on_add", [""], "empty"),
        ("on_rename", ["  "], "expected 1 to 200"),
        ("on_respell", ["zed duck", "zed-quack"], "already"),
        ("on_remove", ["zedquack"], "no alias"),
    ):
        with pytest.raises(gr.Error, match=says):
            tab[1][handler]("", duck, [], *texts)
    with pytest.raises(gr.Error, match="no concept is chosen"):
        tab[1]["on_rename"]("", None, [], "Goose")


# -- in and out


def test_export_delete_import(whole, duck, tab):
    path = on_card(tab, "inspect", duck)[EXPORT].value
    path = path["path"] if isinstance(path, dict) else path
    with pytest.raises(gr.Error, match="in the library already"):
        tab[1]["on_import"](path, "", [])
    tab[1]["on_delete"]("", duck, [])
    assert whole.library.cards() == []
    listed = tab[1]["on_import"](path, "", [])
    (card,) = whole.library.cards()
    assert listed[CHOSEN] == card.id and card.trigger == "zed-quack" and card.id in listed[CARDS]


def test_what_is_no_concept_is_not_imported(whole, tab, tmp_path, picture_bytes):
    for name, blob in (("empty.safetensors", b""), ("pickle.safetensors", b"\x80\x04N."), ("picture.safetensors", picture_bytes())):
        path = tmp_path / name
        path.write_bytes(blob)
        with pytest.raises(gr.Error, match=name) as caught:
            tab[1]["on_import"](str(path), "", [])
        assert str(tmp_path) not in str(caught.value) and "\n" not in str(caught.value)
    assert whole.library.cards() == [] and tab[1]["on_import"](None, "", [])[0] == gr.skip()


def test_delete_has_a_way_back_for_each(whole, duck, tab, concept_of):
    draft = whole.library.save_draft("tako-belu")
    whole.engine.load(duck)
    *listed, deleted, _, _ = on_card(tab, "delete", draft)
    *listed, deleted = tab[1]["on_delete"]("", duck, deleted)
    assert whole.library.cards() == [] and whole.engine.loaded() == () and listed[CHOSEN] is None
    assert listed[UNDO].visible and "Deleted <b>zed-quack</b>" in listed[UNDO].value
    *listed, deleted = tab[1]["on_undo"]("", None, deleted)
    assert duck in listed[CARDS] and "tako-belu" in listed[UNDO].value
    *listed, deleted = tab[1]["on_undo"]("", None, deleted)
    assert draft in listed[CARDS] and not listed[UNDO].visible and deleted == []
    assert tab[1]["on_undo"]("", None, [])[-1] == []


def test_refresh_shows_what_other_pages_did(whole, duck, tab):
    fn, outputs, inputs = tab[0].refresh()
    assert len(fn("", duck, [])) == len(outputs) == 12 and len(inputs) == 3
    whole.library.delete(duck)
    assert fn("", duck, [])[CHOSEN] is None


@pytest.fixture
def said(monkeypatch):
    """What notices and warnings told, in their order."""
    told = []
    for kind in ("Info", "Warning"):
        monkeypatch.setattr(gr, kind, lambda text, title="", kind=kind: told.append(f"{kind}: {text}"))
    return told


def test_an_alias_that_is_taken_is_refused(whole, duck, tab, concept_of):
    other = whole.library.add(concept_of("uni-blorp", seed=2))
    whole.library.save_draft("mivo-tark")
    for handler, texts in (("on_add", ["uni-blorp"]), ("on_add", ["Mivo-Tark"]), ("on_respell", ["zedquack", "uni-blorp"])):
        with pytest.raises(gr.Error, match=f"alias '{texts[-1]}' is taken: the (concept|draft) '{texts[-1].lower()}' has the tokens"):
            tab[1][handler]("", duck, [], *texts)
    with pytest.raises(gr.Error, match="alias has 130 characters"):
        tab[1]["on_add"]("", duck, [], "x" * 130)
    assert whole.library.get(duck).aliases == ("zedquack",)
    whole.library.delete(other)
    tab[1]["on_add"]("", duck, [], "uni-blorp")
    assert whole.library.get(duck).aliases == ("zedquack", "uni-blorp")


def test_what_speaks_against_an_alias_is_told(whole, duck, tab, said, concept_of):
    whole.library.add(concept_of("tako hat", seed=2))
    tab[1]["on_add"]("", duck, [], "cat")
    assert any(line.startswith("Warning") and "ordinary words" in line for line in said)
    tab[1]["on_respell"]("", duck, [], "cat", "tako")
    assert any(line.startswith("Warning") and "tako hat" in line and "that one fires" in line for line in said)


def test_a_concept_that_was_in_use_is_so_again_after_undo(whole, duck, tab, said, concept_of):
    whole.engine.load(duck)
    *_, deleted = tab[1]["on_delete"]("", duck, [])
    *listed, deleted = tab[1]["on_undo"]("", None, deleted)
    assert [each.id for each in whole.engine.loaded()] == [duck] and "In use" in listed[CARDS] and "in use again" in said[-1]
    *_, deleted = tab[1]["on_delete"]("", duck, deleted)
    whole.engine.load(whole.library.add(concept_of("zed-quack", name="twin", seed=3)))
    *listed, deleted = tab[1]["on_undo"]("", None, deleted)
    assert duck in listed[CARDS] and [each.name for each in whole.engine.loaded()] == ["twin"]
    assert "taken by 'twin'" in said[-2].replace("&#x27;", "'") and said[-1].endswith("zed-quack is back")


def test_a_name_that_is_taken_is_told(whole, duck, tab, said, concept_of):
    whole.library.add(concept_of("tako-belu", seed=2))
    tab[1]["on_rename"]("", duck, [], "tako-belu")
    assert whole.library.get(duck).name == "tako-belu-2" and "another concept is called tako-belu already" in said[-1]


def test_only_use_stands_out(whole, duck, tab):
    assert on_card(tab, "inspect", duck)[USE].variant == "primary"
    whole.engine.load(duck)
    assert on_card(tab, "inspect", duck)[USE].variant == "secondary"
