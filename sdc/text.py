"""The grammar of all objects that can be written as one line of text: faults, kinds, latencies, methods, simulations.

    terms    = term { "+" term }                     in languages that allow several terms; a letter must follow the +
    term     = head  |  a call with keywords, as in Python   bitflip(bits=30, rate=1e-4, site="fwd/attn")
             | head { "," setting }                          shorthand: bitflip,bits=30,rate=1e-4,site=fwd/attn
    setting  = key "=" value  |  word
    value    = number | word | numbers joined by "+" | "quoted" | a text of another language

A term is written as a call: the `repr` of the object that it denotes (`write_term`). The shorthand needs no quotes in a
shell. In the shorthand, commas and `+` separate parts only outside brackets and quotes; spaces around separators do not
matter. A head denotes a *form*: a class whose fields are the settings, with their types. A selector is an expression,
written as in Python (`expression`), and can be the value of a setting. docs/languages.md explains the grammar to users.

This module does not import JAX, which loads slowly, so a mistyped line is rejected immediately.
"""

import ast
import dataclasses
import difflib
import json
import numbers
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")
NOTHING: Mapping[str, Any] = MappingProxyType({})
# The largest depth of an expression; each operator in a chain counts as one level. Functions that process an expression
# recurse to its depth, and Python allows only a thousand nested calls, including those of the caller.
DEEPEST = 100


class Form(NamedTuple):
    """The class that a head constructs, and the settings of this class."""

    make: Callable[..., Any]  # the class
    types: Mapping[str, Any]  # type of each setting, or a function that parses it; None for a word without a value
    required: tuple[str, ...] = ()  # settings that must be given
    fixed: Mapping[str, Any] = NOTHING  # fields that the head itself sets, such as the value of `zero`


class Rest(NamedTuple):
    """A setting whose value is a term of another language; without brackets, the value extends to the end of the
    text."""

    read: Callable[[str], Any]


class Term(NamedTuple):
    """A parsed term."""

    head: str  # the first word of the term
    value: Any  # the object that the term denotes
    common: dict[str, Any]  # converted values of the settings that every head of the language can have
    other: dict[str, str]  # unknown settings, verbatim


def form(cls: type, /, *, read: Mapping[str, Any] = NOTHING, **fixed: Any) -> Form:
    """Returns the form of a dataclass. `read` contains a parser for each field that cannot be parsed by its type alone,
    and `fixed` contains the fields that the head itself sets."""
    hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.name not in fixed]
    none = dataclasses.MISSING
    required = tuple(field.name for field in fields if field.default is none and field.default_factory is none)
    return Form(cls, {field.name: hints[field.name] for field in fields} | dict(read), required, fixed)


def read_term(
    language: str,
    text: str,
    forms: Mapping[str, Form],
    *,
    example: str,
    noun: str = "kind",
    common: Mapping[str, Any] = NOTHING,
    open_ended: bool = False,
) -> Term:
    def wrong(problem: str) -> ValueError:
        return ValueError(f"{language} {text!r}: {problem}")

    try:
        head, *settings = _parts(text)
    except (SyntaxError, ValueError) as error:
        problem = "use Python syntax" if isinstance(error, SyntaxError) else str(error)
        raise wrong(f"cannot be parsed; {problem}, as in {example!r}") from None
    if head not in forms:
        raise wrong(f"unknown {noun} {head!r}; expected one of {', '.join(forms)}, as in {example!r}")
    known = {**forms[head].types, **common}
    found: dict[str, Any] = {}
    other: dict[str, str] = {}
    for place, setting in enumerate(settings):
        key, equals, value = (part.strip() for part in setting.partition("="))
        if known.get(key, "") is None and value in ("true", "false"):  # a word written as a keyword argument
            if value == "false":
                continue
            equals = value = ""
        if key in found or key in other:
            raise wrong(f"{key!r} is given twice; give it once")
        if key in known and known[key] is None:
            if equals:
                raise wrong(f"{key!r} takes no value; write {key}=True, or {key} alone in the shorthand")
            found[key] = None
        elif not equals or not value:
            raise wrong(f"{setting!r} is not of the form key=value; write {_pattern(head, known, forms[head])!r}")
        elif key not in known:
            every = {*known, *(key for form in forms.values() for key in form.types)}
            near = [] if key in every else difflib.get_close_matches(key, every, 1, 0.75)
            if near:
                raise wrong(f"unknown key {key!r}; did you mean {near[0]!r}?")
            if (
                open_ended
                and key not in every
                and re.match(r"[+-]?[\d.]", value)
                and not value.lstrip("+-").isdecimal()
            ):
                raise wrong(f"{key}={value}: expected the index of a device along the mesh axis {key!r}, as in {key}=1")
            if key in every or not (open_ended and key.isidentifier() and re.fullmatch(r"[+-]?\d+", value)):
                axes = ", and name=number for a mesh axis, as in model=1" if open_ended else ""
                raise wrong(f"unknown key {key!r}; {noun} {head} takes {', '.join(known) or 'no keys'}{axes}")
            other[key] = value
        elif isinstance(known[key], Rest) and not value.endswith(")"):
            try:
                found[key] = known[key].read(",".join([value, *settings[place + 1 :]]))
            except ValueError as error:
                hint = f"the value of {key} extends to the end of the text; write {key}=(...) to add settings after it"
                raise wrong(f"{error} ({hint})") from error
            break
        else:
            try:
                found[key] = read_value(known[key], value)
            except ValueError as error:
                said = str(error).startswith(f"{key}=")
                raise wrong(str(error) if said else f"{key}={value}: {error}") from error
    if missing := [key for key in forms[head].required if key not in found]:
        raise wrong(f"{missing[0]!r} is missing; write {_pattern(head, known, forms[head])!r}")
    own = {key: found.pop(key) for key in forms[head].types if key in found}
    try:
        return Term(head, forms[head].make(**forms[head].fixed, **own), found, other)
    except ValueError as error:
        raise wrong(str(error)) from error


