"""The Library tab: every concept and draft as a card; look inside, use, respell, share, delete with a way back. Imports gradio."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr

from tiny_engram.studio import html
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.studio import Studio
from tiny_engram.studio.ui import library_html as shown
from tiny_engram.studio.ui.handling import handled, notice, private, quick, warn
from tiny_engram.studio.ui.picking import PICK, picked, tell_turn

__all__ = ["LibraryTab", "build_library"]

MOST_SEARCH = 200
MOST_WARNINGS = 3
# What undo takes, the name, and whether it was in use.
Deleted = tuple[str, str, bool]


@dataclass(frozen=True)
class LibraryTab:
    """What other tabs may use.

    used: changes when a concept was put on the shelf. taught: changes to a draft's id when that is to be taught.
    """

    used: gr.State
    taught: gr.State
    _refresh: tuple[Callable[..., Any], list[Any], list[Any]] = field(repr=False)

    def refresh(self) -> tuple[Callable[..., Any], list[Any], list[Any]]:
        """(a function, its outputs, its inputs): the cards as the server has them, and what is inside the chosen one."""
        return self._refresh


def cards_value(studio: Studio, search: str = "", chosen: str | None = None) -> str:
    """The cards for the page."""
    found = studio.library.cards((search or "")[:MOST_SEARCH])
    used = [each.id for each in studio.engine.loaded()]
    return shown.cards_html(found, search=search or "", chosen=chosen, used=used, base=studio.engine.base)


def build_library(studio: Studio) -> LibraryTab:
    """Build the tab inside the gr.Tab that is open."""
    with gr.Row(elem_classes="tl-bar"):
        search = gr.Textbox(
            label="Search",
            placeholder="Name, trigger, alias or base",
            max_length=MOST_SEARCH,
            elem_id="library-search",
            scale=4,
            min_width=200,
        )
        take_in = gr.UploadButton("Import a concept …", type="filepath", elem_id="library-import", scale=1, min_width=180)
    undo = gr.HTML("", js_on_load=PICK, elem_id="library-undo", visible=False)
    with gr.Row(elem_classes="tc-columns"):
        with gr.Column(scale=7, min_width=300):
            cards = gr.HTML(cards_value(studio), js_on_load=PICK, elem_id="library-cards")
        with gr.Column(scale=5, min_width=300, elem_id="library-side"):
            title = gr.HTML(shown.title_html(None), js_on_load=None, elem_id="library-title")
            with gr.Column(visible=False) as editing:
                with gr.Row(elem_classes="tc-buttons"):
                    use = gr.Button("Use", variant="primary", size="sm", elem_id="library-use", min_width=90)
                    export = gr.DownloadButton("Export the file", size="sm", elem_id="library-export", min_width=120)
                    delete = gr.Button("Delete", variant="stop", size="sm", elem_id="library-delete", min_width=90)
                with gr.Accordion("Name and aliases", open=False, elem_id="library-names"):
                    with gr.Row(elem_classes="tl-edit"):
                        name = gr.Textbox(label="Name", max_length=200, elem_id="library-name", scale=3, min_width=160)
                        rename = gr.Button("Rename", size="sm", elem_id="library-rename", scale=1, min_width=90)
                    with gr.Row(elem_classes="tl-edit"):
                        alias = gr.Textbox(
                            label="New alias",
                            placeholder="Another spelling",
                            max_length=200,
                            elem_id="library-alias",
                            scale=3,
                            min_width=160,
                        )
                        add = gr.Button("Add", size="sm", elem_id="library-alias-add", scale=1, min_width=90)
                    with gr.Column(visible=False) as respelling:
                        old = gr.Dropdown([], label="An alias of the concept", elem_id="library-alias-old", filterable=False)
                        with gr.Row(elem_classes="tc-buttons"):
                            change = gr.Button("Replace by the new alias", size="sm", elem_id="library-alias-rename", min_width=140)
                            remove = gr.Button("Remove it", size="sm", elem_id="library-alias-remove", min_width=90)
                details = gr.HTML("", js_on_load=None, elem_id="library-details")
    chosen, deleted = gr.State(None), gr.State([])
    used, taught = gr.State(None), gr.State(None)

    inside = [title, details, editing, use, export, name, alias, respelling, old, chosen]
    listing = [cards, undo, *inside]

    def inside_of(id: str | None) -> tuple[Any, ...]:
        """Values for `inside`."""
        if id is None:
            return shown.title_html(None), "", gr.Column(visible=False), *(gr.skip() for _ in range(6)), None
        about = studio.library.inspect(id)
        picture = next((card.thumbnail for card in studio.library.cards() if card.id == id), None)
        aliases = about["aliases"]
        text = "Put away" if any(each.id == id for each in studio.engine.loaded()) else "Use"
        other = bool(about["base"]) and about["base"] != studio.engine.base
        return (
            shown.title_html(about, picture),
            html.inspected(about),
            gr.Column(visible=True),
            gr.Button(text, variant="primary" if text == "Use" else "secondary", interactive=not other),
            gr.DownloadButton(value=studio.library.export(id)),
            about["name"],
            "",
            gr.Column(visible=bool(aliases)),
            gr.Dropdown(choices=aliases, value=aliases[0] if aliases else None),
            id,
        )

    def listed(search: str, chosen: str | None, deleted: list[Deleted]) -> tuple[Any, ...]:
        """Values for `listing`."""
        told = gr.HTML(shown.undo_html(deleted[-1][1] if deleted else None), visible=bool(deleted))
        return cards_value(studio, search, chosen), told, *inside_of(chosen)

    def put(id: str) -> tuple[str, str] | None:
        """Put a concept on the shelf, or away where it is there; what `used` becomes."""
        if any(each.id == id for each in studio.engine.loaded()):
            studio.engine.unload(id)
            return None
        tell_turn(studio.engine)
        loaded = studio.engine.load(id)
        notice(f"{loaded.name} is in use; its trigger is {loaded.trigger}")
        return loaded.id, str(time.time_ns())

    def put_in_trash(id: str, deleted: list[Deleted]) -> list[Deleted]:
        card = next((card for card in studio.library.cards() if card.id == id), None)
        used = any(each.id == id for each in studio.engine.loaded())
        token = studio.library.delete(id)
        studio.engine.unload(id)
        return [*deleted, (token, card.name if card is not None else id, used)][-20:]

    def put_back(id: str) -> bool:
        """Put a concept on the shelf again; another one may have its place by now."""
        try:
            tell_turn(studio.engine)
            studio.engine.load(id)
        except StudioError as error:
            warn(f"it is not in use again: {error}")
            return False
        return True

    # -- the cards

    def on_search(search: str, chosen: str | None) -> str:
        return cards_value(studio, search, chosen)

    search.change(handled(on_search), [search, chosen], cards, **quick)

    def on_card(search: str, chosen: str | None, deleted: list[Deleted], event: gr.EventData) -> tuple[Any, ...]:
        act, id = picked(event)
        went, taught_now = gr.skip(), gr.skip()
        if act == "inspect":
            chosen = id
        elif act in ("use", "away"):
            is_there = any(each.id == id for each in studio.engine.loaded())
            if is_there == (act == "away"):  # another page may have been quicker
                went = put(id) or gr.skip()
        elif act == "delete":
            deleted = put_in_trash(id, deleted)
            chosen = None if chosen == id else chosen
        elif act == "teach":
            taught_now = id
        return *listed(search, chosen, deleted), deleted, went, taught_now

    looked = cards.pick(handled(on_card), [search, chosen, deleted], [*listing, deleted, used, taught], show_progress="hidden", **private)
    # on a narrow page what is inside stands below the cards, and above them where a long list was scrolled
    looked.success(
        None,
        None,
        None,
        js="""() => {
            const title = document.querySelector('#library-title'), at = title.getBoundingClientRect();
            const away = at.bottom < 0 || at.top > window.innerHeight - 80;
            if (away && document.querySelector('#library-cards .tl-chosen')) title.scrollIntoView();
        }""",
        **private,
    )

    def on_undo(search: str, chosen: str | None, deleted: list[Deleted]) -> tuple[Any, ...]:
        if not deleted:
            return *(gr.skip() for _ in listing), deleted
        token, gone, was_used = deleted[-1]
        rest = deleted[:-1]
        try:
            id = studio.library.undo(token)
        except StudioError as error:
            warn(str(error))
        else:
            notice(f"{gone} is back{', and in use again' if was_used and put_back(id) else ''}")
        return *listed(search, chosen, rest), rest

    undo.pick(handled(on_undo), [search, chosen, deleted], [*listing, deleted], show_progress="hidden", **private)

    def on_import(path: str | None, search: str, deleted: list[Deleted]) -> tuple[Any, ...]:
        if not path:
            return tuple(gr.skip() for _ in listing)
        id = studio.library.import_file(path, Path(path).name)
        notice(f"{studio.library.get(id).name} is in the library")
        return listed(search, id, deleted)

    take_in.upload(handled(on_import), [take_in, search, deleted], listing, show_progress="hidden", **private)

    # -- the concept that is looked at

    def chosen_one(chosen: str | None) -> str:
        if chosen is None:
            raise StudioError("no concept is chosen; choose a card")
        return chosen

    def on_use(search: str, chosen: str | None, deleted: list[Deleted]) -> tuple[Any, ...]:
        went = put(chosen_one(chosen)) or gr.skip()
        return *listed(search, chosen, deleted), went

    use.click(handled(on_use), [search, chosen, deleted], [*listing, used], show_progress="hidden", **private)

    def on_delete(search: str, chosen: str | None, deleted: list[Deleted]) -> tuple[Any, ...]:
        deleted = put_in_trash(chosen_one(chosen), deleted)
        return *listed(search, None, deleted), deleted

    delete.click(handled(on_delete), [search, chosen, deleted], [*listing, deleted], show_progress="hidden", **private)

    def changing(change: Callable[..., str]) -> Callable[..., tuple[Any, ...]]:
        """A handler that changes the chosen concept and says so: `change(id, *texts) -> what was done`."""

        def on_change(search: str, chosen: str | None, deleted: list[Deleted], *texts: str) -> tuple[Any, ...]:
            notice(change(chosen_one(chosen), *texts))
            return listed(search, chosen, deleted)

        on_change.__name__ = change.__name__
        return handled(on_change)

    def on_rename(id: str, text: str) -> str:
        got, wanted = studio.library.rename(id, text or ""), " ".join((text or "").split())
        taken = got != wanted and any(card.name.casefold() == wanted.casefold() for card in studio.library.cards() if card.id != id)
        return f"its name is {got} now" + (f"; another concept is called {wanted} already" if taken else "")

    def tell_against(lines: Sequence[str]) -> None:
        for line in lines[:MOST_WARNINGS]:
            warn(line)

    def on_add(id: str, text: str) -> str:
        tell_turn(studio.engine)
        against = studio.registrar.check_alias(id, text)
        studio.engine.run(lambda adapter: studio.library.add_alias(id, text or "", adapter))
        tell_against(against)
        return f"{text.strip()} is another spelling now; it reads the trigger's rows"

    def on_respell(id: str, before: str | None, text: str) -> str:
        tell_turn(studio.engine)
        against = studio.registrar.check_alias(id, text)
        studio.engine.run(lambda adapter: studio.library.rename_alias(id, before or "", text or "", adapter))
        tell_against(against)
        return f"{before} is spelled {text.strip()} now"

    def on_remove(id: str, before: str | None) -> str:
        tell_turn(studio.engine)
        studio.engine.run(lambda adapter: studio.library.remove_alias(id, before or "", adapter))
        return f"{before} is no spelling of it any more"

    state = [search, chosen, deleted]
    options: dict[str, Any] = {"show_progress": "hidden", **private}
    gr.on([rename.click, name.submit], changing(on_rename), [*state, name], listing, **options)
    gr.on([add.click, alias.submit], changing(on_add), [*state, alias], listing, **options)
    change.click(changing(on_respell), [*state, old, alias], listing, **options)
    remove.click(changing(on_remove), [*state, old], listing, **options)

    def refresh(search: str, chosen: str | None, deleted: list[Deleted]) -> tuple[Any, ...]:
        there = chosen is not None and any(card.id == chosen and card.error is None for card in studio.library.cards())
        return listed(search, chosen if there else None, deleted)

    return LibraryTab(used, taught, (refresh, listing, state))
