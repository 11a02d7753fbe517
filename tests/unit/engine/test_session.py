"""Conversations: what is found again, what is kept, what is given back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import ContextLengthError, Engine, SamplingParams, Session, Speculation
from tests.support import write_tiny_checkpoint
from tests.unit.engine.conftest import assert_idle

BLOCK_SIZE = 4
NO_SPECIAL_TOKENS = {0: -100.0, 1: -100.0}  # their text is empty, so they would not survive a second tokenisation
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True, logit_bias=NO_SPECIAL_TOKENS)
MODES = [Speculation("off"), Speculation("static", 4), Speculation("static", 4, ("model",))]


@pytest.fixture(params=MODES, ids=["off", "suffix", "self-draft"])
def engine(request: pytest.FixtureRequest, make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(block_size=BLOCK_SIZE, draft="self", speculation=request.param)


def num_history_tokens(engine: Engine, session: Session) -> int:
    """Tokens of the conversation so far, as the template spells it up to the newest answer."""
    rendered = engine.render([*session.messages, {"role": "user", "content": ""}])
    return len(engine.tokenizer.encode(rendered.removesuffix("|u:|a:")))


def test_history_is_found_in_the_cache(engine: Engine) -> None:
    with engine.session([{"role": "system", "content": "ab"}]) as session:
        for content in ("hello", "Xyz", "q"):
            history = num_history_tokens(engine, session) if len(session.messages) > 1 else 0
            output = session.send(content, PARAMS)
            # The newest token of an answer has no K/V yet: it is the one that may be missing.
            assert output.usage.cached_tokens >= (history - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert output.usage.prompt_tokens == len(engine.tokenizer.encode(engine.render(session.messages[:-1])))
            assert session.messages[-2:] == [
                {"role": "user", "content": content},
                {"role": "assistant", "content": output.text},
            ]
    assert_idle(engine)


def test_a_turn_gives_what_the_same_messages_give_alone(engine: Engine) -> None:
    with engine.session() as session:
        session.send("hello", PARAMS)
        turn = session.send("again", PARAMS)
        messages = session.messages[:-1]
    engine.reset_prefix_cache()
    alone = engine.generate(messages, PARAMS, speculation=Speculation("off"))
    assert alone.token_ids == turn.token_ids


def test_history_survives_pressure_that_would_evict_it(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(block_size=BLOCK_SIZE, max_model_len=120, max_num_seqs=1)
    with engine.session() as session:
        session.send("hello", PARAMS)
        held = engine.core.cache.num_used_blocks
        assert held == (num_history_tokens(engine, session) - 1) // BLOCK_SIZE
        for letter in "abcdefgh":  # fills and turns over all that is free
            engine.generate(letter * 50, PARAMS)
        assert engine.core.cache.num_used_blocks == held
        assert session.send("q", PARAMS).usage.cached_tokens >= held * BLOCK_SIZE
    assert_idle(engine)


def test_an_idle_session_yields_to_a_request_that_needs_its_room(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(block_size=BLOCK_SIZE, max_model_len=120, max_num_seqs=1)
    session = engine.session()
    session.send("hello", PARAMS)
    assert engine.generate("a" * 100, SamplingParams(ignore_eos=True)).usage.completion_tokens == 20
    assert_idle(engine)
    assert session.send("q", PARAMS).usage.completion_tokens == 10  # it only starts over
    session.close()
    assert_idle(engine)


@pytest.mark.parametrize("closes_parent_first", [True, False])
def test_fork_shares_the_prefix(engine: Engine, closes_parent_first: bool) -> None:
    parent = engine.session()
    parent.send("hello", PARAMS)
    held = engine.core.cache.num_used_blocks
    child = parent.fork()
    assert engine.core.cache.num_used_blocks == held
    sessions = [parent, child] if closes_parent_first else [child, parent]
    sessions[0].close()
    assert engine.core.cache.num_used_blocks == held
    before = list(sessions[0].messages)
    output = sessions[1].send("Xyz", PARAMS)
    assert output.usage.cached_tokens >= held * BLOCK_SIZE
    assert sessions[0].messages == before
    sessions[1].close()
    assert_idle(engine)


def test_an_answer_cut_at_a_stop_string_is_continued(engine: Engine) -> None:
    with engine.session() as session:
        whole = session.fork().send("hello", PARAMS).text
        cut = session.send("hello", replace(PARAMS, stop=(whole[4:7],)))
        assert cut.finish_reason == "stop"
        assert cut.text == whole[: whole.index(whole[4:7])]
        assert session.messages[-1]["content"] == cut.text
        history = num_history_tokens(engine, session)
        output = session.send("Xyz", PARAMS)
        assert output.usage.cached_tokens >= (history - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert output.usage.prompt_tokens == len(engine.tokenizer.encode(engine.render(session.messages[:-1])))


def test_the_end_token_of_an_answer_is_not_repeated(engine: Engine) -> None:
    ending = SamplingParams(min_tokens=5, logit_bias={0: -100.0, 1: 100.0})
    with engine.session() as session:
        first = session.send("hello", ending)
        assert first.finish_reason == "stop"
        assert first.token_ids[-1] == 1
        assert len(first.text) == 5
        second = session.send("Xyz", PARAMS)
        assert second.usage.prompt_tokens == len(engine.tokenizer.encode(engine.render(session.messages[:-1])))
        assert second.usage.cached_tokens == (first.usage.prompt_tokens + 5) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("num_deltas", [0, 1, 3])
def test_an_abandoned_turn_keeps_the_history(engine: Engine, num_deltas: int) -> None:
    with engine.session() as session:
        session.send("hello", PARAMS)
        before = list(session.messages)
        history = num_history_tokens(engine, session)
        stream = session.stream("Xyz", SamplingParams(ignore_eos=True))
        for _ in range(num_deltas):
            next(stream)
        del stream
        assert not engine.core.scheduler.has_work
        assert session.messages == before
        output = session.send("Xyz", PARAMS)
        assert output.usage.cached_tokens >= (history - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert len(session.messages) == 4
    assert_idle(engine)


def test_a_cancelled_turn_keeps_the_history(engine: Engine) -> None:
    session = engine.session()
    stream = session.stream("hello", SamplingParams(ignore_eos=True))
    next(stream)
    engine.close()
    assert [delta.output.finish_reason for delta in stream if delta.output] == ["cancelled"]
    assert session.messages == []
    session.close()
    assert_idle(engine)


def test_a_refused_turn_keeps_the_history(engine: Engine) -> None:
    with engine.session() as session:
        session.send("hello", PARAMS)
        before = list(session.messages)
        with pytest.raises(ContextLengthError):
            session.send("a" * 600, PARAMS)
        assert session.messages == before
        assert session.send("q", PARAMS).usage.cached_tokens > 0
    assert_idle(engine)


def test_closing_with_a_turn_in_flight_keeps_nothing(engine: Engine) -> None:
    with engine.session() as session:
        stream = session.stream("hello", PARAMS)
        next(stream)
    assert [delta.output.finish_reason for delta in stream if delta.output] == ["length"]
    assert_idle(engine)


def test_closing_twice_and_closing_an_unused_session_is_fine(engine: Engine) -> None:
    session = engine.session()
    session.close()
    session.send("hello", PARAMS)
    session.close()
    session.close()
    assert_idle(engine)


@pytest.fixture
def merging_engine(tmp_path: Path) -> Iterator[Engine]:
    """The text "aa" is one token when encoded, while the model may well answer with two."""
    folder = write_tiny_checkpoint(tmp_path / "merging", "llama")
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    del settings["model"]["vocab"]["9"]
    settings["model"]["vocab"]["aa"] = 63
    settings["model"]["merges"] = [["a", "a"]]
    path.write_text(json.dumps(settings))
    with Engine(folder, draft=None, block_size=BLOCK_SIZE) as engine:
        yield engine


def test_a_turn_continues_the_tokens_of_the_answer_not_its_text(merging_engine: Engine) -> None:
    encode = merging_engine.tokenizer.encode
    (a,), (aa,) = encode("a"), encode("aa")
    assert encode("aaaa") == [aa, aa]
    forced = SamplingParams(max_tokens=8, logit_bias={a: 100.0})
    with merging_engine.session() as session:
        first = session.send("hello", forced)
        assert (first.text, first.token_ids) == ("a" * 8, [a] * 8)
        known = first.usage.prompt_tokens + 8
        second = session.send("q", forced)
        assert second.usage.cached_tokens == (known - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert second.usage.prompt_tokens == known + len(encode("|u:q|a:"))
