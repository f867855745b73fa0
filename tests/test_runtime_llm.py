"""The whole loop on an engine that is a stand-in: its cache holds token ids, read back by block.

A wrong block table, position or order gives other tokens, so other logits. The logits come from
transformers' own tiny model, run on what was read, or from a script.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from seekforge.kernels.errors import EngineError, InputError
from seekforge.runtime.llm import LLM, default_blocks
from seekforge.runtime.manifest import (
    FORMAT_VERSION,
    Generation,
    KVLayout,
    Limits,
    Manifest,
    write_manifest,
)
from seekforge.runtime.padded import CPU_POOL_BYTES
from seekforge.runtime.sampling import SamplingParams
from seekforge.runtime.session import Chunk, open_session, padded_batches, ragged_inputs, scatter_kv

Logits = Callable[[list[int]], Tensor]


def manifest_for(vocab_size: int, eos: tuple[int, ...] = (), **changes: Any) -> Manifest:
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        seekforge_version="0",
        backend="inductor",
        backend_version="0",
        device="cpu",
        compute_capability=None,
        form="ragged",
        dtype="float32",
        model={"vocab_size": vocab_size},
        limits=Limits(max_len=64, max_batch=8, max_chunk=64),
        kv=KVLayout(1, 16, {"k": (1, 1), "v": (1, 1)}, "float32", True),
        inputs=(),
        outputs=(),
        profiles=(),
        generation=Generation(eos, None, None),
        quantization=None,
        passes=(),
        receipt=None,
        steps=(),
        layers=None,
        memory=None,
        files=(),
    )
    return dataclasses.replace(manifest, **changes)


class FakeSession:
    """`logits_of(token_ids)` -> [len, V]; the cache is a pool of token ids."""

    def __init__(self, manifest: Manifest, logits_of: Logits) -> None:
        self.manifest = manifest
        self.logits_device = torch.device("cpu")
        self.logits_of = logits_of
        self.pool = torch.empty(0)
        self.steps: list[list[int]] = []  # tokens of each chunk

    def pool_bytes(self, max_batch: int, max_chunk: int, block_size: int) -> int:
        return CPU_POOL_BYTES

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self.pool = torch.full((num_blocks, block_size), -1)

    def clear(self, blocks: Sequence[int]) -> None:
        self.pool[list(blocks)] = -1

    def step(self, chunks: Sequence[Chunk], last: Tensor | None = None) -> Tensor:
        if last is not None:
            unread = [int(last[chunk.source].clamp_min(0)) for chunk in chunks if chunk.source >= 0]
            chunks = [
                dataclasses.replace(chunk, token_ids=[unread.pop(0)])
                if chunk.source >= 0
                else chunk
                for chunk in chunks
            ]
        self.steps.append([len(chunk.token_ids) for chunk in chunks])
        return self.ragged(chunks) if self.manifest.form == "ragged" else self.padded(chunks)

    def ragged(self, chunks: Sequence[Chunk]) -> Tensor:
        block_size = self.pool.shape[1]
        inputs = ragged_inputs(chunks, block_size)
        self.pool.view(-1)[inputs.slot_mapping] = inputs.token_ids
        rows = []
        for i, table in enumerate(inputs.block_tables):
            length = int(inputs.context_lens[i])
            fresh = slice(int(inputs.query_start[i]), int(inputs.query_start[i + 1]))
            logits = self.logits_of(self.pool[table].flatten()[:length].tolist())
            rows.append(logits[inputs.positions[fresh]])
        return torch.cat(rows)[inputs.logits_rows][: inputs.num_rows]

    def padded(self, chunks: Sequence[Chunk]) -> Tensor:
        total = sum(len(chunk.rows) for chunk in chunks)
        out = torch.full((total, self.manifest.vocab_size), torch.nan)
        for batch in padded_batches(chunks, self.pool.shape[1]):
            rows = []
            for i, table in enumerate(batch.block_tables):
                past = self.pool[table].flatten()[: int(batch.past_lens[i])]
                logits = self.logits_of([*past.tolist(), *batch.token_ids[i].tolist()])
                rows.append(logits[batch.positions[i]])
            logits = torch.cat(rows)[batch.logits_rows]
            out[batch.output_rows] = logits[: len(batch.output_rows)]
            scatter_kv(self.pool, batch.token_ids, batch.slots)
        return out


def script_session(
    script: Sequence[int | None], prompt: int = 1, vocab: int = 128, **changes: Any
) -> FakeSession:
    """Says the script's tokens behind a prompt of `prompt` tokens, again and again; None: NaN."""

    def logits_of(token_ids: list[int]) -> Tensor:
        logits = torch.zeros(len(token_ids), vocab)
        for i in range(prompt - 1, len(token_ids)):
            token = script[(i - prompt + 1) % len(script)]
            logits[i] = torch.nan if token is None else 0.0
            if token is not None:
                logits[i, token] = 100.0
        return logits

    return FakeSession(manifest_for(vocab, **changes), logits_of)


