"""From a request to its prompt's token ids, under the names that one replica serves."""

from __future__ import annotations

import time
from dataclasses import dataclass

from loadgen.replica.answers import Frame, random_id
from loadgen.replica.errors import InvalidValue, RequestRefused
from loadgen.replica.http import HTTPRequest
from loadgen.replica.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    completion_prompts,
    plain_messages,
)
from loadgen.replica.text import ReplicaTokenizer


@dataclass(frozen=True, slots=True)
class Served:
    """What one replica serves under which names."""

    model: str
    adapters: tuple[str, ...]
    max_model_len_tokens: int
    started_s: int
    owner: str = "vllm"


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads what every generating or rendering route needs from a request.

    All methods raise RequestRefused for what vLLM refuses.
    """

    served: Served
    tokenizer: ReplicaTokenizer

    def adapter(self, name: str | None) -> str:
        """The adapter a model name stands for, "" for the model itself."""
        if not name or name == self.served.model:
            return ""
        if name in self.served.adapters:
            return name
        aliases = ", ".join([self.served.model, *self.served.adapters])
        raise RequestRefused(
            f"The model `{name}` does not exist. Valid aliases: {aliases}.",
            status=404,
            kind="NotFoundError",
            param="model",
        )

    def frame(self, http: HTTPRequest, request: GenerationFields, prefix: str) -> Frame:
        """Id, time and model name of the answer."""
        given = http.headers.get("x-request-id") or request.request_id
        model = request.model or self.served.model
        return Frame(prefix + (given or random_id()), int(time.time()), model)

    def chat_ids(self, request: ChatRequest) -> list[int]:
        """Token ids of the rendered conversation."""
        messages = plain_messages(request.messages, self.served.model)
        text = self.tokenizer.render(
            messages,
            tools=None if request.tool_choice == "none" else request.tools,
            add_generation_prompt=request.add_generation_prompt,
            arguments=request.chat_template_kwargs,
        )
        if request.continue_final_message:
            said = str(messages[-1]["content"])
            text = text[: text.rindex(said) + len(said)]
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that fits; vLLM stops counting behind the first that does not."""
        ids = self.tokenizer.encode(text)
        most = self.served.max_model_len_tokens
        if len(ids) > most:
            raise too_long(most, f"at least {most + 1}", most + 1)
        return ids

    def completion_ids(self, request: CompletionRequest) -> list[list[int]]:
        """Token ids of each prompt."""
        return [
            self.encode(prompt) if isinstance(prompt, str) else self.checked(prompt)
            for prompt in completion_prompts(request.prompt)
        ]

    def checked(self, ids: list[int]) -> list[int]:
        """`ids`, all of them in the vocabulary."""
        for token in ids:
            if not 0 <= token < self.tokenizer.size:
                raise RequestRefused(f"Token id {token} is out of vocabulary")
        most = self.served.max_model_len_tokens
        if len(ids) > most:
            raise too_long(most, str(len(ids)), len(ids))
        return ids


def too_long(most_tokens: int, counted: str, tokens: int) -> InvalidValue:
    """The refusal of a prompt that is longer than the model's context."""
    return InvalidValue(
        f"This model's maximum context length is {most_tokens} tokens. However, your prompt "
        f"contains {counted} input tokens, which exceeds this limit even without any output "
        "tokens. Please reduce the length of the input prompt.",
        "input_tokens",
        tokens,
    )
