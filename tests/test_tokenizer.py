"""The tokenizer against transformers, chat templates, and streaming detokenization against whole-text references."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from rimuru_jax.tokenizer import (
    IncrementalDetokenizer,
    Tokenizer,
    load_tokenizer,
    read_eos_token_ids,
    require_tokenizer,
)

CORPUS = [
    "the theory of the thermometer and other things",
    "an apple and another apple, naïve café, Ünïcödé",
    "日本語の文章と中文的句子",
    "😀😃👩‍👩‍👧‍👦 emoji and e\u0301 combining",
    "def f(x):\n    return x  # 2024-01-31",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  leading and trailing  ",
    "tabs\tand\r\nlines\n\n",
    "<|im_start|>user\nhi<|im_end|>",
    "half <|im_ of a special token",
    "1234567890",
    "👨🏽‍🚀🇪🇺 zero\u200dwidth \ufffd \x00 \U0010ffff",
]
CHATML = (
    "{% for m in messages %}\n"
    "    {%- if m.role == 'forbidden' %}{{ raise_exception('no ' + m.role) }}{% endif %}\n"
    "{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\\n' }}"
    "{% if loop.index == 9 %}{% break %}{% endif %}"
    "{% endfor %}\n"
    "{% if tools is not none %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\\n' }}{% endif %}"
    "{% if thinking is defined %}{{ thinking }}{% endif %}"
)


def byte_level_backend() -> tokenizers.Tokenizer:
    """GPT-2's kind: bytes first, some merges, special tokens, and a post-processor that opens with one."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", pair=None, special_tokens=[("<|endoftext|>", 0)]
    )
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """SentencePiece's kind: a mark for spaces, characters that are unknown as bytes."""
    letters = list("abcdefghijklmnopqrstuvwxyz▁é")
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "n"), ("▁", "a"), ("▁", "▁")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pieces += [left + right for left, right in merges]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    return backend


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **config: object) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(
        tmp_path,
        byte_level_backend(),
        bos_token="<|im_start|>",
        eos_token={"__type": "AddedToken", "content": "<|im_end|>"},
        chat_template=CHATML,
    )


def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


BYTE_LEVEL = Tokenizer(byte_level_backend())
BYTE_FALLBACK = Tokenizer(byte_fallback_backend())


