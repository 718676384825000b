"""`tiny-engram push`: concepts to a repo of the Hub. May import everything; heavy parts when it runs."""

import argparse
from pathlib import Path

from tiny_engram.errors import TinyEngramError

__all__ = ["add_push_options", "run_push"]


def add_push_options(parser: argparse.ArgumentParser) -> None:
    """What `push` takes."""
    parser.add_argument("path", nargs="+", help="concept files, or folders with them; of a folder, its concepts, README.md and images")
    parser.add_argument("repo", help="the Hub's id, user/repo; made if it is not there")
    parser.add_argument("--private", action="store_true", default=None, help="of a repo that is made")
    parser.add_argument("--token", help="one that may write (default: HF_TOKEN, or what `hf auth login` stored)")
    parser.add_argument("--revision", help="a branch, made if it is not there (default: main)")
    parser.add_argument("--create_pr", action="store_true", help="open a pull request instead of writing to the branch")
    parser.add_argument("--commit_message", help="default: names the concepts")
    parser.add_argument("--base_model", help="the Hub's id of the base that they were taught on, for the card")
    parser.add_argument("--license", help="for the card, an id such as cc-by-4.0")
    parser.add_argument(
        "--picture", action="append", default=[], metavar="FILE[=PROMPT]", help="a PNG or WebP for the gallery; may be repeated"
    )
    parser.add_argument("--replace_card", action="store_true", help="write over a README.md that somebody wrote or edited")


def run_push(args: argparse.Namespace) -> int:
    """Push, and print where it went."""
    from tiny_engram.sharing import Picture, push_to_hub

    pictures: list[Picture] = []
    for given in args.picture:
        file, _, prompt = (given, "", "") if Path(given).exists() else given.partition("=")
        pictures.append((file, prompt) if prompt else file)
    for path in args.path:
        if not Path(path).exists():
            raise TinyEngramError(f"{path}: does not exist, expected a concept file or a folder with some")
    pushed = push_to_hub(
        args.path,
        args.repo,
        private=args.private,
        token=args.token,
        commit_message=args.commit_message,
        revision=args.revision,
        create_pr=args.create_pr,
        base_model=args.base_model,
        license=args.license,
        pictures=pictures,
        replace_card=args.replace_card,
    )
    print(pushed.pr_url or pushed.commit_url)
    return 0
