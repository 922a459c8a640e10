"""Chat templates, compiled so that none can go on for ever.

A template is a program that came with a model, and clients choose what it loops over. Every pass of
a loop and every call of a macro first spends from the rendering's budget: CPU seconds of its own
thread, so that a busy machine is no reason to fail. Texts and numbers that one operator could blow
up are bounded too. What is over its budget is not rendered here; its request is served all the
same, placed on load alone.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from datetime import datetime
from itertools import repeat
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes

from router.errors import KvrouteError

MAX_TEXT_CHARS = 16 << 20
MAX_ITEMS = 1 << 20
MAX_NUMBER_BITS = 1 << 14
_FREE_STEPS = 64
_STEPS_PER_LOOK = 32
"""Reading the clock is a system call, which a step alone is not worth."""
_BUDGET = "kvroute_budget"
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)")
_DICT_ATTRIBUTES = frozenset(dir(dict))


class RenderError(KvrouteError):
    """This request cannot be rendered here; the engine will say what is wrong with it."""


class OverBudget(RenderError):
    """Rendering took too long, or became too large."""


class Limits(NamedTuple):
    """Of one rendering."""

    cpu_s: float = 1.0
    chars: int = MAX_TEXT_CHARS


class ChatTemplate:
    """A compiled template. Raises jinja2.TemplateSyntaxError when it cannot be."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        code = environment.compile(_with_ticks(environment, source))
        # A plain dictionary in place of a chain of them, which is walked at every rendering.
        found = dict(environment.globals)
        self._template = jinja2.Template.from_code(environment, code, found)
        self._template.globals = found

    def render(self, variables: Mapping[str, Any], limits: Limits) -> str:
        """The text. Raises OverBudget past the limits, and anything that the template raises."""
        text = self._template.render(variables, **{_BUDGET: _steps(limits.cpu_s)})
        if len(text) > limits.chars:
            raise OverBudget(f"the prompt has {len(text)} characters")
        return text


def _steps(cpu_s: float) -> Iterator[None]:
    """One item for each step, until the thread's clock says that it is enough: OverBudget.

    The first steps are free, so that most chats do not look at the clock at all.
    """
    yield from repeat(None, _FREE_STEPS)
    end_s = time.thread_time() + cpu_s
    while time.thread_time() < end_s:
        yield from repeat(None, _STEPS_PER_LOOK)
    raise OverBudget(f"not rendered within {cpu_s:g} s of computing")


def _with_ticks(environment: jinja2.Environment, source: str) -> nodes.Template:
    """The template, with a step in front of each body that may run more than once.

    A filter is called directly, without the sandbox's checks of a call, and its argument keeps the
    compiler from working it out beforehand.
    """
    parsed = environment.parse(source)
    repeated: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
        *parsed.find_all(nodes.For),
        *parsed.find_all(nodes.Macro),
        *parsed.find_all(nodes.CallBlock),
    ]
    for node in repeated:
        name = nodes.Name(_BUDGET, "load")
        tick = nodes.ExprStmt(nodes.Filter(name, _BUDGET, [], [], None, None))
        tick.set_lineno(node.lineno, override=True)
        tick.set_environment(environment)
        node.body.insert(0, tick)
    return parsed


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Finds `message.role` in a dictionary at once; the sandbox tries attributes first."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not dict or attribute in _DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        try:
            return obj[attribute]
        except KeyError:
            return self.undefined(obj=obj, name=attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """One of the operators whose result may be far larger than what they are given."""
        if operator == "%":
            if isinstance(left, str) and _WIDE.search(left):
                raise OverBudget("a format that is too wide")
        elif _size_of(operator, left, right) > 1:
            raise OverBudget(f"`{operator}` of what is too large")
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The whole of a text, or of a macro's; its pieces may be the same one many times over."""
        parts = list(pieces)
        if sum(map(len, parts)) > MAX_TEXT_CHARS:
            raise OverBudget("the text is too long")
        return "".join(parts)


class _Namespace(jinja2.utils.Namespace):
    """Texts that grow from pass to pass can do so only here: `set` does not outlive a pass."""

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, str) and len(value) > MAX_TEXT_CHARS:
            raise OverBudget("a text that grows and grows")
        super().__setitem__(name, value)


def _size_of(operator: str, left: Any, right: Any) -> float:
    """How large a product or power will be, as a share of what is allowed."""
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, Sized) and isinstance(times, int):
            most = MAX_TEXT_CHARS if isinstance(repeated, str) else MAX_ITEMS
            return len(repeated) * times / most
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else (left | right).bit_length()
        return bits / MAX_NUMBER_BITS
    return 0.0


def _environment() -> jinja2.Environment:
    """The sandbox and helpers that chat templates are written against."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters[_BUDGET] = next  # in C: a step costs next to nothing
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """Plain JSON: jinja's own filter escapes HTML, which no template wants."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # local time, as the engine's own helper