def word_tokenizer(words: Sequence[str] = (), **special: str) -> Any:
    """Id i is words[i], then "w<i>" up to 127."""
    vocab = {word: i for i, word in enumerate(words)}
    vocab |= {f"w{i}": i for i in range(len(words), 128)}
    inner = Tokenizer(models.WordLevel(vocab=vocab, unk_token="w127"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)  # type: ignore[no-untyped-call]


def scripted(script: Sequence[int | None], words: Sequence[str] = (), **changes: Any) -> LLM:
    return LLM("", session=script_session(script, **changes), tokenizer=word_tokenizer(words))


PROMPTS = [
    [5, 9, 100],
    [7],
    list(range(20, 37)),
    [3, 3, 3, 3],
    list(range(250, 262)),
    [9, 8, 7, 6, 5, 4, 3, 50, 60, 70, 80, 90, 33, 34, 35, 36],
]
NEW = 9


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., nn.Module]) -> Any:
    return tiny_model("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Callable[..., Path]) -> Any:
    return AutoTokenizer.from_pretrained(tiny_checkpoint("llama", num_hidden_layers=1))


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NEW,
            suppress_tokens=list(range(280, 293)),  # ids the tokenizer does not have
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def logits_of(model: Any) -> Logits:
    """The model's logits [len, V]; remembered, since all the cases below ask for the same ones."""

    @functools.cache
    def remembered(token_ids: tuple[int, ...]) -> Tensor:
        return cast(Tensor, model(torch.tensor([token_ids])).logits[0])

    return lambda token_ids: remembered(tuple(token_ids))


def model_session(logits_of: Logits, form: str = "ragged") -> FakeSession:
    return FakeSession(manifest_for(293, eos=(1,), form=form), logits_of)


@pytest.mark.parametrize("form", ["ragged", "padded"])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("max_chunk", [5, 16, None])
@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_equals_transformers(
    logits_of: Logits,
    tokenizer: Any,
    expected: list[list[int]],
    form: str,
    block_size: int,
    max_chunk: int | None,
    overlap: bool,
) -> None:
    session = model_session(logits_of, form)
    llm = LLM(
        "", session=session, tokenizer=tokenizer, block_size=block_size, max_chunk=max_chunk,
        overlap=overlap,
    )  # fmt: skip
    params = SamplingParams(max_tokens=NEW)
    batched = llm.generate(PROMPTS, params)
    assert [output.choices[0].token_ids for output in batched] == expected
    assert max(len(step) for step in session.steps) > 1
    single = [llm.generate([prompt], params)[0].choices[0].token_ids for prompt in PROMPTS[:3]]
    assert single == expected[:3]
    assert llm.blocks.num_used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_sequences_give_the_same_tokens(
    logits_of: Logits, tokenizer: Any, expected: list[list[int]], overlap: bool
) -> None:
    session = model_session(logits_of)
    llm = LLM("", session=session, tokenizer=tokenizer, block_size=4, num_blocks=7, overlap=overlap)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW))
    assert llm.scheduler.num_preemptions > 0
    assert [output.choices[0].token_ids for output in outputs] == expected
    assert llm.blocks.num_free == 7


