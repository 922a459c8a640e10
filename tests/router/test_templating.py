"""Templates render as plain jinja renders them, and none of them goes on for ever."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.tokenizer import default_folder
from router.templating import (
    MAX_TEXT_CHARS,
    ChatTemplate,
    Limits,
    OverBudget,
    _raise,
    _strftime_now,
    _to_json,
)
from tests.router.support import answer_ok, chat, running_gateway, scripted


@lru_cache
def bounded(source: str) -> ChatTemplate:
    return ChatTemplate(source)


@lru_cache
def plain(source: str) -> jinja2.Template:
    """The same helpers in jinja's own sandbox, as an engine has it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


TEMPLATES = {
    "ours": (default_folder() / "chat_template.jinja").read_text(),
    "loop's own": (
        "{% for m in messages %}{{ loop.index0 }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}"
        "{{ loop.previtem.role if not loop.first }}{{ loop.cycle('a', 'b') }}"
        "{{ loop.changed(m.role) }}{{ loop.depth }}{{ m.content }}{% else %}nobody{% endfor %}"
    ),
    "filtered, broken off and gone on with": (
        "{% for m in messages if m.role != 'system' %}{% if loop.index is divisibleby 3 %}"
        "{% continue %}{% elif loop.index0 % 7 == 6 %}{% break %}{% endif %}{{ m.role }};"
        "{% else %}none{% endfor %}"
    ),
    "namespaces and reversal": (
        "{% set ns = namespace(last=-1, seen='') %}{% for m in messages[::-1] %}"
        "{% if ns.last < 0 and m.role == 'user' %}{% set ns.last = messages|length - loop.index %}"
        "{% endif %}{% set ns.seen = ns.seen ~ m.role[0] %}{% endfor %}{{ ns.last }}{{ ns.seen }}"
    ),
    "macros, calls and recursion": (
        "{%- macro line(m, mark='-') -%}{{ mark * 3 }}{{ m.role }}{{ caller() if caller }}"
        "{%- endmacro -%}{% for m in messages %}{{ line(m, mark='=') }}"
        "{% call line(m) %}{% for c in m.content[:3] %}{{ c }}.{% endfor %}{% endcall %}"
        "{% endfor %}"
        "{% for part in [1, [2, [3]], 4] recursive %}"
        "{{ loop(part) if part is iterable else part }}{% endfor %}"
    ),
    "blocks of text and numbers": (
        "{% set all %}{% for m in messages %}{{ m | tojson }}\n{% endfor %}{% endset %}"
        "{{ all | trim | indent(2) }}{{ '%s and %05d' % ('x', 7) }}{{ 2 ** 10 }}{{ 7 * 6 }}"
        "{{ [0] * 3 }}{{ 'ab' * 2 }}{{ 1.5 * 2 }}{{ messages | map(attribute='role') | join(',') }}"
    ),
    "whitespace control": (
        "  {%- for m in messages -%}\n  {{- m.role -}}  \n{% endfor %}\n"
        "  {% if tools %}x{% endif %}"
    ),
}
texts = st.text(max_size=12)
messages_of_any_kind = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": texts}),
    max_size=40,
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=messages_of_any_kind, last=st.booleans())
def test_the_text_is_jinjas_own(name: str, messages: list[dict[str, str]], last: bool) -> None:
    given = {"messages": messages, "tools": None, "add_generation_prompt": last, "bos_token": "<s>"}
    expected = plain(TEMPLATES[name]).render(given)
    assert bounded(TEMPLATES[name]).render(given, Limits()) == expected


