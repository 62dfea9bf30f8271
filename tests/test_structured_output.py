"""Grammars: masks against brute force over every token, and what the engine makes of them."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru_jax import Engine, SamplingParams, StructuredOutputsParams
from rimuru_jax.models.config import Moe
from rimuru_jax.models.hybrid import hybrid, random_model
from rimuru_jax.structured_output import Grammar, GrammarCompiler
from rimuru_jax.tokenizer import Tokenizer, load_tokenizer
from tests.test_tokenizer import byte_fallback_backend, byte_level_backend, write_folder

VOCAB = 420  # more than the tokenizers have, as of models whose logits are padded
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["town", "village"]},
    },
    "required": ["city", "sizes", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tokenizer"), byte_level_backend(), eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(folder: Path, tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, folder, VOCAB, ())


def allowed(grammar: Grammar) -> set[int]:
    mask = grammar.mask()
    assert mask.dtype == np.int32 and mask.shape == (-(-VOCAB // 32),)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def check_walks(grammar: Grammar, tokenizer: Tokenizer, language: set[str], choose: Callable) -> None:
    """Along a walk the mask holds exactly the tokens that lead towards a text of the language."""
    end = tokenizer.eos_token_ids[0]
    pieces = {
        token: tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.vocab_size)
    }
    text = ""
    while not grammar.done:
        expected = {
            token
            for token, piece in pieces.items()
            if token not in tokenizer.special_token_ids
            and "\ufffd" not in piece  # part of a character: these languages are of whole ASCII ones
            and any(one.startswith(text + piece) for one in language)
        }
        if text in language:
            expected.add(end)
        found = allowed(grammar)
        assert found == expected, text
        token = choose(sorted(found))
        grammar.accept(token)
        if token == end:
            break
        text += pieces[token]
    assert text in language and grammar.error is None and grammar.done


@pytest.mark.parametrize(
    ("params", "language"),
    [
        (StructuredOutputsParams(choice=["cat", "category", 'a "b"\n\\', "the dog"]), {"cat", "category", 'a "b"\n\\', "the dog"}),
        (StructuredOutputsParams(regex="[ab]{1,3}(c|th)?"), {
            "".join(head) + tail
            for n in (1, 2, 3) for head in itertools.product("ab", repeat=n) for tail in ("", "c", "th")
        }),
        (StructuredOutputsParams(json={"enum": [1, "x", [True]]}, disable_any_whitespace=True), {"1", '"x"', "[true]"}),
        (StructuredOutputsParams(grammar='start: pair | "no"\npair: "<" /[01]{2}/ ">"'), {"no", *(f"<{a}{b}>" for a in "01" for b in "01")}),
        (StructuredOutputsParams(grammar='root ::= "yes" | "n" [op]'), {"yes", "no", "np"}),
    ],
    ids=["choice", "regex", "json", "lark", "gbnf"],
)  # fmt: skip
def test_masks_equal_brute_force(compiler, tokenizer, params, language):
    rng = np.random.default_rng(0)
    for _ in range(12):
        check_walks(compiler.compile(params), tokenizer, language, lambda ids: int(rng.choice(ids)))


def test_byte_fallback_tokenizers_have_bytes(tmp_path):
    folder = write_folder(tmp_path, byte_fallback_backend(), eos_token="</s>")
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    grammar = GrammarCompiler(tokenizer, folder, VOCAB, ()).compile(StructuredOutputsParams(choice=["é the"]))
    text = b""
    while not grammar.done:
        token = min(allowed(grammar))  # bytes come first in this vocabulary
        piece = tokenizer.backend.id_to_token(token) or ""
        text += bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") else piece.replace("▁", " ").encode()
        grammar.accept(token)
    assert text.decode() == "é the"


def test_stop_tokens_are_left_out_unless_nothing_else_is_left(compiler, tokenizer):
    (end,) = tokenizer.eos_token_ids
    grammar = compiler.compile(StructuredOutputsParams(regex="a*"))

    def bits(mask: np.ndarray) -> set[int]:
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())

    everything = allowed(grammar)
    assert end in everything and bits(grammar.mask([end])) == everything - {end}
    assert bits(grammar.mask(everything)) == everything


@given(st.data())
@settings(max_examples=25)
def test_any_walk_through_a_schema_is_an_instance(compiler, tokenizer, data):
    grammar = compiler.compile(StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True))
    tokens: list[int] = []
    while not grammar.done:
        choices = sorted(allowed(grammar) - set(tokenizer.eos_token_ids))
        tokens.append(choices[data.draw(st.integers(0, len(choices) - 1))])
        grammar.accept(tokens[-1])
    check_instance(tokenizer.decode(tokens, skip_special_tokens=False))


def check_instance(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"city", "sizes", "kind"} and len(value["city"]) <= 8
    assert value["kind"] in ("town", "village") and len(value["sizes"]) <= 3
    assert all(isinstance(size, int) and 0 <= size <= 99 for size in value["sizes"])


# The engine ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    config = hybrid(
        ("attn",),
        hidden_size=32,
        vocab_size=VOCAB,
        moe=Moe(num_experts=4, num_experts_per_tok=2, intermediate_size=32, normalize=True),
    )
    return Engine(
        random_model(config, "float32"), tokenizer=str(folder), dtype="float32",
        page_pool_bytes=1 << 20, max_model_len=256, max_num_seqs=2,
    )  # fmt: skip


def run(engine: Engine, *params: SamplingParams):
    prompts = [[i + 5, 7, 9] for i in range(len(params))]
    return [output.outputs[0] for output in engine.generate(prompts, list(params), use_tqdm=False)]


def structured(max_tokens: int = 200, seed: int = 0, **what) -> SamplingParams:
    own = {
        name: what.pop(name)
        for name in ("min_tokens", "ignore_eos", "stop", "logit_bias", "n")
        if name in what
    }
    return SamplingParams(
        seed=seed, max_tokens=max_tokens,
        structured_outputs=StructuredOutputsParams(**what), **own,
    )  # fmt: skip


def test_outputs_follow_their_grammar_and_leave_others_alone(engine):
    plain = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    (alone,) = run(engine, plain)
    free, schema = run(engine, plain, structured(json=SCHEMA, disable_any_whitespace=True, seed=1))
    assert free.token_ids == alone.token_ids
    check_instance(schema.text)
    (pattern,) = run(engine, structured(regex="[a-f]{3,9};"))
    (choice,) = run(engine, structured(choice=["yes", "no"], ignore_eos=True, min_tokens=50))
    assert re.fullmatch("[a-f]{3,9};", pattern.text) and choice.text in ("yes", "no")
    assert {output.finish_reason for output in (schema, pattern, choice)} == {"stop"}


def test_every_sample_has_a_grammar_of_its_own(engine):
    params = structured(json=SCHEMA, disable_any_whitespace=True, n=4, seed=5)
    (output,) = engine.generate([[1, 2]], params, use_tqdm=False)
    texts = [part.text for part in output.outputs]
    for text in texts:
        check_instance(text)
    assert len(set(texts)) == 4


def test_length_and_stop_strings_still_end_an_output(engine):
    cut, stopped = run(engine, structured(5, json=SCHEMA), structured(regex="(ab|ba){50}", stop="ba", seed=2))
    assert cut.finish_reason == "length" and len(cut.token_ids) == 5
    assert stopped.finish_reason == "stop" and "ba" not in stopped.text


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({}, "structured_outputs has nothing; wanted exactly one of json, regex"),
        ({"regex": "a", "choice": ["b"]}, "has regex, choice; wanted exactly one"),
        ({"json_object": False}, "json_object is False"),
        ({"choice": []}, "choice is ..; wanted a list of texts"),
        ({"choice": "abc"}, "choice is 'abc'; wanted a list"),
        ({"regex": ""}, "regex is ''; wanted a text that is not empty"),
        ({"json": {"a": {1}}}, "json is not a JSON schema"),
        ({"json": "{"}, "structured_outputs.json cannot be used: EOF while parsing"),
        ({"json": {"type": "foo"}}, "structured_outputs.json cannot be used: Invalid type: foo"),
        ({"json": {"type": "string", "maxLength": 1, "minLength": 2}}, "json cannot be used: Unsatisfiable schema"),
        ({"json": {"not": {"type": "string"}}}, 'json cannot be used: Unimplemented keys: ."not"'),
        ({"regex": "("}, "structured_outputs.regex cannot be used: unclosed group"),
        ({"grammar": "start: b"}, 'structured_outputs.grammar cannot be used: .*unknown name: "b"'),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar cannot be used"),
        ({"regex": "(" * 1000 + ")" * 1000}, "structured_outputs.regex cannot be used"),
        ({"grammar": "start: " + "(" * 5000 + ")" * 5000}, "structured_outputs.grammar cannot be used"),
        ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "recursion limit exceeded"),
        ({"regex": "a" * (1 << 19)}, "regex has 524288 bytes; wanted at most 262144"),
        ({"regex": "\ud800"}, "half of a surrogate pair"),
        ({"json": True, "whitespace_pattern": "("}, "json cannot be used"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_in_one_sentence(engine, what, message):
    with pytest.raises(ValueError, match=message) as refusal:
        run(engine, structured(**what))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 320
    assert not engine.has_unfinished_requests()


def test_parameters_that_contradict_each_other_are_refused(engine, tokenizer):
    with pytest.raises(ValueError, match="allowed_token_ids and structured_outputs"):
        SamplingParams(allowed_token_ids=[1], structured_outputs=StructuredOutputsParams(choice=["a"]))
    with pytest.raises(ValueError, match="structured_outputs is a dict"):
        SamplingParams(structured_outputs={"choice": ["a"]})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="allowed_token_ids has nothing but tokens that end the output"):
        run(engine, SamplingParams(allowed_token_ids=[9], stop_token_ids=[9], min_tokens=1))


def test_models_without_bytes_are_refused(tmp_path):
    params = StructuredOutputsParams(choice=["a"])
    with pytest.raises(ValueError, match="a model in memory has no tokenizer"):
        GrammarCompiler(None, None, 100, (1,)).compile(params)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    with pytest.raises(ValueError, match="wants a model with an end-of-sequence token"):
        GrammarCompiler(Tokenizer(words), tmp_path, 3, ()).compile(params)
    with pytest.raises(ValueError, match="wants a tokenizer whose tokens are bytes"):
        GrammarCompiler(Tokenizer(words), tmp_path, 3, (2,)).compile(params)


def test_a_grammar_that_becomes_too_complex_on_its_way_ends_with_an_error(engine, monkeypatch):
    monkeypatch.setattr(Grammar, "accept", lambda self, token: setattr(self, "error", "too complex"))
    (output,) = run(engine, structured(regex="[a-z]{9}"))
    assert (output.finish_reason, output.stop_reason) == ("error", "structured_outputs: too complex")