@pytest.mark.parametrize("chunk", [None, 1, 5, 64])
def test_score_gives_the_logits_of_every_position(
    model: Any, logits_of: Logits, tokenizer: Any, chunk: int | None
) -> None:
    llm = LLM("", session=model_session(logits_of), tokenizer=tokenizer, block_size=4)
    token_ids = list(range(30, 47))
    logits = llm.score(token_ids, chunk)
    torch.testing.assert_close(
        logits, model(torch.tensor([token_ids])).logits[0], rtol=0, atol=1e-4
    )
    assert llm.blocks.num_used == 0
    for bad, reason in [([], "0 tokens"), ([1] * 65, "65 tokens"), ([293], "token id 293")]:
        with pytest.raises(InputError, match=reason):
            llm.score(bad)


@pytest.mark.parametrize("prompt", [3, 4, 5, 8])
def test_blocks_held_while_generating(prompt: int) -> None:  # B56
    need = -(-(prompt + 5) // 4)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    session = script_session([40, 41, 42], prompt=prompt)
    llm = LLM("", session=session, tokenizer=word_tokenizer(), block_size=4, num_blocks=need)
    llm.add_request([2] * prompt, params)
    for new in range(6):
        assert llm.blocks.num_used == (0 if new == 0 else -(-(prompt + new - 1) // 4)), f"{new=}"
        llm.step()
    assert llm.blocks.num_used == 0 and llm.step() == []
    short = LLM("", session=session, tokenizer=word_tokenizer(), block_size=4, num_blocks=need - 1)
    if short.max_len < prompt + 6:
        with pytest.raises(InputError, match=rf"{prompt} prompt tokens .*{need - 1} blocks of 4"):
            short.generate([[2] * prompt], params)


def test_eos_of_the_generation_config() -> None:  # B18
    llm = scripted([7, 9, 5], generation=Generation((9, 7), None, None))
    choice = llm.generate([[2]], SamplingParams(max_tokens=3))[0].choices[0]
    assert (choice.token_ids, choice.finish_reason) == ([7], "stop")
    choice = llm.generate([[2]], SamplingParams(max_tokens=3, ignore_eos=True))[0].choices[0]
    assert (choice.token_ids, choice.finish_reason) == ([7, 9, 5], "length")
    llm = scripted([7, 9, 5], generation=Generation((9,), None, None))
    assert llm.generate([[2]])[0].choices[0].token_ids == [7, 9]
    params = SamplingParams(stop_token_ids=[5], ignore_eos=True)
    assert llm.generate([[2]], params)[0].choices[0].token_ids == [7, 9, 5]
    assert llm.generate([[2]], params)[0].choices[0].text == "w7w9"
    params = dataclasses.replace(params, include_stop=True)
    assert llm.generate([[2]], params)[0].choices[0].text == "w7w9w5"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_the_tokenizer_does_not_have_never_come_out(temperature: float) -> None:  # B19
    session = script_session([138], vocab=140)
    llm = LLM("", session=session, tokenizer=word_tokenizer(), max_batch=2)
    params = SamplingParams(temperature=temperature, max_tokens=20)
    choice = llm.generate([[2]], params)[0].choices[0]
    assert len(choice.token_ids) == 20 and max(choice.token_ids) < 128
    assert choice.text == "".join(f"w{i}" for i in choice.token_ids)


def test_stop_strings() -> None:  # B67
    words = ["DEF", "G", "HI", "JK", "a|STOP|b"]

    def text(script: list[int], **params: Any) -> tuple[str, str, list[int]]:
        llm = scripted(script, words)
        wanted = SamplingParams(max_tokens=len(script), **params)
        choice = llm.generate([[9]], wanted)[0].choices[0]
        deltas = list(llm.stream([9], wanted))
        assert "".join(delta.text for delta in deltas) == choice.text
        assert [token for delta in deltas for token in delta.token_ids] == choice.token_ids
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == choice.finish_reason
        return choice.text, choice.finish_reason, choice.token_ids

    assert text([0, 1, 2, 3], stop="DEFGHIJ") == ("", "stop", [0, 1, 2, 3])
    assert text([0, 1, 2, 3], stop="DEFGHIJ", include_stop=True)[0] == "DEFGHIJ"
    assert text([0, 1, 2, 3], stop=["HIX"]) == ("DEFGHIJK", "length", [0, 1, 2, 3])
    assert text([0, 1, 2], stop=["HIX"]) == ("DEFGHI", "length", [0, 1, 2])
    assert text([0, 4, 1], stop=["|STOP|"]) == ("DEFa", "stop", [0, 4])


def test_characters_of_several_tokens(tokenizer: Any) -> None:  # B68
    text = "삼겹살 😀 ď世ab"
    script = tokenizer.encode(text)
    assert len(script) > len(text)
    session = script_session(script, vocab=293)
    llm = LLM("", session=session, tokenizer=tokenizer)
    params = SamplingParams(max_tokens=len(script), n=2)
    assert [c.text for c in llm.generate([[9]], params)[0].choices] == [text, text]
    texts = ["", ""]
    for delta in llm.stream([9], params):
        assert "\ufffd" not in delta.text
        texts[delta.index] += delta.text
    assert texts == [text, text]
    cut = llm.generate([[9]], SamplingParams(max_tokens=2))[0].choices[0]
    assert cut.text == tokenizer.decode(script[:2]) == "\ufffd"


def test_seeds(logits_of: Logits, tokenizer: Any) -> None:  # B72
    llm = LLM("", session=model_session(logits_of), tokenizer=tokenizer, block_size=4)

    def ids(prompts: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
        outputs = llm.generate(prompts, params)
        return [[choice.token_ids for choice in output.choices] for output in outputs]

    hot = SamplingParams(temperature=8.0, max_tokens=6, ignore_eos=True)
    a = dataclasses.replace(hot, seed=42)
    b = dataclasses.replace(hot, seed=7)
    alone = ids([[5, 9]], [a])[0]
    assert ids([[5, 9], [8]], [a, hot])[0] == alone
    assert ids([[5, 9], [8]], [a, b])[0] == alone
    assert ids([[8], [7], [5, 9]], [b, hot, a])[2] == alone
    three = dataclasses.replace(hot, seed=1, n=3)
    first = ids([[5, 9]], [three])[0]
    assert len({tuple(choice) for choice in first}) == 3
    assert ids([[5, 9]], [three])[0] == first
    assert ids([[5, 9]], [hot]) != ids([[5, 9]], [hot])


LIMITS = Limits(max_len=32, max_batch=4, max_chunk=16)


def test_prompt_length_limits() -> None:  # B75
    llm = scripted([40], limits=LIMITS)
    choice = llm.generate([[2] * 31])[0].choices[0]
    assert (len(choice.token_ids), choice.finish_reason) == (1, "length")
    choice = llm.generate([[2] * 20], SamplingParams(max_tokens=12))[0].choices[0]
    assert (len(choice.token_ids), choice.finish_reason) == (12, "length")
    assert len(llm.generate([[2]])[0].choices[0].token_ids) == 31  # max_tokens absent
    for length, wanted, numbers in [
        (32, None, "32 prompt tokens, and a sequence may have 32"),
        (33, None, "33 prompt tokens"),
        (100_000, None, "100000 prompt tokens"),
        (20, 13, r"20 prompt tokens \+ max_tokens 13"),
        (1, 10**12, r"max_tokens 1000000000000"),
    ]:
        params = SamplingParams(max_tokens=wanted)
        with pytest.raises(InputError, match=numbers):
            llm.generate([[2] * length], params)
        with pytest.raises(InputError, match=numbers):
            llm.add_request([2] * length, params)
        with pytest.raises(InputError, match=numbers):  # at the call, not at the first next()
            llm.stream([2] * length, params)
    assert len(llm.generate([[2]], SamplingParams(max_tokens=3))[0].choices[0].token_ids) == 3


def test_a_small_pool_is_a_limit_too() -> None:  # B75
    session = script_session([40], limits=LIMITS)
    llm = LLM("", session=session, tokenizer=word_tokenizer(), block_size=4, num_blocks=3)
    assert len(llm.generate([[2] * 5])[0].choices[0].token_ids) == 8  # 12 in the pool and the last
    with pytest.raises(InputError, match=r"5 prompt tokens \+ max_tokens 9, .* 13 .*3 blocks of 4"):
        llm.generate([[2] * 5], SamplingParams(max_tokens=9))


def test_one_bad_prompt_stops_the_list_before_anything_runs() -> None:
    session = script_session([40], limits=LIMITS)
    llm = LLM("", session=session, tokenizer=word_tokenizer())
    for bad, reason in [
        ([2] * 32, "prompt 1: 32 prompt tokens"),
        ([128], "prompt 1: token id 128 at position 0; 0 to 127"),
        ([2, -1], "prompt 1: token id -1 at position 1"),
        ([2, "w3"], "prompt 1: token id 'w3'"),
        ([True], "prompt 1: token id True"),
        (None, "prompt 1: a prompt is text or a list of token ids, not None"),
        ([], "prompt 1: the prompt is empty"),
    ]:
        with pytest.raises(InputError, match=reason):
            llm.generate(cast(Any, [[2], bad, [3]]))
    with pytest.raises(InputError, match="2 sampling params for 1 prompts"):
        llm.generate([[2]], [SamplingParams()] * 2)
    assert session.steps == [] and llm.step() == []
    assert llm.generate([]) == []


@pytest.mark.parametrize("empty", ["", []])
def test_empty_prompts(empty: Any) -> None:  # B76
    llm = LLM("", session=script_session([40, 41]), tokenizer=word_tokenizer())
    for prompts in (empty, [empty]):
        if prompts != []:
            with pytest.raises(
                InputError, match="the prompt is empty and this tokenizer has no BOS"
            ):
                llm.generate(prompts)
    params = SamplingParams(max_tokens=2)
    assert llm.generate("w5", params)[0].choices[0].text == "w40w41"
    llm = LLM("", session=script_session([40, 41]), tokenizer=word_tokenizer(bos_token="w3"))
    output = llm.generate([empty], params)[0]
    assert output.prompt_token_ids == [3] and output.choices[0].token_ids == [40, 41]


def test_chat() -> None:
    llm = scripted([40], prompt=3)
    with pytest.raises(InputError, match="no chat template"):
        llm.chat([{"role": "user", "content": "w5"}])
    llm.tokenizer.chat_template = (
        "{% for m in messages %}"
        "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "w1 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
    )
    output = llm.chat([{"role": "user", "content": "w5"}], SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == [1, 5, 2] and output.choices[0].text == "w40"
    for messages, reason in [
        ([], "messages is empty"),
        ([{"role": "user", "content": None}], r"messages\[0\]: content is None"),
        ([{"content": "x"}], r"messages\[0\]: role is None"),
        ([{"role": "tool", "content": "x"}], "no tools"),
    ]:
        with pytest.raises(InputError, match=reason):
            llm.chat(cast(Any, messages))


def test_nan_logits_end_only_their_request() -> None:
    llm = scripted([40, None])
    outputs = llm.generate([[2], [2, 2, 2]], SamplingParams(max_tokens=5))
    assert outputs[0].choices[0].finish_reason == "error"
    assert outputs[0].choices[0].token_ids == [40] and outputs[0].choices[0].text == "w40"
    assert llm.blocks.num_used == 0
    assert list(llm.stream([2]))[-1].finish_reason == "error"


def test_abort_gives_blocks_back_and_is_idempotent() -> None:
    llm = LLM(
        "", session=script_session([40]), tokenizer=word_tokenizer(), max_batch=2, block_size=4
    )
    free = llm.blocks.num_free
    ids = [llm.add_request([2] * 6, SamplingParams(n=2)) for _ in range(3)]  # two run, four wait
    llm.step()
    assert llm.blocks.num_free < free
    for id in [ids[0], ids[0], ids[2], 12345]:
        llm.abort(id)
    assert len(llm.step()) == 2  # the other request has come in
    llm.abort(ids[1])
    assert llm.blocks.num_free == free and llm.step() == []


def test_leaving_a_stream_frees_its_blocks() -> None:
    llm = scripted([40])
    streams = [llm.stream([2]), llm.stream([3])]
    assert [next(stream).text for stream in (*streams, *streams)] == ["w40"] * 4  # interleaved
    assert llm.blocks.num_used > 0
    for stream in streams:
        cast(Any, stream).close()
    assert llm.blocks.num_used == 0
    llm.stream([2])  # never read: nothing is queued
    assert llm.step() == []


def test_a_failing_step_leaves_nothing_behind() -> None:
    session = script_session([40])
    llm = LLM("", session=session, tokenizer=word_tokenizer())
    good = session.logits_of

    def fail(token_ids: list[int]) -> Tensor:
        raise RuntimeError("backend")

    session.logits_of = fail
    with pytest.raises(RuntimeError, match="backend"):
        llm.generate([[2]])
    session.logits_of = good
    assert llm.blocks.num_used == 0
    assert llm.generate([[2]], SamplingParams(max_tokens=1))[0].choices[0].text == "w40"


def test_options_are_checked_against_the_engine() -> None:
    fixed = KVLayout(1, 16, {"k": (1, 1), "v": (1, 1)}, "float32", False)
    for option, reason in [
        ({"max_batch": 5}, "max_batch is 5; 1 to 4"),
        ({"max_chunk": 17}, "max_chunk is 17; 1 to 16"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_size": 8}, "block_size is 8; this engine was built for 16 only"),
    ]:
        session = script_session([40], limits=LIMITS, kv=fixed)
        with pytest.raises(InputError, match=reason):
            LLM("", session=session, tokenizer=word_tokenizer(), **cast(Any, option))


def test_the_default_pool_holds_a_full_batch_or_what_memory_allows() -> None:
    manifest = manifest_for(128, limits=LIMITS)
    assert default_blocks(manifest, 16, 4, CPU_POOL_BYTES) == 4 * 2
    assert default_blocks(manifest, 5, 1, CPU_POOL_BYTES) == 7
    pools = {"k": (128, 128), "v": (128, 128)}
    large = dataclasses.replace(manifest, kv=KVLayout(60, 16, pools, "float32", True))
    assert default_blocks(large, 16, 4, CPU_POOL_BYTES) == 8
    longer = dataclasses.replace(large, limits=Limits(4096, 64, 512))
    # 32 GB, and still one sequence; on a GPU, whose memory the engine's other needs have too, not.
    assert default_blocks(longer, 16, 64, CPU_POOL_BYTES) == 4096 // 16
    gpu = dataclasses.replace(longer, device="cuda")
    token = longer.kv.token_bytes
    assert default_blocks(gpu, 16, 64, 1000 * token) == 62
    assert default_blocks(gpu, 16, 2, 10**12) == 2 * 256


def test_engines_are_opened_by_their_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(tmp_path, manifest_for(8, backend="tensorrt", form="padded", device="cuda"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        EngineError, match=r"'tensorrt' is not installed; pip install 'seekforge\[tensorrt\]'"
    ):
        open_session(tmp_path)