ENDLESS = {
    "loops in loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}"
    ),
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a loop that calls itself twice": (
        "{% for n in [60] recursive %}{% if n %}{{ loop([n - 1, n - 1]) }}{% endif %}{% endfor %}"
    ),
    "a block that is called without end": (
        "{% macro twice(n) %}{{ caller(n) }}{{ caller(n) }}{% endmacro %}"
        "{% macro f(n) %}{% call(m) twice(n) %}{% if m %}{{ f(m - 1) }}{% endif %}{% endcall %}"
        "{% endmacro %}{{ f(60) }}"
    ),
}
HUGE = {
    "a text many times over": "{{ 'x' * 10 ** 12 }}",
    "many times a text": "{{ 10 ** 12 * 'x' }}",
    "a list many times over": "{{ ([0] * 10 ** 10) | length }}",
    "a power": "{{ 7 ** (10 ** 9) }}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a width that is given": "{{ '%*d' % (10 ** 9, 1) }}",
    "a text that doubles": (
        "{% set ns = namespace(x='x') %}{% for _ in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}"
    ),
    "one piece again and again": (
        "{% set x = 'x' * 1000000 %}{% for _ in range(100) %}{{ x }}{% endfor %}"
    ),
    "a macro's text": (
        "{% macro f() %}{% set x = 'x' * 1000000 %}{% for _ in range(100) %}{{ x }}{% endfor %}"
        "{% endmacro %}{{ f() | length }}"
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_an_end_is_ended(name: str) -> None:
    before_s = time.thread_time()
    with pytest.raises(OverBudget, match="not rendered within"):
        ChatTemplate(ENDLESS[name]).render({}, Limits(cpu_s=0.05))
    assert time.thread_time() - before_s < 1.0  # of computing: how busy the machine is is no matter


@pytest.mark.parametrize("name", HUGE)
def test_a_text_that_blows_up_is_not_made(name: str) -> None:
    with pytest.raises(OverBudget):
        ChatTemplate(HUGE[name]).render({}, Limits())


def test_a_prompt_may_be_longer_than_others_wait_for() -> None:
    template = ChatTemplate("{{ text }}")
    assert len(template.render({"text": "x" * 5000}, Limits(chars=5000))) == 5000
    with pytest.raises(OverBudget):
        template.render({"text": "x" * 5001}, Limits(chars=5000))
    assert len(template.render({"text": "x" * MAX_TEXT_CHARS}, Limits())) == MAX_TEXT_CHARS


def test_a_client_cannot_buy_more_time() -> None:
    given = {"kvroute_budget": iter(range(10**9))}
    with pytest.raises(OverBudget):
        ChatTemplate(ENDLESS["loops in loops"]).render(given, Limits(cpu_s=0.01))


def folder_with(tmp_path: Path, template: str) -> Path:
    shutil.copy(default_folder() / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


QUADRATIC = (
    "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}"
    "{% endfor %}{% endfor %}{{ messages[0].content }}"
)


async def test_a_request_whose_template_does_not_end_is_served_on_load_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What takes forever is up to the client: a few messages are rendered, many are not."""
    few: Any = [{"role": "user", "content": "hi"}]
    many = few * 1500
    async with scripted(answer_ok) as (replica,):
        folder = folder_with(tmp_path, QUADRATIC)
        async with running_gateway(replica, tokenizer=folder) as running:
            assert (await running.post(chat(messages=few))).status_code == 200
            body = chat(messages=many)
            assert len(body) <= 64 << 10  # rendered on the event loop
            for _ in range(3):
                assert (await running.post(body)).status_code == 200
            assert [each.body for each in replica.seen[1:]] == [body] * 3
            metrics = (await running.client.get("/metrics")).text
            assert 'kvroute_prompts_total{source="local"} 1.0' in metrics
            assert 'kvroute_prompts_total{source="none"} 3.0' in metrics
    told = [each for each in caplog.records if "placed on load alone" in each.getMessage()]
    assert len(told) == 1  # a template is told of once, not with every request


async def test_the_threads_for_long_prompts_are_free_again(tmp_path: Path) -> None:
    long: Any = [{"role": "user", "content": "x" * 30}] * 4000
    async with scripted(answer_ok) as (replica,):
        folder = folder_with(tmp_path, QUADRATIC)
        async with running_gateway(replica, tokenizer=folder, render_timeout_s=0.2) as running:
            body = json.dumps({"model": "sim", "messages": long}).encode()
            assert len(body) > 64 << 10
            answers = await asyncio.gather(*(running.post(body) for _ in range(4)))
            assert [each.status_code for each in answers] == [200] * 4
            identifier = running.gateway.identifier
            async with asyncio.timeout(20):
                while identifier._busy_threads:
                    await asyncio.sleep(0.02)
            assert any(each.name.startswith("tokenize") for each in threading.enumerate())
