"""Environment variables of a run's processes: secrets removed, the variables of rewards and
environments, code caches.
"""

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.config.fleet import KEY_VARIABLE

SECRET = re.compile(
    r"(^|_)(KEYS?|TOKENS?|PAT|JWT|DSN|CREDS?)$|APIKEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|CONNECTION_STRING"
    r"|^AWS_|^SSH_AUTH_SOCK$",
    re.I,
)
# Variables that any program needs. A reward runs code written by a model: it gets others only
# through `run.variables`.
FOR_REWARDS = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TERM|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH|PYTHON\w*"
    r"|\w+_NUM_THREADS|CUDA_VISIBLE_DEVICES|SSL_CERT_(FILE|DIR)|MEGATRON_RL_RECIPE_FOLDER"
)
# of a learner, for rank 0 only
DRIVER_SECRETS = frozenset(
    {
        "WANDB_API_KEY",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
        "TRACKIO_WRITE_TOKEN",
        KEY_VARIABLE,
    }
)
# Caches of compiled code, which is read and executed: some default locations are world-writable.
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
}


def is_secret(name: str) -> bool:
    return bool(SECRET.search(name))


def without_secrets(variables: Mapping[str, str], keep: Collection[str] = ()) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name in keep or not is_secret(name)}


@contextmanager
def hidden_secrets(keep: str) -> Iterator[None]:
    """Hide secrets while a process is started with this environment, except those whose names have
    these prefixes.
    """
    hidden = [name for name in os.environ if is_secret(name) and not name.startswith(keep)]
    held = {name: os.environ.pop(name) for name in hidden}
    try:
        yield
    finally:
        os.environ.update(held)


def for_rewards(variables: Mapping[str, str], wanted: Collection[str]) -> dict[str, str]:
    """Return the environment of rewards. `wanted`: names in run.variables, the only secrets passed
    on.
    """
    missing = [name for name in wanted if name not in variables]
    if missing:
        raise ConfigError(
            f"run.variables: {', '.join(missing)} not set; export it, or leave it out"
        )
    usual = without_secrets(
        {name: value for name, value in variables.items() if FOR_REWARDS.fullmatch(name)}
    )
    return usual | {name: variables[name] for name in wanted}


def compiled_code() -> dict[str, str]:
    """Return variables that point to caches of this user, kept between runs; those already set are
    unchanged.
    """
    missing = {variable: name for variable, name in CACHES.items() if variable not in os.environ}
    folder = own_folder(cache_home() / "megatron-rl") if missing else None
    # no place for caches: the temporary folder of a run is private, too
    if folder is None:
        return {}
    return {variable: str(folder / name) for variable, name in missing.items()}


def cache_home() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given)
    return Path.home() / ".cache"


def own_folder(path: Path) -> Path | None:
    """Return the folder, created if missing: owned by this user, not a link, closed to others. None
    if it cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        about = path.lstat()
    except OSError:
        if path.is_symlink() or path.exists():
            raise _refusal(path, "no folder") from None
        return None
    if not stat.S_ISDIR(about.st_mode):
        raise _refusal(path, "a symbolic link")
    if about.st_uid != os.geteuid():
        raise _refusal(path, f"of user {about.st_uid}")
    if about.st_mode & 0o022:
        raise _refusal(path, f"open to others (mode {stat.S_IMODE(about.st_mode):o})")
    if about.st_mode & 0o077:
        path.chmod(0o700)
    return path if os.access(path, os.W_OK) else None


def _refusal(path: Path, what: str) -> ConfigError:
    hint = "remove it, or set XDG_CACHE_HOME to another folder"
    return ConfigError(f"{path} is {what}, and compiled code in it would run as you: {hint}")
