"""Text to token ids and back, and the chat template, from a Hugging Face style folder."""

from __future__ import annotations

import codecs
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import strftime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from loadgen.replica.errors import TokenizerError

_MEMO_CHARS = 32_000_000


class ReplicaTokenizer:
    """A tokenizer folder: tokenizer.json, tokenizer_config.json, perhaps chat_template.jinja.

    Special tokens split a text into parts that tokenize on their own, so each part's ids are
    remembered: a later turn of a conversation costs only its new text.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load(folder)
        config = _load_config(folder)
        self._special = _special_tokens(self._tokenizer)
        self._splitter = re.compile(
            "(" + "|".join(re.escape(text) for text in sorted(self._special)) + ")"
        )
        self._memo = _Memo(_MEMO_CHARS)
        self._bytes = _byte_table(self._tokenizer, self._special)
        self._template = _template(folder, config)
        self._template_names = {
            name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")
        }
        self.eos_id = self._tokenizer.token_to_id(self._template_names["eos_token"] or "")

    @property
    def size(self) -> int:
        """One more than the highest token id."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens in the text become their own id."""
        if not self._special:
            return self._encode_part(text)
        ids: list[int] = []
        for part in self._splitter.split(text):
            special = self._special.get(part)
            if special is not None:
                ids.append(special)
            elif part:
                ids += self._encode_part(part)
        return ids

    def _encode_part(self, text: str) -> list[int]:
        ids = self._memo.get(text)
        if ids is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            self._memo.put(text, ids)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for."""
        return self._bytes[token]

    def token_name(self, token: int) -> str:
        """How the vocabulary writes a token."""
        return self._tokenizer.id_to_token(token) or ""

    def is_special(self, token: int) -> bool:
        """Whether the token is a control token, which replies do not show."""
        return token in self._special.values()

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self._bytes[token] for token in ids).decode(errors="replace")

    def token_texts(self) -> list[tuple[int, str]]:
        """(id, text) of every token."""
        return [(token, raw.decode(errors="replace")) for token, raw in enumerate(self._bytes)]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. Raises TokenizerError where the template does."""
        if self._template is None:
            raise TokenizerError("this model has no chat template")
        try:
            text: str = self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                **self._template_names,
                **(arguments or {}),
            )
            return text
        except (TemplateError, TypeError) as error:
            raise TokenizerError(str(error)) from error


class Detokenizer:
    """Token ids to text, one at a time; a character waits until all its bytes are there."""

    def __init__(self, tokenizer: ReplicaTokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int, *, final: bool = False) -> str:
        """Text that the token completes, perhaps empty."""
        hidden = self._skip and self._tokenizer.is_special(token)
        return self._decoder.decode(b"" if hidden else self._tokenizer.token_bytes(token), final)


class _Memo:
    """Token ids by text, bounded by the characters it holds; the oldest texts leave first."""

    def __init__(self, max_chars: int) -> None:
        self._max = max_chars
        self._held = 0
        self._ids: OrderedDict[str, list[int]] = OrderedDict()

    def get(self, text: str) -> list[int] | None:
        ids = self._ids.get(text)
        if ids is not None:
            self._ids.move_to_end(text)
        return ids

    def put(self, text: str, ids: list[int]) -> None:
        self._ids[text] = ids
        self._held += len(text)
        while self._held > self._max:
            oldest, _ids = self._ids.popitem(last=False)
            self._held -= len(oldest)


def _load(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path}: {error}") from error


def _load_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError as error:
        raise TokenizerError(f"{path}: {error}") from error
    return config


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    return {token.content: index for index, token in added.items() if token.special}


def _byte_table(tokenizer: Tokenizer, special: Mapping[str, int]) -> list[bytes]:
    alphabet = _byte_alphabet()
    table = [b""] * (max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)
    for text, index in tokenizer.get_vocab(with_added_tokens=True).items():
        known = text not in special and all(char in alphabet for char in text)
        table[index] = bytes(alphabet[char] for char in text) if known else text.encode()
    return table


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes the 256 bytes.

    Printable Latin-1 bytes stand for themselves; the others follow from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    moved = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | moved


def _template(folder: Path, config: Mapping[str, Any]) -> Any:
    path = folder / "chat_template.jinja"
    source = path.read_text() if path.exists() else config.get("chat_template")
    if not source:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise TokenizerError(f"chat template: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value
