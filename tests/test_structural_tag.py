"""Structural tags: masks against brute force where the texts can be listed, and texts told right from wrong elsewhere."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from rimuru_jax import StructuredOutputsParams
from rimuru_jax.structured_output import GrammarCompiler
from rimuru_jax.tokenizer import Tokenizer, load_tokenizer
from tests.test_structured_output import VOCAB, allowed, check_walks
from tests.test_tokenizer import byte_level_backend, write_folder

DIGIT = {"type": "json_schema", "json_schema": {"enum": [1, 2]}}
TEXT = {"type": "any_text"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = byte_level_backend()
    backend.add_tokens([tokenizers.AddedToken(name, special=False) for name in ("<call>", "<think>")])
    return write_folder(tmp_path_factory.mktemp("tokenizer"), backend, eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(folder: Path, tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, folder, VOCAB, ())


def const(value: str) -> dict:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict, end: str | list[str]) -> dict:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags: dict, triggers=("<f=",), **flags: bool) -> dict:
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **flags}


def params(content: dict) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": content})


@pytest.mark.parametrize(
    ("content", "language"),
    [
        ({"type": "sequence", "elements": [const("a"), {"type": "or", "elements": [const("the"), const('"\n')]}, DIGIT]},
         {"athe1", "athe2", 'a"\n1', 'a"\n2'}),
        ({"type": "repeat", "min": 1, "max": 3, "content": const("the")}, {"the", "thethe", "thethethe"}),
        ({"type": "optional", "content": {"type": "regex", "pattern": "[ab]/"}}, {"", "a/", "b/"}),
        (tag("<a>", {"type": "grammar", "grammar": 'root ::= "x" | "y"'}, ["</a>", "."]),
         {f"<a>{x}{end}" for x in "xy" for end in ("</a>", ".")}),
        ({"type": "tags_with_separator", "tags": [tag("a", DIGIT, ";"), tag("b", const(""), "")],
          "separator": ", ", "stop_after_first": True}, {"", "a1;", "a2;", "b"}),
        (triggered(tag("<f=x>", DIGIT, "!"), tag("<f=y>", const(""), "!"), at_least_one=True, stop_after_first=True),
         {"<f=x>1!", "<f=x>2!", "<f=y>!"}),
    ],
    ids=["sequence", "repeat", "optional", "tag", "separator", "call"],
)  # fmt: skip
def test_masks_equal_brute_force(compiler, tokenizer, content, language):
    rng = np.random.default_rng(0)
    for _ in range(6):
        check_walks(compiler.compile(params(content)), tokenizer, language, lambda ids: int(rng.choice(ids)))


def verdict(compiler: GrammarCompiler, tokenizer: Tokenizer, what: StructuredOutputsParams, text: str) -> str:
    """Whether a text follows, begins one that does, or neither."""
    grammar = compiler.compile(what)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if grammar.done or token not in allowed(grammar):
            return "no"
        grammar.accept(token)
    return "whole" if grammar.done or tokenizer.eos_token_ids[0] in allowed(grammar) else "part"


CALLS = (tag("<f=x>", DIGIT, "</f>"), tag("<f=yy>", const("q"), "</f>"), tag("<f=x2>", TEXT, "</f>"))


@pytest.mark.parametrize(
    ("content", "verdicts"),
    [
        (triggered(*CALLS), {
            "": "whole", "the end": "whole", "a < f=": "whole", "a <f=": "part", "a <f=z": "no", "<f=x>1</f>": "whole",
            "ab <f=x>2</f> <f=yy>q</f>, the": "whole", "<f=x>3": "no", "<f=x>1</g": "no", "<f=x2> </ </f> the": "whole",
        }),
        (triggered(*CALLS, at_least_one=True), {"": "part", "a": "no", "<f=x>1</f>": "whole", "<f=x>1</f>a<f=yy>q</f>": "whole"}),
        (triggered(*CALLS, stop_after_first=True), {"a": "whole", "a<f=x>1</f>": "whole", "a<f=x>1</f>a": "no"}),
        (tag("<t>", TEXT, "</t>"), {"<t>": "part", "<t></t>": "whole", "<t>\n<a</t": "part", "<t>a</t>": "whole", "<t></t>a": "no"}),
        (tag("<t>", triggered(*CALLS), ["</t>", "!"]), {
            "<t>a!": "whole", "<t>a</t>": "whole", "<t>a<f=x>": "part", "<t>a<f=!": "no", "<t>a<f=yy>q</f>b!": "whole", "<t>!a": "no",
        }),
        ({"type": "sequence", "elements": [tag("<t>", TEXT, "</t>"), triggered(*CALLS)]}, {
            "<t>a<f=z</t>b": "whole", "<t>a</t>b<f=z": "no", "<t>a</t><f=x>1</f>.": "whole",
        }),
        ({"type": "tags_with_separator", "tags": [tag("a", DIGIT, ";")], "separator": ",", "at_least_one": True}, {
            "": "part", "a1;": "whole", "a1;,a2;": "whole", "a1;a": "no", "a1;,": "part",
        }),
        ({"type": "star", "content": {"type": "regex", "pattern": "ab"}}, {"": "whole", "abab": "whole", "aba": "part", "b": "no"}),
    ],
    ids=["triggered", "at_least_one", "first", "tag", "inside", "sequence", "separator", "star"],
)  # fmt: skip
def test_free_text_ends_at_triggers_and_ends(compiler, tokenizer, content, verdicts):
    assert {text: verdict(compiler, tokenizer, params(content), text) for text in verdicts} == verdicts


def test_names_of_special_tokens_mean_the_tokens(compiler, tokenizer):
    """'<call>' is a token here, which no text makes; '<think>' is part of free text, and what ends an output is not."""
    content = triggered(tag("<call>x", DIGIT, "<|im_start|>"), triggers=["<call>"])
    verdicts = {
        "a<think>b": "whole", "a<call>": "part", "a<call>x1<|im_start|>": "whole", "<call>y": "no",
        "a<|im_start|>": "no", "<call>x1<call>": "no", "<call>x1<|im_start|><think><call>x": "part",
    }  # fmt: skip
    assert {text: verdict(compiler, tokenizer, params(content), text) for text in verdicts} == verdicts
    grammar = compiler.compile(params(tag("<call>", TEXT, "<think>")))
    assert allowed(grammar) == {tokenizer.backend.token_to_id("<call>")}


def test_the_older_form_is_the_same(compiler, tokenizer):
    old = {
        "type": "structural_tag",
        "triggers": ["<f="],
        "structures": [{"begin": "<f=x>", "schema": {"enum": [1, 2]}, "end": "</f>"}],
    }
    new = params(triggered(tag("<f=x>", DIGIT, "</f>")))
    for given in (old, json.dumps(old)):
        assert compiler.definition(StructuredOutputsParams(structural_tag=given)) == compiler.definition(new)
    assert verdict(compiler, tokenizer, new, "the <f=x>1</f> and") == "whole"


def test_json_within_takes_the_options_of_json(compiler, tokenizer):
    content = tag("<a>", {"type": "json_schema", "json_schema": {"const": [1, 2]}}, "")
    tight = StructuredOutputsParams(structural_tag={"format": content}, disable_any_whitespace=True)
    assert verdict(compiler, tokenizer, params(content), "<a>[1 , 2]") == "whole"
    assert verdict(compiler, tokenizer, tight, "<a>[1 ") == "no"
    assert verdict(compiler, tokenizer, tight, "<a>[1,2]") == "whole"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "must be an object of the type 'structural_tag'"),
        ({"type": "tag"}, "must be an object of the type 'structural_tag'"),
        ({}, "the format None; wanted one of the types const_string, json_schema"),
        ({"format": {"type": "token", "token": 1}}, "the format {'type': 'token'"),
        ({"format": {**TEXT, "max_tokens": 3}}, "any_text has 'max_tokens', which is not supported"),
        ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, "a style or an order of its own"),
        ({"format": {"type": "json_schema"}}, "json_schema is None; wanted a schema"),
        ({"format": {"type": "json_schema", "json_schema": {"type": "no"}}}, "Invalid type: no"),
        ({"format": {"type": "regex", "pattern": "("}}, "unclosed group"),
        ({"format": {"type": "grammar", "grammar": "start: b"}}, 'unknown name: "b"'),
        ({"format": const("a") | {"value": 1}}, "const_string.value is 1; wanted a text"),
        ({"format": {"type": "sequence", "elements": [TEXT, const("a")]}}, "any_text does not know its end"),
        ({"format": {"type": "star", "content": TEXT}}, "any_text does not know its end"),
        ({"format": tag("a", triggered(*CALLS), "")}, "triggered_tags does not know its end"),
        ({"format": tag("a", TEXT, "b<call>")}, "'b<call>' goes on with the special token '<call>'"),
        ({"format": {"type": "or", "elements": []}}, "or.elements is ..; wanted a list of objects"),
        ({"format": {"type": "repeat", "min": 3, "max": 2, "content": const("a")}}, "repeat is from 3 to 2 times"),
        ({"format": triggered(tag("<g>", DIGIT, ""))}, "the tag '<g>' begins with 0 of the triggers"),
        ({"format": triggered(*CALLS, triggers=["<f", "<f="])}, "begins with 2 of the triggers"),
        ({"format": triggered(*CALLS, triggers=[""])}, "triggers are ....; wanted a list of texts"),
        ({"format": triggered(const("<f="))}, "tags has .*; wanted objects of the type 'tag'"),
        ({"format": triggered(*CALLS) | {"at_least_one": 1}}, "at_least_one is 1; wanted true or false"),
        ({"structures": [{"begin": "<f=", "schema": {}}], "triggers": ["<f="]}, "tag.end is None; wanted a text"),
        (json.dumps({"format": const("a" * (1 << 18))}), "wanted at most 262144"),
        ('{"format": ' + '{"type": "star", "content": ' * 5000 + "1" + "}" * 5001, "structural_tag cannot be used"),
    ],
)  # fmt: skip
def test_what_is_no_structural_tag_is_refused_in_one_sentence(compiler, given, message):
    with pytest.raises(ValueError, match=message) as refusal:
        compiler.compile(StructuredOutputsParams(structural_tag=given))
    text = str(refusal.value)
    assert text.startswith("structured_outputs.structural_tag ") and "\n" not in text and len(text) < 320