def single_bytes(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The same byte-level vocabulary without merges: every byte is a token."""
    backend = tokenizers.Tokenizer(models.BPE(tokenizer.backend.get_vocab(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


SINGLE_BYTES = single_bytes(BYTE_LEVEL)


def token_id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.backend.token_to_id(token)
    assert token_id is not None
    return token_id


def pieces_of(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


# Encoding, decoding, loading


@pytest.mark.parametrize("backend", [byte_level_backend, byte_fallback_backend])
def test_equals_transformers(tmp_path: Path, backend) -> None:
    transformers = pytest.importorskip("transformers")
    write_folder(tmp_path, backend(), eos_token="</s>" if backend is byte_fallback_backend else "<|im_end|>")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = loaded(tmp_path)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id is not None
    assert ours.special_token_ids == set(theirs.all_special_ids) | {
        i for i, token in theirs.added_tokens_decoder.items() if token.special
    }
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip
                )


def test_post_processor_decides_about_bos(folder: Path) -> None:
    tokenizer = loaded(folder)
    plain = tokenizer.encode("the apple", add_special_tokens=False)
    assert tokenizer.encode("the apple") == [0, *plain]


def test_long_prompts_are_neither_cut_nor_padded(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = loaded(write_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode(CORPUS[0])) == CORPUS[0]
    assert len(tokenizer.encode("a")) == 2


def test_text_with_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        BYTE_LEVEL.encode("ab\ud83d")


def test_spaces_between_special_tokens() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"hello": 0, "world": 1}, unk_token="hello"))
    backend.add_special_tokens(["<a>", "<b>"])
    tokenizer = Tokenizer(backend)
    ids = [2, 3, 0, 1, 3, 3, 0]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<a> <b> hello world <b> <b> hello"
    joined = tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert joined == "<a><b> hello world <b><b> hello"
    detokenizer = IncrementalDetokenizer(
        tokenizer, skip_special_tokens=False, spaces_between_special_tokens=False
    )
    assert "".join(pieces_of(detokenizer, ids)) == joined


def test_tokens_of_the_config_are_added(tmp_path: Path) -> None:
    backend = byte_level_backend()
    new = backend.get_vocab_size()
    declared = {
        str(new): {"content": "<tool>", "special": True},
        "2": {"content": "<|im_end|>", "special": True},
    }
    tokenizer = loaded(write_folder(tmp_path, backend, added_tokens_decoder=declared))
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [new]
    assert new in tokenizer.special_token_ids


def test_contradicting_ids_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level_backend(), added_tokens_decoder={"7": {"content": "<|im_end|>"}})
    with pytest.raises(ValueError, match=r"'<\|im_end\|>' the id 7, but .* gives it 2"):
        load_tokenizer(tmp_path)


def test_missing_tokenizer_only_matters_for_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is None
    with pytest.raises(ValueError, match=r"no tokenizer\.json.*token ids"):
        require_tokenizer(tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", r"tokenizer\.json is not a tokenizer"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "a JSON list, but an object is wanted"),
    ],
)
def test_broken_files_are_named(folder: Path, name: str, content: str, message: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(folder)


def test_eos_token_ids(folder: Path) -> None:
    assert loaded(folder).eos_token_ids == (2,)
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 5}}))
    assert read_eos_token_ids(folder) == (5,)
    assert loaded(folder).eos_token_ids == (5, 2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert loaded(folder).eos_token_ids == (0, 2)


# Chat templates

CHAT = [
    {"role": "system", "content": "Be brief. <b>"},
    {"role": "user", "content": "Why the 😀?\n  \n"},
    {"role": "assistant", "content": "naïve", "name": None},
]


def test_chat_template_equals_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = loaded(folder)
    tools = [{"type": "function", "function": {"name": "<f>", "description": "é"}}]
    all_options: list[dict[str, Any]] = [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "tools": tools},
        {"add_generation_prompt": True, "thinking": "yes", "bos_token": "[BOS]"},
    ]
    for options in all_options:
        text = ours.apply_chat_template(CHAT, tokenize=False, **options)
        assert text == theirs.apply_chat_template(CHAT, tokenize=False, **options)
        ids = theirs.apply_chat_template(CHAT, return_dict=False, **options)
        assert ours.apply_chat_template(CHAT, **options) == ids


def test_chat_text(folder: Path) -> None:
    text = loaded(folder).apply_chat_template(CHAT[:1], tokenize=False)
    assert text == "<|im_start|>system\nBe brief. <b><|im_end|>\n<|im_start|>assistant\n"


def test_text_parts_are_joined(folder: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    tokenizer = loaded(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": parts}]) == (
        tokenizer.apply_chat_template([{"role": "user", "content": "one\ntwo"}])
    )


def test_template_file_precedes_the_config(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert loaded(folder).apply_chat_template(CHAT[:1], tokenize=False) == "Be brief. <b>!"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = loaded(write_folder(tmp_path, byte_level_backend(), chat_template=named))
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "plain"
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, tools=[]) == "tools"
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, chat_template="tool_use") == "tools"
    only = Tokenizer(tokenizer.backend, chat_templates={"rag": "x"})
    with pytest.raises(ValueError, match="choose one of rag"):
        only.apply_chat_template(CHAT)


def test_strftime_now(folder: Path) -> None:
    text = loaded(folder).apply_chat_template(CHAT, tokenize=False, chat_template="{{ strftime_now('%Y') }}")
    assert text.isdecimal() and len(text) == 4


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("hello", "must be a list"),
        ([{"content": "x"}], "message 0 must be an object with a string as 'role'"),
        ([CHAT[0], "x"], "message 1 must be an object"),
        ([{"role": "user"}], "message 0 has neither 'content'"),
        ([{"role": "user", "content": 5}], "must be a string or a list, got 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "may only have parts .*image_url"),
        ([{"role": "forbidden", "content": ""}], "the chat template fails on these messages: no forbidden"),
    ],
)
def test_bad_messages_are_refused(folder: Path, messages, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loaded(folder).apply_chat_template(messages)


def test_bad_templates_are_refused(folder: Path) -> None:
    tokenizer = loaded(folder)
    for template in ("{% if %}", "{{ missing.attribute }}", "{{ messages.append(1) }}", "{{ 1 + '1' }}"):
        with pytest.raises(ValueError, match="the chat template fails"):
            tokenizer.apply_chat_template(CHAT, chat_template=template)
    with pytest.raises(ValueError, match="no chat template; give one"):
        BYTE_LEVEL.apply_chat_template(CHAT)


# Streaming

unicode_text = st.lists(
    st.one_of(
        st.text(max_size=5),
        st.sampled_from(["😀", "👩‍👩‍👧‍👦", "e\u0301", "日本語", "🇪🇺", "\ufffd", " the", "<|im_end|>"]),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(unicode_text, st.data())
def test_pieces_join_to_the_text_however_it_is_split(chunks: list[str], data: st.DataObject) -> None:
    ids: list[int] = []
    for chunk in chunks:
        backend = data.draw(st.sampled_from([BYTE_LEVEL.backend, SINGLE_BYTES]))
        ids += backend.encode(chunk, add_special_tokens=False).ids
    skip = data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, skip_special_tokens=skip)
    pieces = pieces_of(detokenizer, ids)
    assert "".join(pieces) == detokenizer.text == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=80), st.booleans())
def test_any_tokens_give_only_certain_text(ids: list[int], skip: bool) -> None:
    """Also broken UTF-8: what is out is a prefix of the whole text, and only an unfinished end is missing."""
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, skip_special_tokens=skip)
    for count, token_id in enumerate(ids, start=1):
        detokenizer.add(token_id)
        assert whole.startswith(detokenizer.text)
        so_far = BYTE_LEVEL.decode(ids[:count], skip_special_tokens=skip)
        assert detokenizer.text == so_far or so_far.endswith("\ufffd")
    detokenizer.finish()
    assert detokenizer.text == whole


@settings(deadline=None)
@given(
    st.sampled_from([BYTE_LEVEL, BYTE_FALLBACK]),
    st.lists(st.one_of(st.integers(0, 20), st.integers(0, BYTE_LEVEL.vocab_size + 3)), max_size=80),
    unicode_text,
    st.lists(st.integers(0, 100), max_size=5),
    st.booleans(),
)
def test_many_tokens_at_once_are_as_one_by_one(
    tokenizer: Tokenizer, broken: list[int], chunks: list[str], cuts: list[int], skip: bool
) -> None:
    whole = tokenizer.encode("".join(chunks), add_special_tokens=False)
    for ids in (whole, broken, [*whole, *broken, *whole]):
        one, many = (
            IncrementalDetokenizer(tokenizer, prompt_token_ids=whole[:3], skip_special_tokens=skip)
            for _ in range(2)
        )
        for begin, end in pairwise(sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})):
            for token_id in ids[begin:end]:
                one.add(token_id)
            many.extend(ids[begin:end])
            assert many.text == one.text
        assert many.finish() == one.finish()


@settings(deadline=None)
@given(st.lists(st.integers(0x80, 0xFF), min_size=40, max_size=200))
def test_long_broken_utf8(data: list[int]) -> None:
    alphabet = byte_alphabet()
    ids = [token_id_of(BYTE_LEVEL, alphabet[byte]) for byte in data]
    expected = bytes(data).decode("utf-8", errors="replace")
    assert "".join(pieces_of(IncrementalDetokenizer(BYTE_LEVEL), ids)) == expected


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next one from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = (chr(256 + i) for i in range(256))
    return [chr(byte) if byte in printable else next(rest) for byte in range(256)]


@settings(deadline=None)
@given(st.lists(st.one_of(st.text(max_size=6), st.sampled_from([" the", "  an", "日本", "é"])), max_size=6))
def test_byte_fallback_pieces_join_to_the_text(chunks: list[str]) -> None:
    ids = BYTE_FALLBACK.encode("".join(chunks))
    pieces = pieces_of(IncrementalDetokenizer(BYTE_FALLBACK), ids)
    assert "".join(pieces) == BYTE_FALLBACK.decode(ids)


def test_characters_come_out_whole() -> None:
    ids = SINGLE_BYTES.encode("a€😀b", add_special_tokens=False).ids
    pieces = pieces_of(IncrementalDetokenizer(BYTE_LEVEL), ids)
    assert pieces == ["a", "", "", "€", "", "", "", "😀", "b", ""]
    fallback = [token_id_of(BYTE_FALLBACK, f"<0x{byte:02X}>") for byte in "€😀".encode()]
    assert pieces_of(IncrementalDetokenizer(BYTE_FALLBACK), fallback) == ["", "", "€", "", "", "", "😀", ""]


def test_an_unfinished_character_comes_at_the_end() -> None:
    ids = SINGLE_BYTES.encode("a😀", add_special_tokens=False).ids[:-1]
    assert pieces_of(IncrementalDetokenizer(BYTE_LEVEL), ids) == ["a", "", "", "", "\ufffd"]


def test_the_prompt_keeps_the_first_space() -> None:
    prompt = BYTE_FALLBACK.encode("the")
    ids = [token_id_of(BYTE_FALLBACK, "▁the")]
    assert BYTE_FALLBACK.decode(ids) == "the"
    assert pieces_of(IncrementalDetokenizer(BYTE_FALLBACK), ids) == ["the", ""]
    assert pieces_of(IncrementalDetokenizer(BYTE_FALLBACK, prompt_token_ids=prompt), ids) == [" the", ""]


def test_ids_without_text_do_not_take_the_space_of_the_next() -> None:
    word, nothing = token_id_of(BYTE_FALLBACK, "▁the"), BYTE_FALLBACK.vocab_size + 1
    pieces = pieces_of(IncrementalDetokenizer(BYTE_FALLBACK), [word, nothing, word])
    assert "".join(pieces) == BYTE_FALLBACK.decode([word, nothing, word]) == "the the"


class CountingTokenizer(Tokenizer):
    """Notes how many ids each decode looks at."""

    def decoder(
        self, skip_special_tokens: bool, spaces_between_special_tokens: bool
    ) -> Callable[[list[int]], str]:
        decode = super().decoder(skip_special_tokens, spaces_between_special_tokens)
        self.work: list[int] = []

        def counting(token_ids: list[int]) -> str:
            self.work.append(len(token_ids))
            return decode(token_ids)

        return counting


@pytest.mark.parametrize("kind", ["words", "broken bytes", "special tokens"])
def test_cost_per_token_does_not_grow(kind: str) -> None:
    tokenizer = CountingTokenizer(byte_level_backend())
    broken = token_id_of(BYTE_LEVEL, byte_alphabet()[0x80])
    ids = {
        "words": BYTE_LEVEL.encode("the apple "),
        "broken bytes": [broken] * 9,
        "special tokens": [1, 2] * 5,
    }
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["zzz"])
    pieces_of(detokenizer, ids[kind] * 100)
    assert max(tokenizer.work) <= 40
    assert len(tokenizer.work) <= 2 * 100 * len(ids[kind]) + 2


# Stop strings

ASCII_IDS = [
    token_id
    for token_id in range(BYTE_LEVEL.vocab_size)
    if (text := BYTE_LEVEL.decode([token_id])) and set(text) <= set("then ao")
]


def brute_force_stop(text: str, stops: list[str], first_end: int, include: bool) -> tuple[str, str | None]:
    """The cut text and the stop, by trying every end; stops must end behind ``first_end`` characters."""
    for end in range(first_end + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(deadline=None)
@given(
    ids=st.lists(st.sampled_from(ASCII_IDS), max_size=30),
    stops=st.lists(st.text("then ao", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_stops_equal_brute_force(ids: list[int], stops: list[str], include: bool, min_tokens: int) -> None:
    detokenizer = IncrementalDetokenizer(
        BYTE_LEVEL, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    text = BYTE_LEVEL.decode(ids)
    first_end = len(BYTE_LEVEL.decode(ids[:min_tokens]))
    expected, stop = brute_force_stop(text, stops, first_end, include)
    for token_id in ids:
        detokenizer.add(token_id)
        assert expected.startswith(detokenizer.text)
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.stop_reason) == (expected, stop)


@settings(deadline=None)
@given(
    text=st.text("😀é日a", max_size=20), stops=st.lists(st.text("😀é日a", min_size=1, max_size=3), max_size=3)
)
def test_stops_of_many_bytes(text: str, stops: list[str]) -> None:
    ids = SINGLE_BYTES.encode(text, add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=stops)
    pieces = pieces_of(detokenizer, ids)
    assert ("".join(pieces), detokenizer.stop_reason) == brute_force_stop(text, stops, 0, include=False)


def test_only_a_possible_start_is_held_back() -> None:
    ids = SINGLE_BYTES.encode("xa ab abc", add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=["abc"])
    assert pieces_of(detokenizer, ids) == ["x", "", "a ", "", "", "ab ", "", "", "", ""]
    assert (detokenizer.text, detokenizer.stop_reason) == ("xa ab ", "abc")


def test_held_text_comes_at_the_end() -> None:
    ids = SINGLE_BYTES.encode("xab", add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=["abc"])
    assert pieces_of(detokenizer, ids) == ["x", "", "", "ab"]
    assert detokenizer.stop_reason is None


def test_tokens_after_a_stop_are_ignored() -> None:
    ids = SINGLE_BYTES.encode("a.b.", add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=["."], include_stop_str_in_output=True)
    assert pieces_of(detokenizer, ids) == ["a", ".", "", "", ""]


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="stop holds an empty string"):
        IncrementalDetokenizer(BYTE_LEVEL, stop=["a", ""])
