"""Compressed tokenizer: token id -> canonical id, so that "Apple", " apple" and "APPLE" share rows.

Imports torch, tokenizers and tiny_engram.errors; a transformers tokenizer is only read through its Rust backend.
Source: Engram (arXiv 2601.07372), tokenizer compression.
"""

import hashlib
from typing import Any, Protocol

import torch
from tokenizers import Regex, Tokenizer, normalizers

from tiny_engram.errors import TokenizerError

_LONE_SPACE = "\ue000"  # private use: keeps a token that is only a space from being stripped to nothing
_REPLACEMENT = "\ufffd"


class HasBackend(Protocol):
    """A transformers fast tokenizer, as far as it is read here."""

    @property
    def backend_tokenizer(self) -> Any: ...


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def canonical_numbers(texts: list[str], tokens: list[str]) -> list[int]:
    """Number tokens by normalised text, first seen first.

    Args:
        texts: what each id decodes to, special tokens kept.
        tokens: the vocabulary's own string of each id, the key where the text holds U+FFFD (a torn UTF-8 sequence).

    Returns:
        One canonical id per token.
    """
    normalizer = _normalizer()
    seen: dict[str, int] = {}
    numbers = []
    for text, token in zip(texts, tokens, strict=True):
        key = token if _REPLACEMENT in text else normalizer.normalize_str(text) or text
        numbers.append(seen.setdefault(key, len(seen)))
    return numbers


class CompressedTokenizer:
    """The canonical ids of one tokenizer.

    Attributes:
        canonical: int64 ``[vocab]``, canonical id of each raw id.
        size: number of canonical ids.
        pad_id: canonical id of the pad token.
        fingerprint: sha256 (hex) over the vocabulary's (id, token) pairs.
    """

    def __init__(self, tokenizer: HasBackend | Tokenizer, *, expected_size: int | None = None, pad_id: int | None = None):
        """Read the vocabulary (about a second for 129,280 ids).

        Args:
            tokenizer: a ``tokenizers.Tokenizer``, or a transformers tokenizer that has one as its backend.
            expected_size: number of canonical ids that the rows were made for; it enters every multiplier.
            pad_id: raw id of the pad token, for tokenizers that name none.

        Raises:
            TokenizerError: no Rust backend, no pad token, or another size than expected.
        """
        backend = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise TokenizerError(f"{type(tokenizer).__name__} has no Rust backend: pass a fast tokenizer or a tokenizers.Tokenizer")
        vocab = backend.get_vocab(with_added_tokens=True)
        total = max(vocab.values(), default=-1) + 1
        tokens = [""] * total
        for token, number in vocab.items():
            tokens[number] = token
        texts = backend.decode_batch([[number] for number in range(total)], skip_special_tokens=False)
        self.canonical = torch.tensor(canonical_numbers(texts, tokens), dtype=torch.int64)
        self.size = int(self.canonical.max()) + 1 if total else 0
        if expected_size is not None and self.size != expected_size:
            raise TokenizerError(
                f"the tokenizer has {self.size} canonical ids: expected {expected_size}; use the tokenizer of the trained base"
            )
        raw_pad = pad_id if pad_id is not None else getattr(tokenizer, "pad_token_id", None)
        if raw_pad is None and backend.padding is not None:
            raw_pad = backend.padding["pad_id"]
        if raw_pad is None or not 0 <= raw_pad < total:
            raise TokenizerError(f"pad token id is {raw_pad}: expected 0..{total - 1}; pass pad_id=, the raw id that pads")
        self.pad_id = int(self.canonical[raw_pad])
        digest = hashlib.sha256()
        for number, token in enumerate(tokens):
            encoded = token.encode()
            digest.update(b"%d:%d:" % (number, len(encoded)) + encoded)
        self.fingerprint = digest.hexdigest()

    def compress(self, ids: Any) -> torch.Tensor:
        """Canonical ids int64 ``[...]`` of raw ids (tensor, array or nested list), on the ids' device.

        Raises:
            TokenizerError: an id is outside the vocabulary (found on the CPU; a GPU fails on its own).
        """
        ids = torch.as_tensor(ids, dtype=torch.int64)
        total = self.canonical.shape[0]
        # Only where it costs no synchronisation; without it a negative id would count from the end.
        if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < total:
            raise TokenizerError(f"ids run from {int(ids.min())} to {int(ids.max())}: expected 0..{total - 1}")
        return self.canonical.to(ids.device)[ids]
