from loadgen.demo.plan import plan
from loadgen.workload import Completion, Session, Turn, Workload
from tests.loadgen.demo_plans import chat_plan, hashes, model_text


def test_a_later_prompt_contains_the_earlier_one_and_its_reply():
    for session in chat_plan().sessions:
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            held = [*before.prompt_ids, *before.reply_ids]
            # The reply is sent back as text: its last word may be cut where its tokens were.
            whole = (len(held) - 4) // 16
            assert list(after.prompt_ids[: whole * 16]) == held[: whole * 16]
            assert list(after.hashes[:whole]) == list(before.hashes[:whole])


def test_the_working_set_counts_shared_blocks_once():
    text = model_text()
    one = " ".join(["alpha"] * 40)
    sessions = tuple(Session(0.0, (Turn(one, 1),)) for _ in range(3))
    planned = plan(Workload("w", sessions), text, hashes)
    prompt = text.prompt_ids(Completion(one, 1))
    assert planned.prompt_tokens == 3 * len(prompt)
    assert planned.distinct_blocks == (len(prompt) + 1) // 16
    assert planned.largest_request_blocks == planned.distinct_blocks


def test_replies_have_the_length_asked_for():
    for turn in chat_plan().turns:
        assert 8 <= len(turn.reply_ids) <= 16
        assert model_text().reply_ids(turn.prompt_ids, len(turn.reply_ids)) == turn.reply_ids
