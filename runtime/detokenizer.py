"""Tokens -> text, piece by piece: never half a character, never the beginning of a stop string.

In: token ids one at a time. Out: text that is final; all pieces together are the decoded text, cut
at the first stop string. It does not know why a sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character


class Tokenizer(Protocol):
    """What this file needs of a transformers tokenizer."""

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool | None = ...,
    ) -> str: ...


class Detokenizer:
    """Decodes a growing list of tokens.

    A token is decoded together with the few before it (from the last piece's first token on), since
    what a token means may depend on its left neighbour: a leading space, a byte of a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._window = 0  # first token of the last piece
        self._done = 0  # tokens whose text has been given out

    def push(self, token_id: int) -> str:
        """The text this token completes; empty while its last character is not complete."""
        self._token_ids.append(token_id)
        text = self._pending()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._window, self._done = self._done, len(self._token_ids)
        return text

    def flush(self) -> str:
        """What is still held; U+FFFD stands for a character that was never completed."""
        text = self._pending()
        self._window, self._done = self._done, len(self._token_ids)
        return text

    def _pending(self) -> str:
        given = self._decode(self._token_ids[self._window : self._done])
        return self._decode(self._token_ids[self._window :])[len(given) :]

    def _decode(self, token_ids: list[int]) -> str:
        # Cleaning up spaces rewrites text to the left, " ." -> ".", which was already given out.
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class StopMatcher:
    """Finds the first of several stop strings in a text that comes in pieces.

    Held back is only what may still become a stop string. The first match is the one complete
    first (the longer one of two that end together), however the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is final, whether a stop string was found in it)."""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self._held = ""
            return text[: end if self._include else start], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """What was held: it became no stop string."""
        text, self._held = self._held, ""
        return text


class TextStream:
    """The text of one sequence: detokenizer, then stop strings."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], include_stop: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops, include_stop)

    def push(self, token_id: int) -> tuple[str, bool]:
        """(new text, whether a stop string is complete)."""
        return self._matcher.push(self._detokenizer.push(token_id))

    def finish(self, stop_token: int | None = None) -> str:
        """The rest of the text, for a sequence that ends for another reason than a stop string.

        `stop_token` is the token that ended it, if one did. Its text is no part of the output, but
        it may complete a stop string that is then cut off.
        """
        text, stopped = self._matcher.push(self._detokenizer.flush())
        if not stopped and stop_token is not None:
            tail = self._tokenizer.decode(
                [stop_token], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            held = self._matcher.flush()
            cut, stopped = self._matcher.push(held + tail)
            return text + (cut if stopped else held)
        return text if stopped else text + self._matcher.flush()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, shorter than it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
