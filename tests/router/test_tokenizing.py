"""Token ids as the engine makes them, with each piece encoded once."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from cache_index.blocks import pack_tokens
from loadgen.tokenizer import default_folder
from router.errors import ConfigError
from router.prompt import parse_request, tokenize_call
from router.tokenizing import ModelTokenizer, RenderError, SegmentCache, _size

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TOKENIZER = ModelTokenizer.from_folder(default_folder())
REFERENCE = Tokenizer.from_file(str(default_folder() / "tokenizer.json"))


def reference_ids(text: str) -> bytes:
    return pack_tokens(REFERENCE.encode(text, add_special_tokens=False).ids)


text_pieces = st.one_of(st.text(max_size=30), st.sampled_from(SPECIAL), st.just("\n "))


@settings(max_examples=300)
@given(st.lists(text_pieces, max_size=12))
def test_pieces_give_the_ids_of_the_whole(pieces: list[str]) -> None:
    text = "".join(pieces).encode("utf-8", "replace").decode()
    assert TOKENIZER._splitter is not None
    assert TOKENIZER.text(text, add_special_tokens=False) == reference_ids(text)


def test_a_chat_is_rendered_with_the_template() -> None:
    fields = {"messages": [{"role": "user", "content": "hello"}]}
    text = TOKENIZER.render(fields)
    assert text.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert TOKENIZER.chat(fields) == reference_ids(text)
    without = TOKENIZER.render({**fields, "add_generation_prompt": False})
    assert text.startswith(without) and not without.endswith("assistant\n")


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = TOKENIZER.render({"messages": [{"role": "user", "content": "one\ntwo"}]})
    assert TOKENIZER.render({"messages": [{"role": "user", "content": parts}]}) == joined
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(RenderError):
        TOKENIZER.render({"messages": [{"role": "user", "content": image}]})


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user"}], ["text"], [None], [{"role": "user", "content": 5}], [{"content": [[]]}]],
)
def test_odd_messages_never_raise_anything_else(messages: list[object]) -> None:
    with contextlib.suppress(RenderError):
        TOKENIZER.chat({"messages": messages})


def folder_with(tmp_path: Path, template: str) -> ModelTokenizer:
    shutil.copy(default_folder() / "tokenizer.json", tmp_path)
    config = {"bos_token": {"content": "<B>"}, "eos_token": "<E>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(template)
    return ModelTokenizer.from_folder(tmp_path)


def test_helpers_that_templates_use(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{{ tools | tojson }}{{ thinking }}"
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}"
        "{% endfor %}{{ strftime_now('%Y')|length }}{{ eos_token }}"
    )
    tokenizer = folder_with(tmp_path, template)
    fields = {
        "messages": [{"content": "a"}, {"content": "b"}],
        "tools": [{"name": "<é>"}],
        "chat_template_kwargs": {"thinking": "on"},
    }
    assert tokenizer.render(fields) == '<B>[{"name": "<é>"}]ona4<E>'


def test_a_template_that_refuses_or_reaches_out_is_a_render_error(tmp_path: Path) -> None:
    for template in (
        "{{ raise_exception('no system role') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 // 0 }}",
    ):
        with pytest.raises(RenderError):
            folder_with(tmp_path, template).render({"messages": []})


def test_a_request_with_its_own_template_is_not_rendered_here() -> None:
    with pytest.raises(RenderError):
        TOKENIZER.render({"messages": [], "chat_template": "x"})


def test_a_folder_without_a_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ModelTokenizer.from_folder(tmp_path)
    with pytest.raises(ConfigError, match="chat template"):
        folder_with(tmp_path, "{% if %}")


@pytest.mark.parametrize("kind", ["prepending", "stripping", "normalized"])
def test_a_tokenizer_whose_pieces_depend_on_neighbours_is_encoded_whole(kind: str) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "▁": 2, "ab": 3}, [("a", "b")]))
    if kind == "prepending":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    if kind == "normalized":
        tokenizer.normalizer = normalizers.Lowercase()
    special = AddedToken(
        "<s>", special=True, rstrip=kind == "stripping", normalized=kind == "normalized"
    )
    tokenizer.add_special_tokens([special])
    model = ModelTokenizer(tokenizer, None, {})
    assert model._splitter is None
    whole = pack_tokens(tokenizer.encode("ab<s> ab", add_special_tokens=False).ids)
    assert model.text("ab<s> ab") == whole


def test_remembered_pieces_are_bounded() -> None:
    cache = SegmentCache(REFERENCE, max_bytes=20_000)
    for number in range(500):
        text = f"piece number {number}"
        assert cache.encode(text) == reference_ids(text)
    assert 0 < cache._bytes <= 20_000
    assert 20 < len(cache._pieces) < 100
    assert cache._bytes == sum(_size(key, ids) for key, ids in cache._pieces.items())


def test_what_a_replica_is_asked_to_tokenize() -> None:
    chat = b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[],"temperature":1}'
    assert tokenize_call(parse_request("/v1/chat/completions", chat)) == {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [],
    }
    text = b'{"model":"m","prompt":["one","two"]}'
    assert tokenize_call(parse_request("/v1/completions", text)) == {
        "model": "m",
        "prompt": "one",
        "add_special_tokens": True,
    }
    ids = b'{"model":"m","prompt":[1,2]}'
    assert tokenize_call(parse_request("/v1/completions", ids)) is None


def test_a_missing_field_is_undefined_and_a_field_named_like_a_method_is_found(
    tmp_path: Path,
) -> None:
    template = (
        "{% for m in messages %}{{ m.none is defined }}{{ m['items'] }}"
        "{{ m.items() | list | length }}{% endfor %}"
    )
    tokenizer = folder_with(tmp_path, template)
    assert tokenizer.render({"messages": [{"items": "x"}]}) == "Falsex1"
