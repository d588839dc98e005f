"""Scores of sessions from their environments' rewards; metrics of a step's sessions and turns."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from megatron_rl.rewards.task import Score
from megatron_rl.types import NEARLY_RIGHT, Metrics, Session, SessionTurn, Verdict

TURNS_SHOWN = 4  # turns that have metrics of their own


def session_score(session: Session) -> Score | None:
    """Return the reward that a session's environment has assigned; None if none."""
    if session.error is not None:
        return Score(0.0, Verdict.error, f"environment: {session.error}")
    if session.reward is None:
        return None
    details = {f"own/{name.replace('/', '_')}": value for name, value in session.numbers.items()}
    return Score(
        session.reward,
        Verdict.right if session.reward >= NEARLY_RIGHT else Verdict.wrong,
        None,
        details,
    )


def session_metrics(sessions: Sequence[Session]) -> Metrics:
    """Return metrics of the step's conversations."""
    if not sessions:
        return {}
    turns = [turn for one in sessions for turn in one.turns]
    total = Counter[str]()
    for one in sessions:
        total.update(one.counts)
    longest = max(len(one.turns) for one in sessions)
    return {
        "session/turns_mean": fmean(len(one.turns) for one in sessions),
        "session/turns_max": longest,
        "session/turn_tokens_mean": fmean(turn.tokens for turn in turns) if turns else 0.0,
        "session/turns_cut_fraction": fmean(turn.finish_reason == "length" for turn in turns)
        if turns
        else 0.0,
        "session/tool_calls": total["calls"],
        "session/tool_calls_failed": total["calls_failed"],
        "session/tool_calls_late": total["calls_late"],
        "session/tool_calls_unread": total["calls_unread"],
        "session/tool_seconds_mean": fmean(turn.tool_seconds for turn in turns) if turns else 0.0,
        "session/observations_cut": total["observations_cut"],
        "session/answers_unread": total["answers_unread"],
        "session/forks": total["forks"],
        "session/restarts": total["restarts"],
        "session/errors": sum(one.error is not None for one in sessions),
        "session/out_of_turns_fraction": fmean(one.end == "turns" for one in sessions),
        "session/refused_fraction": fmean(one.end == "refused" for one in sessions),
        "session/out_of_context_fraction": fmean(one.end == "length" for one in sessions),
        **{
            f"session/turn_{number}/{name}": value
            for number in range(min(longest, TURNS_SHOWN))
            for name, value in _of_turn(
                [one.turns[number] for one in sessions if len(one.turns) > number]
            )
        },
    }


def _of_turn(turns: Sequence[SessionTurn]) -> Iterator[tuple[str, float]]:
    yield "sessions", len(turns)
    yield "tokens_mean", fmean(turn.tokens for turn in turns)
    yield "tool_seconds_mean", fmean(turn.tool_seconds for turn in turns)
    rewards = [turn.reward for turn in turns if turn.reward is not None]
    if rewards:
        yield "reward_mean", fmean(rewards)
