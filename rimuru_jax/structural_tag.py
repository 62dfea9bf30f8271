"""Structural tags: outputs of free text and of parts with a structure, as vLLM and XGrammar describe them.

    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [...]}}
    {"type": "structural_tag", "triggers": ["<f="], "structures": [{"begin": ..., "schema": ..., "end": ...}]}

Both become one grammar of llguidance: a main one in Lark's notation, and one beside it for each schema, expression or
grammar within. Free text is a lexeme that ends where a trigger or the end of the tag around it first appears; without
such an end nothing could say where it stops, so that it must come last.
"""

import json
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any

FORMATS = {
    "const_string": {"value"},
    "json_schema": {"json_schema", "style", "any_order"},
    "regex": {"pattern"},
    "grammar": {"grammar"},
    "any_text": set[str](),
    "sequence": {"elements"},
    "or": {"elements"},
    "optional": {"content"},
    "star": {"content"},
    "plus": {"content"},
    "repeat": {"content", "min", "max"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first"},
    "tags_with_separator": {"separator", "tags", "at_least_one", "stop_after_first"},
}
"""What formats there are, and their fields."""

_REPEATS = {"optional": "?", "star": "*", "plus": "+"}

type _Ends = tuple[str, ...] | None
"""What follows a format: one of these texts; none: something else; None: the end of the output."""


def grammar_of(
    tag: Any,
    special_tokens: Mapping[str, int],
    control_tokens: Collection[int],
    part: Callable[[str, Any], dict[str, Any]],
) -> str:
    """The grammar of a structural tag, in llguidance's words.

    Args:
        tag: the decoded JSON.
        special_tokens: id of each token that no text makes. Where its name is in a text, the token itself is meant.
        control_tokens: those of them that are never part of free text. Others are, unless the tag names them.
        part: the grammar of a "json_schema", "regex" or "grammar" with this content, as an entry of llguidance's list.

    Raises ValueError, without a subject, for what is no structural tag.
    """
    if not isinstance(tag, Mapping) or tag.get("type", "structural_tag") != "structural_tag":
        raise ValueError("it must be an object of the type 'structural_tag'")
    content = _triggered_tags(tag) if "structures" in tag else tag.get("format")
    writer = _Writer(special_tokens, part)
    start = writer.write(content, None)
    loose = sorted(set(special_tokens.values()) - set(control_tokens) - writer.named)
    skip = f"(TEXT <[{','.join(map(str, loose))}]>)*" if loose else '""'
    lark = "\n".join([f"start: {start}", *writer.rules, f"skip: {skip}", r"TEXT: /(.|\n)*/", ""])
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": lark}, *writer.parts]})


def _triggered_tags(tag: Mapping[str, Any]) -> dict[str, Any]:
    """The older form in the words of the newer one."""
    tags = []
    for structure in _objects("structures", tag["structures"]):
        schema = structure.get("schema")
        content = {"type": "json_schema", "json_schema": {} if schema is None else schema}
        tags.append({"begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Collects the rules of the main grammar, and the grammars beside it."""

    def __init__(self, special_tokens: Mapping[str, int], part: Callable[[str, Any], dict[str, Any]]) -> None:
        self.rules: list[str] = []
        self.parts: list[dict[str, Any]] = []
        self.named: set[int] = set()
        """Special tokens that the tag has."""
        self._part = part
        self._special_tokens = special_tokens
        names = sorted(map(re.escape, special_tokens), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(names) or '(?!)'})")
        self._known: dict[tuple[str, Hashable], str] = {}
        """Names of rules, by what they say; those of the ends of tags also by these, which may be many."""

    def write(self, content: Any, ends: _Ends) -> str:
        """An expression of a format and of what ends it."""
        kind = content.get("type") if isinstance(content, Mapping) else None
        if kind not in FORMATS:
            raise ValueError(
                f"it has the format {content!r:.80}; wanted one of the types {', '.join(FORMATS)}"
            )
        assert isinstance(content, Mapping)
        if unknown := sorted(set(content) - FORMATS[kind] - {"type"}):
            raise ValueError(f"{kind} has {unknown[0]!r}, which is not supported")
        if kind == "any_text":
            return self._free(kind, ends)
        if kind == "triggered_tags":
            return self._triggered(content, ends)
        if kind == "or":
            options = [
                self.write(element, ends) for element in _objects("or.elements", content.get("elements"))
            ]
            return self._rule(" | ".join(options))
        if kind == "sequence":
            *first, last = _objects("sequence.elements", content.get("elements"))
            return " ".join([*(self.write(element, ()) for element in first), self.write(last, ends)])
        return f"{self._bounded(kind, content)} {self._end(ends)}"

    def _bounded(self, kind: str, content: Mapping[str, Any]) -> str:
        """Formats that know themselves where they end."""
        if kind == "const_string":
            return self._text("const_string.value", content.get("value"))
        if kind == "tag":
            return self._rule(f"{self._text('tag.begin', content.get('begin'))} {self._inside(content)}")
        if kind == "tags_with_separator":
            tags = self._rule(" | ".join(self.write(tag, ()) for tag in _tags(content)))
            separator = self._text(f"{kind}.separator", content.get("separator"))
            more = "" if _flag(content, "stop_after_first") else f"({separator} {tags})*"
            return f"({tags} {more})" + ("" if _flag(content, "at_least_one") else "?")
        if kind == "repeat" or kind in _REPEATS:
            inner = self._rule(self.write(content.get("content"), ()))
            return f"({inner}){_REPEATS.get(kind) or _range(content)}"
        if kind == "json_schema" and (content.get("style", "json") != "json" or content.get("any_order")):
            raise ValueError("json_schema has a style or an order of its own, which is not supported")
        what = content.get("pattern" if kind == "regex" else kind)
        if not isinstance(what, Mapping | bool if kind == "json_schema" else str):
            raise ValueError(
                f"{kind} is {what!r:.80}; wanted a {'schema' if kind == 'json_schema' else 'text'}"
            )
        name = f"part_{len(self.parts)}"
        self.parts.append({**self._part(kind, what), "name": name})
        return f"@{name}"

    def _triggered(self, content: Mapping[str, Any], ends: _Ends) -> str:
        """Free text with tags, each of which begins with its trigger."""
        triggers = content.get("triggers")
        if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers or [0]):
            raise ValueError(f"triggers are {triggers!r:.80}; wanted a list of texts")
        known, lengths = set(triggers), sorted({len(trigger) for trigger in triggers})
        found: dict[str, list[str]] = {}
        whole = []
        for tag in _tags(content):
            begin = _string("tag.begin", tag.get("begin"))
            fitting = [begin[:n] for n in lengths if len(begin) >= n and begin[:n] in known]
            if len(fitting) != 1:
                raise ValueError(
                    f"the tag {begin!r:.80} begins with {len(fitting)} of the triggers; wanted one"
                )
            inside = self._rule(self._inside(tag))
            found.setdefault(fitting[0], []).append(
                f"{self._text('tag.begin', begin[len(fitting[0]) :])} {inside}"
            )
            whole.append(f"{self._text('tag.begin', begin)} {inside}")
        tags = self._rule(
            " | ".join(f"{self._until((trigger,))} ({' | '.join(rest)})" for trigger, rest in found.items())
        )
        first = self._rule(" | ".join(whole))
        at_least_one, only_one = _flag(content, "at_least_one"), _flag(content, "stop_after_first")
        if only_one and at_least_one:
            return f"{first} {self._end(ends)}"
        free = self._free("triggered_tags", ends)
        if only_one:
            return self._rule(f"{tags} {self._end(ends)} | {free}")
        return f"{first if at_least_one else ''} {tags}* {free}"

    def _inside(self, tag: Mapping[str, Any]) -> str:
        """Content and end of a tag."""
        end = tag.get("end")
        ends = tuple(_string("tag.end", text) for text in (end if isinstance(end, list) and end else [end]))
        return self.write(tag.get("content"), () if ends == ("",) else ends)

    def _free(self, kind: str, ends: _Ends) -> str:
        if ends is None:
            return "skip TEXT"
        if not all(ends) or not ends:
            raise ValueError(
                f"{kind} does not know its end; it must come last, or be what a tag with an end has"
            )
        return self._until(ends)

    def _until(self, ends: tuple[str, ...]) -> str:
        """Free text up to the first appearance of one of these, which is part of it."""
        if ("until", ends) in self._known:
            return self._known["until", ends]
        options = []
        for end in ends:
            text = self._text("tag.end", end)
            # A lexeme can have no special token; before one, text ends by itself.
            special = self._special.search(end)
            if special and special.start():
                raise ValueError(
                    f"{end!r:.80} goes on with the special token {special[0]!r}, but it must be text or begin with it"
                )
            options.append(f"TEXT {text}" if special else self._rule(f"TEXT {text}", "[lazy]"))
        self._known["until", ends] = name = self._rule(f"skip ({' | '.join(options)})")
        return name

    def _end(self, ends: _Ends) -> str:
        if not ends:
            return ""
        if ("end", ends) not in self._known:
            texts = (self._text("tag.end", end) or '""' for end in ends)
            self._known["end", ends] = self._rule(" | ".join(texts))
        return self._known["end", ends]

    def _text(self, name: str, text: Any) -> str:
        """Exactly this text."""
        terms = []
        for piece in filter(None, self._special.split(_string(name, text))):
            token = self._special_tokens.get(piece)
            terms.append(json.dumps(piece, ensure_ascii=False) if token is None else f"<[{token}]>")
            self.named |= set() if token is None else {token}
        return " ".join(terms)

    def _rule(self, expression: str, attributes: str = "") -> str:
        """The name of a rule, one for all equal ones."""
        key = attributes, expression
        if key not in self._known:
            self._known[key] = name = f"r{len(self.rules)}"
            self.rules.append(f"{name}{attributes}: {expression}")
        return self._known[key]


def _tags(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tags = _objects("tags", content.get("tags"))
    if wrong := [tag for tag in tags if tag.get("type", "tag") != "tag"]:
        raise ValueError(f"tags has {wrong[0]!r:.80}; wanted objects of the type 'tag'")
    return [{**tag, "type": "tag"} for tag in tags]


def _objects(name: str, value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
        raise ValueError(f"{name} is {value!r:.80}; wanted a list of objects")
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r:.80}; wanted a text")
    return value


def _flag(content: Mapping[str, Any], name: str) -> bool:
    value = content.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.80}; wanted true or false")
    return value


def _range(content: Mapping[str, Any]) -> str:
    low, high = content.get("min"), content.get("max")
    whole: Iterable[bool] = (isinstance(n, int) and not isinstance(n, bool) for n in (low, high))
    if not all(whole) or low < 0 or not (high == -1 or high >= low):  # type: ignore[operator]
        raise ValueError(
            f"repeat is from {low!r:.20} to {high!r:.20} times; wanted 0 <= min <= max, or max -1"
        )
    return f"{{{low},{'' if high == -1 else high}}}"
