"""Options of other trainers for class pictures, refused with the reason. Imports argparse alone.

Other trainers move the base's weights, or add to every token, so that a class must be shown again to be kept. Here a prompt without the
trigger gives the very bits of the base: its loss has no gradient, whatever the picture.
"""

import argparse
from collections.abc import Sequence
from typing import Any

__all__ = ["refuse_preservation"]

OPTIONS = (
    "--with_prior_preservation",
    "--class_data_dir",
    "--class_prompt",
    "--num_class_images",
    "--num_class_pictures",
    "--prior_loss_weight",
    "--reg_data_dir",
)


class _Refused(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: str | Sequence[Any] | None, option_string=None
    ):
        parser.error(
            f"{option_string}: pictures of a class can teach nothing here: the base stays as it is, and a prompt without the trigger gives "
            "what it gave before; leave it out, and let --collages keep what stands beside the trigger"
        )


def refuse_preservation(parser: argparse.ArgumentParser) -> None:
    """Makes a parser say why it has no such options, where one is given."""
    parser.add_argument(*OPTIONS, dest=argparse.SUPPRESS, nargs="*", action=_Refused, help=argparse.SUPPRESS)
