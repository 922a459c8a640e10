import json
from itertools import pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from loadgen.errors import TraceError, WorkloadError
from loadgen.tokenizer import default_folder
from loadgen.workload import MooncakeSettings, TraceRow, mooncake, read_trace
from loadgen.workload.mooncake import scaled_input_tokens, single_token_words

TOKENIZER = Tokenizer.from_file(str(default_folder() / "tokenizer.json"))


def tokens(session) -> list[int]:
    [turn] = session.turns
    return TOKENIZER.encode(turn.text, add_special_tokens=False).ids


def shared(one, other) -> int:
    """Length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@st.composite
def rows(draw) -> list[TraceRow]:
    """Traces as Mooncake writes them: an id stands for one block behind one prefix."""
    trie: dict[tuple[int, ...], int] = {}
    result = []
    for _ in range(draw(st.integers(1, 8))):
        path = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
        ids = [trie.setdefault(tuple(path[: i + 1]), len(trie)) for i in range(len(path))]
        last = draw(st.integers(1, 512))
        length = 512 * (len(path) - 1) + last
        result.append(TraceRow(draw(st.integers(0, 9000)), length, draw(st.integers(0, 900)), ids))
    return result


@settings(max_examples=60, deadline=None)
@given(rows=rows(), block_tokens=st.sampled_from([16, 32, 48, 512]), seed=st.integers(0, 5))
def test_prompts_have_exact_lengths_and_share_what_the_trace_shares(rows, block_tokens, seed):
    scale = MooncakeSettings(block_tokens=block_tokens)
    ordered = sorted(rows, key=lambda row: row.timestamp)
    workload = mooncake(rows, scale, TOKENIZER, seed)
    assert workload == mooncake(rows, scale, TOKENIZER, seed)
    prompts = [tokens(session) for session in workload.sessions]
    for row, prompt in zip(ordered, prompts, strict=True):
        assert len(prompt) == scaled_input_tokens(row, block_tokens)
        assert abs(len(prompt) - row.input_length * block_tokens / 512) < 1
    for (one, other), (p, q) in zip(pairwise(ordered), pairwise(prompts), strict=True):
        same_blocks = shared(one.hash_ids, other.hash_ids)
        same_tokens = shared(p, q)
        wanted = min(same_blocks * block_tokens, len(p), len(q))
        # The first words of two different blocks may be equal by chance, whole blocks never.
        assert wanted <= same_tokens < wanted + block_tokens


def test_times_and_outputs_are_scaled():
    trace = [TraceRow(9000, 10, 32, [0]), TraceRow(3000, 600, 0, [0, 1])]
    workload = mooncake(trace, MooncakeSettings(time_scale=0.5, output_scale=0.25), TOKENIZER)
    assert [session.start_s for session in workload.sessions] == [0.0, 3.0]
    assert [session.turns[0].max_tokens for session in workload.sessions] == [1, 8]
    assert all(session.system is None for session in workload.sessions)


def test_another_seed_has_other_text_of_the_same_lengths():
    trace = [TraceRow(0, 1000, 1, [0, 1])]
    one, other = (mooncake(trace, MooncakeSettings(), TOKENIZER, seed) for seed in (1, 2))
    assert one != other
    assert len(tokens(one.sessions[0])) == len(tokens(other.sessions[0]))


def test_no_more_requests_than_asked_for():
    trace = [TraceRow(i, 10, 1, [i]) for i in range(5)]
    assert mooncake(trace, MooncakeSettings(requests=3), TOKENIZER).requests == 3


def test_a_tokenizer_without_whole_words_is_refused():
    letters = Tokenizer(models.BPE(vocab={chr(i): i for i in range(256)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(WorkloadError, match="one token each"):
        single_token_words(letters)


def write(path, *lines):
    path.write_text("".join(line + "\n" for line in lines))
    return path


def line(**changes) -> str:
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    return json.dumps(row | changes)


def test_reads_the_first_rows(tmp_path):
    path = write(tmp_path / "t.jsonl", line(), line(timestamp=27), line(timestamp=30))
    assert read_trace(path, 2) == [TraceRow(0, 600, 5, [0, 1]), TraceRow(27, 600, 5, [0, 1])]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ("{", "truncated"),
        (line(hash_ids=[0]), "hash_ids has 1"),
        (line(input_length=0, hash_ids=[]), "must not be"),
        (line(timestamp=-1), "must not be"),
        (line(output_length="many"), "Expected `int`"),
        ("{}", "missing"),
    ],
)
def test_a_bad_line_is_named(tmp_path, second, reason):
    path = write(tmp_path / "t.jsonl", line(), second)
    with pytest.raises(TraceError, match=f"t.jsonl:2: .*{reason}"):
        read_trace(path, 10)


def test_a_missing_or_empty_file(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.jsonl", 10)
    with pytest.raises(TraceError, match="no rows"):
        read_trace(write(tmp_path / "empty.jsonl"), 10)
