"""Small plans for tests of the virtual fleet."""

from __future__ import annotations

from functools import cache

from loadgen.demo.plan import Plan, plan
from loadgen.demo.text import ModelText, block_hashes
from loadgen.replica.model import EngineModel
from loadgen.tokenizer import default_folder
from loadgen.workload import MultiturnSettings, multiturn

BLOCK_TOKENS = 16


@cache
def model_text() -> ModelText:
    return ModelText(default_folder())


@cache
def chat_plan(sessions: int = 12, seed: int = 1) -> Plan:
    settings = MultiturnSettings(
        sessions=sessions,
        arrival_window_s=2.0,
        turns=(3, 4),
        think_mean_s=0.3,
        system_prompts=3,
        system_chars=1200,
        user_chars=(100, 300),
        reply_tokens=(8, 16),
    )
    return plan(multiturn(settings, seed), model_text(), hashes)


def hashes(token_ids):
    return block_hashes(token_ids, BLOCK_TOKENS)


def engine(planned: Plan, share: float = 0.25, tokens_per_s: float = 3000.0) -> EngineModel:
    return EngineModel(
        block_size_tokens=BLOCK_TOKENS,
        blocks=max(round(share * planned.distinct_blocks), 2 * planned.largest_request_blocks),
        prefill_c_s=0.004,
        prefill_a_s=1 / tokens_per_s,
        prefill_b_s=0.0,
        decode_step_s=0.01,
        decode_per_request_s=0.0003,
    )
