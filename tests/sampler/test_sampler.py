"""Seeds, which make two samplers answer alike."""

from megatron_rl.sampler.sampler import request_seed


def test_request_seeds_differ_by_run_and_group_and_leave_room_for_samples():
    seeds = {request_seed(seed, group) + sample for seed in range(20) for group in range(200) for sample in range(8)}
    assert len(seeds) == 32000
    assert max(seeds) < 2**62
    assert request_seed(3, 5) == request_seed(3, 5)