def _parts(text: str) -> list[str]:
    """Splits a term, written as a call with keywords or in the shorthand with commas, into its head and settings."""
    if not (begin := re.match(r"\s*([\w:-]+)\s*(?=\()", text)):
        return [part.strip() for part in split(text, ",")]
    source = f"_{text[begin.end() :]}".strip()
    call = _tree(source, DEEPEST + 2)  # so that a selector inside the call may use all of its own levels
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise SyntaxError
    words = [ast.unparse(word) for word in call.args]
    return [begin[1], *words, *(f"{each.arg or '**'}={_argument(each.value, source)}" for each in call.keywords)]


def _argument(node: ast.expr, source: str) -> str:
    """Returns the value of a keyword argument in the notation of the shorthand."""
    match node:
        case ast.Constant(str(value)):
            return value if value and value == value.strip() and value[0] != '"' else write_value(value)
        case ast.Constant(bool(value)):
            return str(value).lower()
        case ast.Tuple([element]):
            return f"{_argument(element, source)}+"
        case ast.Tuple(elements) | ast.List(elements):
            return "+".join(_argument(element, source) for element in elements)
        case ast.Call():
            return f"({ast.unparse(node)})"
        case ast.Constant(None | bytes()):
            raise ValueError(
                f"{ast.unparse(node)} is not a valid value; give a number, a string or a tuple, or omit the setting"
            )
        case ast.BinOp(op=ast.Add()):  # several numbers in the shorthand, but a sum in Python
            raise ValueError(f"{ast.unparse(node)} is a sum; write several values as a tuple, as in (30, 31)")
    return ast.get_source_segment(source, node) or ast.unparse(node)


def _pattern(head: str, known: Mapping[str, Any], form: Form) -> str:
    """Returns an example of a term: the head with its required settings."""
    return _call(head, [f"{key}=..." for key in form.required or [key for key in known if known[key]][:1]])


def _call(head: str, settings: Sequence[str]) -> str:
    return f"{head}({', '.join(settings)})" if settings else head


def read_value(kind: Any, text: str) -> Any:
    """Parses a value of a declared type; raises a ValueError that says what was expected.

    The type is `int`, `float`, `bool`, `str`, a `Literal`, a tuple of any number of numbers, a union of these (the
    first member that fits is used), a `Rest`, or a function that parses the text.
    """
    if isinstance(kind, Rest):
        return kind.read(text[1:-1] if text.startswith("(") else text)
    if typing.get_origin(kind) in (typing.Union, UnionType):
        reasons = []
        for member in typing.get_args(kind):
            if member is not NoneType:
                try:
                    return read_value(member, text)
                except ValueError as error:
                    reasons.append(str(error))
        raise ValueError(", or ".join([reasons[0], *(reason.removeprefix("expected ") for reason in reasons[1:])]))
    if typing.get_origin(kind) is tuple:
        member = typing.get_args(kind)[0]
        try:
            return tuple(member(number) for number in re.split(r"(?<![eE])\+", text.removesuffix("+")))
        except ValueError:
            numbers = {int: "whole numbers, as in (0, 2)", float: "numbers, as in (0.1, 0.2)"}
            raise ValueError(f"expected {numbers[member]}, or joined by + in the shorthand") from None
    if typing.get_origin(kind) is Literal:
        if text not in typing.get_args(kind):
            raise ValueError(f"expected one of {', '.join(map(str, typing.get_args(kind)))}")
        return text
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError("expected true or false")
        return text == "true"
    if kind is str:
        if not text.startswith('"'):
            return text
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # Python's parser raises the last two
            found = None
        if not isinstance(found, str):
            raise ValueError("expected a string with a closing quote")
        return found
    if kind not in (int, float):
        return kind(text)
    try:
        return kind(text)
    except ValueError:
        raise ValueError({int: "expected a whole number", float: "expected a number, as in 0.1"}[kind]) from None


