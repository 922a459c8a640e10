import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.replica.errors import TokenizerError
from loadgen.replica.reply import build_vocabulary, natural_length_tokens, reply_tokens
from loadgen.replica.text import Detokenizer, ReplicaTokenizer
from loadgen.tokenizer import default_folder

TOKENIZER = ReplicaTokenizer(default_folder())
VOCABULARY = build_vocabulary(TOKENIZER.encode, TOKENIZER.token_texts())
ROOT = Path(__file__).resolve().parents[3]


@settings(max_examples=200, deadline=None)
@given(st.text() | st.text("abc <|im_start>end é★\n"))
def test_text_survives(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    detokenizer = Detokenizer(TOKENIZER, skip_special=False)
    pieces = [detokenizer.push(token, final=i == len(ids) - 1) for i, token in enumerate(ids)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=100, deadline=None)
@given(st.text(), st.text())
def test_special_tokens_part_texts(left: str, right: str) -> None:
    joined = TOKENIZER.encode(left + "<|im_end|>" + right)
    assert joined == [*TOKENIZER.encode(left), TOKENIZER.eos_id, *TOKENIZER.encode(right)]


def test_memo_gives_what_the_library_gives() -> None:
    fresh = ReplicaTokenizer(default_folder())
    text = "<|im_start|>user\nWhat is a cache?<|im_end|>\n<|im_start|>assistant\n"
    assert fresh.encode(text) == fresh.encode(text)
    assert fresh.encode(text) == fresh._tokenizer.encode(text, add_special_tokens=False).ids


def test_conversation_is_rendered_like_chatml() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert TOKENIZER.render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert not TOKENIZER.render(messages, add_generation_prompt=False).endswith("assistant\n")


def test_tools_and_calls_are_rendered() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Look <there>"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "nothing", "tool_call_id": "1"},
    ]
    text = TOKENIZER.render(messages, tools=[tool])
    assert json.dumps(tool) in text
    assert "Look <there>" in text
    assert '<call>{"name": "look", "arguments": {}}</call>' in text
    assert TOKENIZER.render(messages[:1]) in text


def test_folder_problems_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        ReplicaTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((default_folder() / "tokenizer.json").read_bytes())
    with pytest.raises(TokenizerError, match="no chat template"):
        ReplicaTokenizer(tmp_path).render([{"role": "user", "content": "x"}])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    with pytest.raises(TokenizerError, match="no such role"):
        ReplicaTokenizer(tmp_path).render([])


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200), st.integers(1, 300))
def test_a_reply_sent_back_tokenizes_as_it_was_generated(text: str, length: int) -> None:
    prompt = TOKENIZER.encode(TOKENIZER.render([{"role": "user", "content": text}]))
    reply = reply_tokens(prompt, length, VOCABULARY)
    assert reply == reply_tokens(prompt, length + 40, VOCABULARY)[:length]
    assert len(reply) == length
    again = TOKENIZER.encode(TOKENIZER.decode([*prompt, *reply]))
    # The last word may be cut inside, and then be written with other tokens.
    known = [i for i, (one, other) in enumerate(zip(reply, again[len(prompt) :], strict=False))
             if one != other]  # fmt: skip
    assert not known or known[0] >= length - 8


def test_replies_differ_by_prompt_and_sample() -> None:
    replies = {tuple(reply_tokens([n], 40, VOCABULARY)) for n in range(50)}
    assert len(replies) == 50
    assert reply_tokens([1], 40, VOCABULARY, 1) != reply_tokens([1], 40, VOCABULARY)
    assert len({natural_length_tokens([n]) for n in range(50)}) > 20


def test_replies_contain_characters_of_several_tokens() -> None:
    reply = [token for n in range(40) for token in reply_tokens([n], 60, VOCABULARY)]
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in reply]
    assert any(not piece for piece in pieces)
    assert any(ord(char) > 0x7F for piece in pieces for char in piece)


def test_shipped_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in default_folder().iterdir()
             if path.suffix in (".json", ".jinja")}  # fmt: skip
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert sum(files.values()) < 400_000


@pytest.mark.slow
def test_the_script_makes_the_shipped_file() -> None:
    script = ROOT / "scripts" / "train-tokenizer"
    result = subprocess.run([sys.executable, script, "--check"], timeout=60, check=False)
    assert result.returncode == 0
