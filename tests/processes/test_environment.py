"""Environment variables of a run's processes, and the folder of compiled code."""

import os
from pathlib import Path

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.processes.environment import (
    CACHES,
    compiled_code,
    for_rewards,
    hidden_secrets,
    is_secret,
    without_secrets,
)

SECRETS = (
    "WANDB_API_KEY",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_PROFILE",
    "OPENAI_API_KEY",
    "GITHUB_TOKEN",
    "MEGATRON_RL_FLEET_KEY",
    "DB_PASSWORD",
    "PGPASSWORD",
    "MY_SECRET_THING",
    "SLURM_JWT",
    "apikey",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "SSH_AUTH_SOCK",
    "AZURE_STORAGE_CONNECTION_STRING",
    "SSH_PASSPHRASE",
    "token",
)
HARMLESS = (
    "PATH",
    "HOME",
    "TOKENIZERS_PARALLELISM",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME",
    "MONKEY",
    "KEYBOARD",
    "SLURM_JOB_ID",
    "VLLM_CPU_KVCACHE_SPACE",
    "WANDB_RUN_GROUP",
    "PATTERN",
    "HF_HOME",
    "PYTHONHASHSEED",
)


@pytest.mark.fault(
    "secrets in the environment of a run", "engines and ranks that need none get none"
)
def test_what_looks_like_a_secret_stays_behind() -> None:
    assert [name for name in SECRETS if not is_secret(name)] == []
    assert [name for name in HARMLESS if is_secret(name)] == []
    given = without_secrets({"A_KEY": "1", "B_KEY": "2", "PATH": "3"}, keep=("A_KEY",))
    assert given == {"A_KEY": "1", "PATH": "3"}


@pytest.mark.fault(
    "W&B's service takes the environment of rank 0", "it gets W&B's key, and no other secret"
)
def test_secrets_are_hidden_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, "WANDB_API_KEY", "MEGATRON_RL_FLEET_KEY"):
        monkeypatch.setenv(name, "x")
    before = dict(os.environ)
    with hidden_secrets(keep="WANDB_"):
        left = {name for name in os.environ if is_secret(name)}
        assert left == {name for name in before if is_secret(name) and name.startswith("WANDB_")}
    assert dict(os.environ) == before


@pytest.mark.fault(
    "a reward looks for secrets in its environment",
    "it finds what `run.variables` names, no more",
)
def test_rewards_are_given_a_short_list() -> None:
    everything = dict.fromkeys((*SECRETS, *HARMLESS, "MY_SERVICE"), "x")
    assert set(for_rewards(everything, ())) == {
        "PATH",
        "HOME",
        "CUDA_VISIBLE_DEVICES",
        "PYTHONHASHSEED",
    }
    named = for_rewards(everything, ("OPENAI_API_KEY", "MY_SERVICE"))
    assert set(named) - set(for_rewards(everything, ())) == {"OPENAI_API_KEY", "MY_SERVICE"}
    with pytest.raises(ConfigError, match=r"run\.variables: NOT_THERE not set"):
        for_rewards(everything, ("NOT_THERE",))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron-rl"


def test_compiled_code_is_kept_in_a_private_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    assert compiled_code() == {
        "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor",
        "VLLM_CACHE_ROOT": f"{home}/vllm",
    }
    assert home.stat().st_mode & 0o777 == 0o700
    home.chmod(0o755)
    assert compiled_code()
    assert home.stat().st_mode & 0o777 == 0o700


@pytest.mark.fault(
    "a stranger owns, links to or writes into the cache of compiled code", "it is refused by name"
)
@pytest.mark.parametrize("what", ["a link", "another user's", "open", "a file"])
def test_code_of_strangers_is_not_run(home: Path, what: str) -> None:
    home.parent.mkdir()
    if what == "a link":
        (home.parent / "theirs").mkdir()
        home.symlink_to(home.parent / "theirs")
    elif what == "a file":
        home.touch()
    else:
        home.mkdir()
    if what == "another user's":
        if os.geteuid() != 0:
            pytest.skip("needs root")
        os.chown(home, 12345, 12345)
    if what == "open":
        home.chmod(0o777)
    with pytest.raises(ConfigError, match=r"megatron-rl is .* XDG_CACHE_HOME"):
        compiled_code()


def test_no_home_is_no_cache(home: Path) -> None:
    home.parent.touch()
    assert compiled_code() == {}
