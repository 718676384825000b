"""README.md of a folder or a repo of concepts: trigger words, gallery, how they are loaded, how they were taught. Imports no torch."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiny_engram.model_card import front_matter, sign, signed_data

__all__ = ["ConceptCard", "Entry", "Shown"]

TAGS = ["tiny-engram", "engram", "text-to-image", "diffusers", "template:diffusion-lora"]
_PICTURE = re.compile(r"images/[^/\\]+\.(png|webp)")


@dataclass(frozen=True, slots=True)
class Entry:
    """One concept of a card: its file's name and bytes, and what the file says of it."""

    file: str
    nbytes: int
    name: str
    trigger: str
    aliases: Sequence[str]
    base: str
    recipe: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shown:
    """One picture of the gallery: "images/name.png", and its prompt. `taught` says that it is one that was taught from, none drawn; `step`
    is that of the run which drew it, of a picture that was drawn in one."""

    url: str
    text: str
    taught: bool = False
    step: int | None = None


@dataclass(frozen=True, slots=True)
class ConceptCard:
    """What a card says; `render` writes it, `read` reads what was rendered.

    Attributes:
        base_model: the Hub's id of the base; None if it is known by its short name alone, see `Entry.base`.
        license: an id such as "mit" or "cc-by-4.0"; None leaves it open.
    """

    entries: Sequence[Entry]
    gallery: Sequence[Shown] = ()
    base_model: str | None = None
    license: str | None = None

    @classmethod
    def read(cls, text: str | None) -> "ConceptCard | None":
        """What a card of ours says; None if it is no card of ours, or was edited."""
        data = None if text is None else signed_data(text)
        try:
            return None if data is None else cls._from(data)
        except (KeyError, TypeError, AttributeError):
            return None

    @classmethod
    def _from(cls, data: Mapping[str, Any]) -> "ConceptCard":
        gallery = [Shown(**each) for each in data["gallery"]]
        return cls(
            [Entry(**each) for each in data["concepts"]],
            [each for each in gallery if _PICTURE.fullmatch(each.url)],
            data["base_model"],
            data["license"],
        )

    def render(self, where: str, file_prefix: str) -> str:
        """The Markdown.

        Args:
            where: what loads a concept if there is one alone: "user/repo", or a folder.
            file_prefix: what stands before a file's name in an address: "hf://user/repo/", or a folder and "/".
        """
        sources = [where] if len(self.entries) == 1 else [file_prefix + each.file for each in self.entries]
        triggers = [each.trigger for each in self.entries]
        head = front_matter(
            {
                "license": self.license,
                "base_model": self.base_model,
                "base_model_relation": "adapter" if self.base_model else None,
                "library_name": "tiny-engram",
                "pipeline_tag": "text-to-image",
                "tags": TAGS,
                "instance_prompt": ", ".join(triggers),
                "widget": [{"text": each.text, "output": {"url": each.url}} for each in self.gallery],
            }
        )
        names = [" ".join(each.name.split()) for each in self.entries]
        title = _plain(names[0]) if len(names) == 1 else f"{len(names)} concepts: {_plain(', '.join(names[:4]))}"
        parts = [head, f"# {title}", "", *self._pictures(), *self._words(), *self._use(sources), *self._recipes(), *self._terms()]
        data = {
            "concepts": [asdict(each) for each in self.entries],
            # so that earlier versions, which know no step, read cards without one
            "gallery": [{key: value for key, value in asdict(each).items() if value is not None} for each in self.gallery],
            "base_model": self.base_model,
            "license": self.license,
        }
        return sign("\n".join(parts), data)

    def _pictures(self) -> list[str]:
        if not self.gallery:
            return []
        taught = [each for each in self.gallery if each.taught]
        if not taught:
            steps = sorted({each.step for each in self.gallery if each.step is not None})
            drawn = f"Drawn while it was taught, at step {', '.join(map(str, steps))}, from fixed seeds." if steps else ""
            return ["<Gallery />", "", *([drawn, ""] if drawn else [])]
        which = "Small pictures are" if len(taught) > 1 else "The small picture is"
        others = "; the base drew the others." if len(taught) < len(self.gallery) else ", not drawn."
        return ["<Gallery />", "", f"{which} from the pictures that were taught{others}", ""]

    def _words(self) -> list[str]:
        one = len(self.entries) == 1
        lines = [
            "## Trigger words",
            "",
            f"You should use {', '.join(_code(each.trigger) for each in self.entries)} to call "
            + ("it. Without its name" if one else "them. Without a name")
            + " in the prompt, pictures are the base's own, bit for bit.",
            "",
            "| file | trigger | further spellings | taught on | bytes |",
            "|---|---|---|---|---|",
        ]
        for each in self.entries:
            cells = (_code(each.file), _code(each.trigger), ", ".join(map(_code, each.aliases)) or "-", _code(each.base or "unnamed"))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + f" | {each.nbytes:,} |")
        return [*lines, ""]

    def _use(self, sources: Sequence[str]) -> list[str]:
        base = self.base_model or self.entries[0].base or "BASE_MODEL"
        note = "" if self.base_model else "  # write where yours is: a folder or a Hub id"
        prompt = f"a photo of a {self.entries[0].trigger}"
        concepts = _literal(sources[0]) if len(sources) == 1 else "[" + ", ".join(map(_literal, sources)) + "]"
        loads = [f"tiny_engram.load_concept(pipe, {_literal(source)})" for source in sources]
        options = " ".join(f"--concept {shlex.quote(source)}" for source in sources)
        return [
            "## Use it",
            "",
            "```python",
            "from tiny_engram import EngramPipeline",
            "",
            f"base = {_literal(base)}{note}",
            f"pipe = EngramPipeline.from_pretrained(base, {concepts})  # the base's own diffusers pipeline",
            f"picture = pipe({_literal(prompt)}).images[0]",
            "```",
            "",
            "On a pipeline that is there already:",
            "",
            "```python",
            "import tiny_engram",
            "",
            "tiny_engram.attach(pipe)",
            *loads,
            "```",
            "",
            "From a shell:",
            "",
            "```sh",
            f"tiny-engram generate --model {shlex.quote(base)} {options} --prompt {shlex.quote(prompt)}",
            "```",
            "",
        ]

    def _recipes(self) -> list[str]:
        lines = []
        for each in self.entries:
            if each.recipe:
                lines += [f"{_code(each.file)}:", "", "```json", json.dumps(dict(each.recipe), indent=1, ensure_ascii=False), "```", ""]
        return ["## How it was taught", "", *lines] if lines else []

    def _terms(self) -> list[str]:
        return ["## Licence", "", f"{_plain(self.license)}" if self.license else "None was stated; ask who made it.", ""]


def _literal(text: str) -> str:
    """The text as Python writes it, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _code(text: str) -> str:
    """The text as it is, in a span of code."""
    line = " ".join(text.split())
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    return f"{fence} {line} {fence}" if "`" in line else f"`{line}`"


def _plain(text: str) -> str:
    """The text with what Markdown would read as marks made plain."""
    return re.sub(r"([\\`*_\[\]<>#|&])", r"\\\1", " ".join(text.split()))