def split(text: str, separator: Literal[",", "+"]) -> list[str]:
    """Splits text at commas, or at the `+` between terms, but not inside brackets or quotes.

    A quotation mark begins quoted text only inside brackets or at the start of a value.
    """
    cuts, depth, quote, escaped, before = list[int](), 0, "", False, ""
    for at, character in enumerate(text):
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
            continue
        if (character in "\"'" and depth > 0) or (character == '"' and before == "="):
            quote, escaped = character, False
        depth += (character == "(") - (character == ")")
        if depth <= 0 and character == separator and (separator == "," or re.match(r"\s*[a-z]", text[at + 1 :])):
            cuts.append(at)
        before = character if character.strip() else before
    return [text[a + 1 : b] for a, b in zip([-1, *cuts], [*cuts, len(text)], strict=True)]


def write_term(value: Any, forms: Mapping[str, Form], more: Mapping[str, Any] = NOTHING) -> str:
    """Returns the call that constructs a value: the first matching head, with all non-default settings and those in
    `more`."""
    for head, (make, kinds, _, fixed) in forms.items():
        # Values are compared by `repr`: nan equals nan, and -0.0 differs from 0.0.
        if make is type(value) and all(repr(getattr(value, name)) == repr(given) for name, given in fixed.items()):
            default = {field.name: field.default for field in dataclasses.fields(value)}
            values = {key: getattr(value, key) for key in kinds}
            given = {key: x for key, x in values.items() if write_value(x) != write_value(default[key])}
            for key, x in given.items():  # a tuple of one number is written without brackets
                if typing.get_origin(kinds[key]) is tuple and len(x) == 1:
                    (given[key],) = x
            return _call(head, [f"{key}={write_value(x)}" for key, x in {**given, **more}.items()])
    own = type(value)  # a user's class has no head; its own name is used instead
    return write_term(value, {own.__name__: form(own)}, more)


def write_value(value: Any) -> str:
    """Returns a value as a Python literal, with strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"({', '.join(map(write_value, value))}{',' * (len(value) == 1)})"
    return repr(value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value)


def expression(
    language: str,
    text: str,
    *,
    words: Mapping[str, T],
    calls: Mapping[str, Callable[..., T]],
    example: str,
) -> T:
    """Parses an expression that combines words, and calls with literal arguments, by `&`, `|` and `~`; error messages
    quote `example`."""

    def build(node: ast.expr) -> Any:
        match node:
            case ast.BinOp(left, ast.BitAnd(), right):
                return build(left) & build(right)
            case ast.BinOp(left, ast.BitOr(), right):
                return build(left) | build(right)
            case ast.UnaryOp(ast.Invert(), operand):
                return ~build(operand)
            case ast.Name(name) if name in words:
                return words[name]
            case ast.Call(ast.Name(name), arguments, keywords) if name in calls:
                named = {keyword.arg or "": _literal(keyword.value) for keyword in keywords}
                return calls[name](*map(_literal, arguments), **named)
        raise ValueError(
            f"{ast.unparse(node)!r} is not a {language}; expected {', '.join([*words, *calls])}, combined by &, | or ~"
        )

    try:
        return build(_tree(text))
    except SyntaxError:
        raise ValueError(f"{language} {text!r} cannot be parsed; use Python syntax, as in {example!r}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{language} {text!r}: {error}; for example, write {example!r}") from None


_TOO_DEEP = f"it is nested deeper than {DEEPEST} levels (each operator in a chain counts as one level); simplify it"


def _tree(text: str, deepest: int = DEEPEST) -> ast.expr:
    """Parses text as a Python expression; raises ValueError if the expression is nested too deeply."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (RecursionError, MemoryError):  # raised by Python's parser
        raise ValueError(_TOO_DEEP) from None
    level: list[ast.AST] = [tree]
    for _ in range(deepest + 1):
        children = (child for node in level for child in ast.iter_child_nodes(node))
        level = [child for child in children if isinstance(child, ast.expr | ast.keyword)]
    if level:
        raise ValueError(_TOO_DEEP)
    return tree


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)!r} is neither a number nor a string; enclose strings in quotes") from None
