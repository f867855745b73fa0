"""Text that comes in pieces: whole characters only, stop strings across tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from seekforge.runtime.detokenizer import Detokenizer, StopMatcher, TextStream

REPLACEMENT = "\ufffd"
TEXT = "삼겹살 😀 ď世ab"


def byte_tokenizer() -> Any:
    """Byte-level: 256 tokens of one byte each, and a special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")  # type: ignore[no-untyped-call]


def sentencepiece_tokenizer() -> Any:
    """Metaspace words with byte fallback, as Llama's first tokenizers have it."""
    words = [
        "<unk>",
        "▁hello",
        "▁world",
        "▁",
        "s",
        "!",
        "▁.",
        *(f"<0x{b:02X}>" for b in range(256)),
    ]
    vocab = {word: i for i, word in enumerate(words)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")  # type: ignore[no-untyped-call]


def pieces(tokenizer: Any, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.flush()]


def test_one_byte_per_token() -> None:  # B68
    tokenizer = byte_tokenizer()
    token_ids = tokenizer.encode(TEXT)
    assert len(token_ids) == len(TEXT.encode())
    got = pieces(tokenizer, token_ids)
    assert "".join(got) == TEXT == tokenizer.decode(token_ids)
    assert [piece for piece in got if piece] == list(TEXT)  # each as soon as it is complete


def test_end_in_mid_character() -> None:  # B68
    tokenizer = byte_tokenizer()
    token_ids = tokenizer.encode(TEXT)[:-4]  # two bytes of 世 are left
    got = pieces(tokenizer, token_ids)
    assert "".join(got) == tokenizer.decode(token_ids) == TEXT[:-3] + REPLACEMENT
    assert all(REPLACEMENT not in piece for piece in got[:-1])


def test_invalid_and_genuine_replacement_characters_are_kept() -> None:
    tokenizer = byte_tokenizer()
    lead, a, b = (tokenizer.encode(char)[0] for char in "世ab")
    for token_ids in (
        tokenizer.encode("a\ufffdb\ufffd"),
        [lead, a, lead, lead, b],
    ):
        assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_interleaved_streams_do_not_mix() -> None:  # B68, n=2
    tokenizer = byte_tokenizer()
    a, b = Detokenizer(tokenizer), Detokenizer(tokenizer)
    texts = ["", ""]
    for left, right in zip(tokenizer.encode("겹살겹"), tokenizer.encode("世ab😀"), strict=True):
        texts[0] += a.push(left)
        texts[1] += b.push(right)
    assert texts == ["겹살겹", "世ab😀"]


@pytest.mark.parametrize(
    "words",
    [
        ["▁hello", "▁world", "!", "s"],
        ["▁", "▁", "s", "▁", "▁world"],
        ["</s>", "▁hello", "</s>", "▁world"],
        ["▁hello", "<0xEC>", "<0x82>", "<0xBC>", "<0xEA>", "<0xB2>", "<0xB9>", "▁world"],
        ["▁hello", "▁.", "!"],
    ],
)
def test_leading_spaces_and_byte_fallback(words: list[str]) -> None:  # B68
    tokenizer = sentencepiece_tokenizer()
    token_ids = tokenizer.convert_tokens_to_ids(words)
    whole = tokenizer.decode(
        token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert "".join(pieces(tokenizer, token_ids)) == whole


def match(texts: list[str], stops: list[str], include: bool = False) -> tuple[list[str], bool]:
    """-> the pieces given out (the last by flush), whether it stopped."""
    matcher, out = StopMatcher(stops, include), []
    for text in texts:
        piece, stopped = matcher.push(text)
        out.append(piece)
        if stopped:
            return out, True
    return [*out, matcher.flush()], False


def test_stop_strings_over_several_pieces() -> None:  # B67
    assert match(["DEF", "G", "HI", "JK"], ["DEFGHIJ"]) == (["", "", "", ""], True)
    assert match(["DEF", "G", "HI", "JK"], ["DEFGHIJ"], include=True)[0][-1] == "DEFGHIJ"
    assert match(["DEF", "G", "HI", "JK"], ["HIX"]) == (["DEF", "G", "", "HIJK", ""], False)
    assert match(["DEF", "G", "HI"], ["HIX"]) == (["DEF", "G", "", "HI"], False)  # by flush
    assert match(["a|STOP|b"], ["|STOP|"]) == (["a"], True)
    assert match(["a|STOP|b"], ["|STOP|"], include=True) == (["a|STOP|"], True)
    assert match(["aab"], ["ab"]) == (["a"], True)
    assert match(["aa", "ab"], ["aab"]) == (["", "a"], True)  # a match may begin inside held text
    assert match(["xyz"], []) == (["xyz", ""], False)


@pytest.mark.parametrize("text", ["abcd", "xabcabcdy", "bcd", "ababc", "abxab"])
@pytest.mark.parametrize("include", [False, True])
def test_the_cut_does_not_depend_on_the_pieces(text: str, include: bool) -> None:  # B67
    stops = ["bc", "abcd", "abx"]  # overlapping: the match complete first wins
    whole = "".join(match([text], stops, include)[0])
    for first in range(len(text)):
        for second in range(first, len(text)):
            texts = [text[:first], text[first:second], text[second:]]
            assert "".join(match(texts, stops, include)[0]) == whole, f"{texts=}"
    assert "".join(match(list(text), stops, include)[0]) == whole


def test_stop_string_completed_by_the_text_of_eos() -> None:  # B67
    tokenizer = byte_tokenizer()

    def text(stops: list[str], include: bool = False) -> str:
        stream = TextStream(tokenizer, stops, include)
        given = "".join(stream.push(token)[0] for token in tokenizer.encode("abc"))
        return given + stream.finish(stop_token=tokenizer.eos_token_id)

    assert text(["c</s>"]) == "ab"
    assert text(["c</s>"], include=True) == "abc</s>"
    assert text(["cd"]) == "abc"
    assert text([]) == "abc"
