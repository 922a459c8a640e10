"""A model's tokenizer and chat template from its folder, with each piece of text encoded once.

Special tokens split a text before anything else happens to it, so what stands between two of
them is tokenized independently of the rest. A chat repeats most of these pieces turn after turn:
each is encoded once and remembered as packed token ids.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from cache_index.blocks import pack_tokens
from router.errors import ConfigError
from router.templating import ChatTemplate, Limits, OverBudget, RenderError

logger = logging.getLogger("kvroute.tokenizing")

CACHE_BYTES = 64 << 20
"""Bound of the remembered pieces of one model, keys included."""
ENTRY_BYTES = 150
"""What an ordered dictionary spends on an entry, about."""

_PROBES = ("hello, world", "  two  spaces\n\nand lines ", "naïve café 北京 \U0001f600", "a1b2 0x3F")


class SegmentCache:
    """Token ids of text pieces, least recently used first out, bounded in bytes.

    Long prompts are tokenized in threads, so what is remembered is changed under a lock.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = CACHE_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._bytes = 0
        self._pieces: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, piece: str) -> bytes:
        """Packed u32 ids of one piece."""
        with self._lock:
            found = self._pieces.get(piece)
            if found is not None:
                self._pieces.move_to_end(piece)
                return found
        # The batch call leaves out offsets, which nobody reads here: half the time of a long text.
        (encoding,) = self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)
        ids = pack_tokens(encoding.ids)
        with self._lock:
            self._remember(piece, ids)
        return ids

    def _remember(self, piece: str, ids: bytes) -> None:
        if piece in self._pieces:
            return
        self._pieces[piece] = ids
        self._bytes += _size(piece, ids)
        while self._bytes > self._max_bytes:
            self._bytes -= _size(*self._pieces.popitem(last=False))


def _size(piece: str, ids: bytes) -> int:
    """Bytes that a remembered piece takes, its place in the dictionary included."""
    return sys.getsizeof(piece) + sys.getsizeof(ids) + ENTRY_BYTES


class ModelTokenizer:
    """Chat requests and plain text to packed token ids, as the engine makes them."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, tokens: dict[str, str]) -> None:
        self._tokenizer = tokenizer
        self._cache = SegmentCache(tokenizer)
        self._template = ChatTemplate(template) if template else None
        self._told = False
        self._tokens = tokens
        self._splitter = _splitter(tokenizer)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelTokenizer:
        """Load `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

        Raises ConfigError when the folder holds no usable tokenizer.
        """
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"tokenizer: {folder}/tokenizer.json: {error}") from None
        config = _read_config(folder / "tokenizer_config.json")
        try:
            return cls(tokenizer, _template_text(folder, config), _special_texts(config))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"tokenizer: chat template in {folder}: {error}") from None

    def text(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Ids of a plain prompt; with `add_special_tokens`, BOS and EOS as the model adds them."""
        if add_special_tokens and self._tokenizer.num_special_tokens_to_add(False):
            return pack_tokens(self._tokenizer.encode(text).ids)
        return self._segments(text)

    def chat(self, fields: dict[str, Any], limits: Limits = Limits()) -> bytes:
        """Ids of a chat request. Raises RenderError when it cannot be rendered here."""
        return self._segments(self.render(fields, limits))

    def render(self, fields: dict[str, Any], limits: Limits = Limits()) -> str:
        """The prompt text of a chat request. Raises RenderError."""
        if self._template is None or fields.get("chat_template"):
            raise RenderError("no chat template, or one of the request's own")
        try:
            return self._template.render(self._variables(fields), limits)
        except OverBudget as error:
            if not self._told:
                self._told = True
                logger.warning("a chat is placed on load alone, as more may be: %s", error)
            raise
        except RenderError:
            raise
        except Exception as error:  # a template may raise anything
            raise RenderError(str(error)) from None

    def _variables(self, fields: dict[str, Any]) -> dict[str, Any]:
        """What a template may print. Raises RenderError, TypeError, KeyError."""
        extra = fields.get("chat_template_kwargs")
        return dict(
            messages=[_flat(message) for message in fields["messages"]],
            tools=fields.get("tools"),
            documents=fields.get("documents"),
            add_generation_prompt=fields.get("add_generation_prompt", True),
            **self._tokens,
            **(extra if isinstance(extra, dict) else {}),
        )

    def _segments(self, text: str) -> bytes:
        if self._splitter is None:
            return pack_tokens(self._tokenizer.encode(text, add_special_tokens=False).ids)
        encode = self._cache.encode
        return b"".join([encode(piece) for piece in self._splitter.split(text) if piece])


def _flat(message: Any) -> Any:
    """A message as templates expect it: text parts joined, as vLLM does for string templates."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    texts = [_part_text(part) for part in content]
    return {**message, "content": "\n".join(texts)}


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if isinstance(text, str):
        return text
    raise RenderError("a content part that is not text")


def _splitter(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """What splits a text at its special tokens, or None where pieces would not be independent."""
    layout = json.loads(tokenizer.to_str())
    added = layout.get("added_tokens") or []
    special = sorted((token["content"] for token in added), key=len, reverse=True)
    if not special or not _independent(layout, added):
        return None
    splitter = re.compile("(" + "|".join(re.escape(text) for text in special) + ")")
    return splitter if _agrees(tokenizer, splitter, special) else None


def _independent(layout: dict[str, Any], added: list[dict[str, Any]]) -> bool:
    """No token eats its neighbours' spaces and nothing is put before the first piece."""
    stripping = any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
    normalized = layout.get("normalizer") is not None and any(t["normalized"] for t in added)
    before = json.dumps([layout.get("normalizer"), layout.get("pre_tokenizer")])
    prefixing = re.search(r'"(Metaspace|Prepend)"|"add_prefix_space": true', before)
    return not (stripping or normalized or prefixing)


def _agrees(tokenizer: Tokenizer, splitter: re.Pattern[str], special: list[str]) -> bool:
    """The split way gives the library's own ids on text with every kind of neighbour."""
    text = "".join(probe + special[i % len(special)] for i, probe in enumerate(_PROBES * 2))
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = [piece for piece in splitter.split(text) if piece]
    parts = [tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces]
    return whole == [token for part in parts for token in part]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer: {path}: {error}") from None
    return content if isinstance(content, dict) else {}


def _template_text(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_texts(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, which templates may print."""
    texts = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    return texts
