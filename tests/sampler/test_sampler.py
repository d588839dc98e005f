"""Rollouts from an engine's completions."""

from array import array

from megatron_rl.sampler.client.interface import Completion
from megatron_rl.sampler.dispatch import Done, Job
from megatron_rl.sampler.sampler import _rollouts
from megatron_rl.types import Prompt


def test_an_answer_that_an_update_came_into_is_as_old_as_its_first_token():
    spans = [[(4, 2), (5, 1)], [(5, 3)]]
    answers = [
        Completion(array("i", [7] * 3), array("f", [-0.5] * 3), "stop", one) for one in spans
    ]
    found = _rollouts(
        Done(Job(group=0, prompt=Prompt(0, (1,), "", {}), seed=1), answers, "int8", 4)
    )
    assert [one.policy_version for one in found] == [4, 5]
    assert [one.versions and list(one.versions) for one in found] == [[4, 4, 5], None]
