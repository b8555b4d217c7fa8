"""Recognise classes by the mathematics of their forward, read from its source.

Attribute names say little: of transformers' 184 classes with gate, up and down projections about 20 clamp, scale, norm
or drop out somewhere. So the forward of a class, if it is one straight line of pure assignments, is folded into the
single expression that it returns, with its locals substituted, its helper methods inlined and its argument renamed,
and that expression is compared with the canonical ones below, node by node. What does not fold, has no source, or is
not the source that runs is not recognised, and such a class is never touched. Most classes are ruled out before that,
by the number of names in their bytecode.

Longer functions, which decide and call, are recognised whole instead: `fingerprint` is a hash of what they say.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import inspect
import linecache
import sys
import textwrap
import tokenize
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from accel.outcome import Decline
from accel.serve import wrapped_call
from accel.source_hash import serialise

#: A canonical forward has at most 11 names in its bytecode (5.24); above this no source is looked at.
_MOST_NAMES = 12


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`down(act(gate(x)) * up(x))`: the attribute names. A fused form has one projection for both, and no `up`."""

    gate: str  #: the projection to the gate, or to gate and up, gate first
    up: str | None
    down: str
    act: str

    @property
    def fused(self) -> bool:
        return self.up is None


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x * rsqrt(mean(x^2) + eps) with a weight, maybe a gate: attribute names, and where it is rounded."""

    form: str  #: "cast_then_weight", "weight_in_fp32" or "zero_centred"
    weight: str
    eps: str
    gated: bool = False
    activation: str | None = None  #: attribute that names the gate's activation
    with_scale: str | None = None  #: attribute that is true where there is a weight
    same_dtype: bool = False  #: the form holds only where x and the weight share a dtype (T5)


@dataclass(frozen=True, slots=True)
class _Form:
    """One canonical expression. Capitals are placeholders: for an attribute name after `self.`, in a method's place
    for a call of one."""

    result: str
    meaning: Callable[..., GatedMlp | RmsNorm]
    arguments: tuple[str, ...] = ("x",)


_NORMED = "(x.to(torch.float32) * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.EPS))"
_FLOATED = "(x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.EPS))"
_POWERED = "(x.float() * torch.pow(x.float().pow(2).mean(-1, keepdim=True) + self.EPS, -0.5))"
_T5 = "(x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.EPS))"
_ACTED = "ACT2FN[self.ACTIVATION](gate.to(torch.float32))"


def _norm(form: str, **more: Any) -> Callable[..., RmsNorm]:
    def meaning(WEIGHT: str, EPS: str, ACTIVATION: str | None = None, SCALED: str | None = None) -> RmsNorm:
        return RmsNorm(form, WEIGHT, EPS, activation=ACTIVATION, with_scale=SCALED, **more)

    return meaning


FORMS: tuple[_Form, ...] = (
    _Form(
        "self.DOWN(self.ACT(self.GATE(x)) * self.UP(x))",
        lambda DOWN, ACT, GATE, UP: GatedMlp(GATE, UP, DOWN, ACT),
    ),
    _Form(
        "self.DOWN(self.GATE(x).chunk(2, dim=-1)[1] * self.ACT(self.GATE(x).chunk(2, dim=-1)[0]))",
        lambda DOWN, GATE, ACT: GatedMlp(GATE, None, DOWN, ACT),
    ),
    _Form(f"self.WEIGHT * {_NORMED}.to(x.dtype)", _norm("cast_then_weight")),
    _Form(f"{_FLOATED}.type_as(x) * self.WEIGHT", _norm("cast_then_weight")),
    _Form(
        f"self.WEIGHT * ({_T5}.to(self.WEIGHT.dtype)"
        f" if self.WEIGHT.dtype in [torch.float16, torch.bfloat16] else {_T5})",
        _norm("cast_then_weight", same_dtype=True),
    ),
    _Form(f"(self.WEIGHT * {_NORMED}).to(x.dtype)", _norm("weight_in_fp32")),
    _Form(f"(self.WEIGHT.to(torch.float32) * {_NORMED}).to(x.dtype)", _norm("weight_in_fp32")),
    _Form(f"({_FLOATED} * self.WEIGHT.float()).type_as(x)", _norm("weight_in_fp32")),
    _Form(
        f"({_POWERED} * self.WEIGHT.float() if self.SCALED else {_POWERED}).type_as(x)",
        _norm("weight_in_fp32"),
    ),
    _Form(f"({_FLOATED} * (1.0 + self.WEIGHT.float())).type_as(x)", _norm("zero_centred")),
    _Form(
        f"((self.WEIGHT * {_NORMED}.to(x.dtype)) * {_ACTED}).to(x.dtype)",
        _norm("cast_then_weight", gated=True),
        ("x", "gate"),
    ),
    _Form(
        f"((self.WEIGHT.to(torch.float32) * {_NORMED}) * {_ACTED}).to(x.dtype)",
        _norm("weight_in_fp32", gated=True),
        ("x", "gate"),
    ),
)

_known: weakref.WeakKeyDictionary[FunctionType, tuple[type, GatedMlp | RmsNorm | None]] = weakref.WeakKeyDictionary()


def classes_of(module: ModuleType) -> Iterator[tuple[type, GatedMlp | RmsNorm]]:
    """The classes defined in `module` whose own forward is recognised, each with what it means."""
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__ and "forward" in vars(value):
            meaning = recognise(value)
            if meaning is not None:
                yield value, meaning


def arguments(names: tuple[str, ...], args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """The module and the values of a recognised forward's arguments, None for one left out but the first.

    `args` starts with the module. Raises Decline where they do not fit, so that upstream raises its own error.
    """
    if not keywords and len(args) == len(names) + 1 and args[1] is not None:
        return args
    values = dict(zip(names, args[1:], strict=False))
    if not args or len(args) > len(names) + 1 or any(name in values or name not in names for name in keywords):
        raise Decline("the arguments do not fit the signature")
    values.update(keywords)
    if values.get(names[0]) is None:
        raise Decline(f"{names[0]} is None")
    return (args[0], *(values.get(name) for name in names))


def names_of(cls: type) -> tuple[str, ...]:
    """The argument names of the forward of a recognised class, without self."""
    code: CodeType = _upstreams(vars(cls)["forward"]).__code__
    return code.co_varnames[1 : code.co_argcount]


def recognise(cls: type) -> GatedMlp | RmsNorm | None:
    """What the forward that `cls` itself defines computes, None if it is no canonical form.

    A forward that accel has wrapped, under whatever others have put on top, is looked at as upstream wrote it.
    """
    function = _upstreams(vars(cls).get("forward"))
    if not isinstance(function, FunctionType):
        return None
    owner, meaning = _known.get(function, (None, None))
    if owner is not cls:
        meaning = _look(cls, function)
        _known[function] = cls, meaning
    return meaning


def _upstreams(function: Any) -> Any:
    """What accel has wrapped, where it has."""
    while (call := wrapped_call(function)) is not None:
        function = call.original
    return function


def fingerprint(function: Any, decorators: tuple[str, ...] = ()) -> tuple[str, FunctionType] | None:
    """(hash of a function's source, the undecorated function); None without a source that is what runs.

    The hash is blind to comments, formatting, docstrings and annotations. A wrapper that accel made is looked through;
    others only where they come from the modules named by `decorators` and the source shows as many of them.
    """
    function, layers = _upstreams(function), 0
    while isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        if function.__globals__.get("__name__") not in decorators:
            return None
        function, layers = function.__wrapped__, layers + 1
    if not isinstance(function, FunctionType):
        return None
    try:
        definition = _definition(function)
    except _CannotFoldError:
        return None
    if len(definition.decorator_list) != layers:
        return None
    definition.returns = None
    for node in ast.walk(definition.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return hashlib.sha256(serialise(definition).encode()).hexdigest()[:16], function


def _look(cls: type, function: FunctionType) -> GatedMlp | RmsNorm | None:
    code = function.__code__
    if len(code.co_names) > _MOST_NAMES or not 2 <= code.co_argcount <= 3 or code.co_kwonlyargcount:
        return None
    try:
        expression = _fold(cls, function, depth=0)
    except _CannotFoldError:
        return None
    for form, wanted in _canonical():
        if len(form.arguments) == code.co_argcount - 1:
            names: dict[str, str] = {}
            if _equal(wanted, expression, names) and _globals_are_upstreams(function, expression):
                return form.meaning(**names)
    return None


@functools.cache
def _canonical() -> tuple[tuple[_Form, ast.expr], ...]:
    return tuple((form, _as_expression(form)) for form in FORMS)


def _as_expression(form: _Form) -> ast.expr:
    tree = ast.parse(form.result, mode="eval").body
    places: dict[str, ast.expr] = {
        name: ast.Name(f"${index}", ast.Load()) for index, name in enumerate(("self", *form.arguments))
    }
    return _Substitute(places).visit(tree)  # type: ignore[no-any-return]


class _CannotFoldError(Exception):
    """The function is more than a straight line of pure assignments."""


def _fold(cls: type, function: FunctionType, depth: int) -> ast.expr:
    """The expression that `function` returns, its arguments named $0, $1, ...; helper methods of `cls` inlined.

    Shared parts of it are shared nodes: it is compared, never changed.
    """
    definition = _definition(function)
    arguments = definition.args
    if (
        arguments.vararg
        or arguments.kwarg
        or arguments.kwonlyargs
        or arguments.posonlyargs
        or definition.decorator_list
    ):
        raise _CannotFoldError
    values: dict[str, ast.expr] = {
        argument.arg: ast.Name(f"${index}", ast.Load()) for index, argument in enumerate(arguments.args)
    }
    inline = _Inline(cls, arguments.args[0].arg, depth)
    body = definition.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # the docstring
    for statement in body:
        if isinstance(statement, ast.Return) and statement.value is not None:
            return _evaluate(statement.value, values, inline)
        _assign(statement, values, inline)
    raise _CannotFoldError


def _evaluate(expression: ast.expr, values: dict[str, ast.expr], inline: _Inline) -> ast.expr:
    return _Substitute(values).visit(inline.visit(copy.deepcopy(expression)))  # type: ignore[no-any-return]


def _assign(statement: ast.stmt, values: dict[str, ast.expr], inline: _Inline) -> None:
    """Carry out `a = ...`, `a, b = ...`, or such a statement under an `if`, on the expressions that names stand for."""
    if isinstance(statement, ast.If) and not statement.orelse:
        test = _evaluate(statement.test, values, inline)
        inside = dict(values)
        for inner in statement.body:
            _assign(inner, inside, inline)
        for name, value in inside.items():
            if name not in values:
                raise _CannotFoldError
            if value is not values[name]:
                values[name] = ast.IfExp(test, value, values[name])
        return
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        raise _CannotFoldError
    target, value = statement.targets[0], _evaluate(statement.value, values, inline)
    if isinstance(target, ast.Name):
        values[target.id] = value
    elif isinstance(target, ast.Tuple):
        for index, item in enumerate(target.elts):
            if not isinstance(item, ast.Name):
                raise _CannotFoldError
            values[item.id] = ast.Subscript(value, ast.Constant(index), ast.Load())
    else:
        raise _CannotFoldError


def _definition(function: FunctionType) -> ast.FunctionDef:
    """The syntax tree of `function`, if its source is there and is what runs."""
    try:
        # Not inspect.getsource: it looks through all of sys.modules, where lazy modules import things when asked.
        lines = linecache.getlines(function.__code__.co_filename, function.__globals__)
        block = inspect.getblock(lines[function.__code__.co_firstlineno - 1 :])
        tree = ast.parse(textwrap.dedent("".join(block)))
    except (IndentationError, SyntaxError, ValueError, tokenize.TokenError):
        raise _CannotFoldError from None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef) or hasattr(function, "__wrapped__"):
        raise _CannotFoldError
    # A file that was edited after its import, or code made elsewhere, shows another text than what runs.
    constants = compile(tree, "<recognise>", "exec", dont_inherit=True).co_consts
    if not any(isinstance(shown, CodeType) and _same_code(shown, function.__code__) for shown in constants):
        raise _CannotFoldError
    return tree.body[0]


def _same_code(a: CodeType, b: CodeType) -> bool:
    # Not the bytecode itself: CPython 3.11 calls a function of an imported module by other instructions.
    return _said(a) == _said(b)


def _said(code: CodeType) -> tuple[Any, ...]:
    """Names and constants, those of inner functions and generators included: a code object knows its line."""
    constants = [constant for constant in code.co_consts if not isinstance(constant, str)]  # a docstring is indented
    inner = [_said(constant) if isinstance(constant, CodeType) else constant for constant in constants]
    return set(code.co_names), code.co_varnames, inner


class _Substitute(ast.NodeTransformer):
    """Replaces names by the expressions they stand for."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.values.get(node.id)
        return node if value is None else value


class _Inline(ast.NodeTransformer):
    """Replaces `self.method(...)` by what the class's own method returns."""

    def __init__(self, cls: type, self_name: str, depth: int) -> None:
        self.cls, self.self_name, self.depth = cls, self_name, depth

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        target = node.func
        if not (isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)):
            return node
        if target.value.id != self.self_name or not hasattr(self.cls, target.attr):
            return node  # a submodule, or no attribute of self
        method = vars(self.cls).get(target.attr)
        if not isinstance(method, FunctionType) or self.depth >= 2 or node.keywords:
            raise _CannotFoldError
        if method.__code__.co_argcount != len(node.args) + 1 or len(method.__code__.co_names) > _MOST_NAMES:
            raise _CannotFoldError
        places = {f"${index + 1}": argument for index, argument in enumerate(node.args)}
        inner = _fold(self.cls, method, self.depth + 1)
        return _Substitute(places).visit(copy.deepcopy(inner))  # type: ignore[no-any-return]


def _equal(wanted: Any, found: Any, names: dict[str, str]) -> bool:
    """Whether two syntax trees are equal, placeholders of `wanted` bound to the attribute names of `found`."""
    if isinstance(wanted, ast.Attribute) and wanted.attr.isupper():
        if not (isinstance(found, ast.Attribute) and _equal(wanted.value, found.value, names)):
            return False
        return names.setdefault(wanted.attr, found.attr) == found.attr
    if isinstance(wanted, ast.AST):
        if type(wanted) is not type(found):
            return False
        fields = (field for field in wanted._fields if field not in ("ctx", "kind"))
        return all(_equal(getattr(wanted, field, None), getattr(found, field, None), names) for field in fields)
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(wanted) == len(found)
            and all(_equal(a, b, names) for a, b in zip(wanted, found, strict=True))
        )
    return type(wanted) is type(found) and bool(wanted == found)


def _globals_are_upstreams(function: FunctionType, expression: ast.expr) -> bool:
    """Whether `torch` and `ACT2FN` are what they are called: remote code may name its own things so."""
    used = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)} - {"$0", "$1", "$2"}
    activations = sys.modules.get("transformers.activations")
    meant = {"torch": sys.modules.get("torch"), "ACT2FN": getattr(activations, "ACT2FN", None)}
    return all(meant.get(name) is not None and function.__globals__.get(name) is meant[name] for name in used)
