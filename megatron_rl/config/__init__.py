"""Configuration: keys, types and bounds; recipes and overrides to one frozen Config. Independent of
other packages.
"""

from megatron_rl.config.layers import ConfigError
from megatron_rl.config.load import (
    all_keys,
    cluster,
    from_mapping,
    load,
    read,
    recorded_config,
    to_yaml,
)

__all__ = [
    "ConfigError",
    "all_keys",
    "cluster",
    "from_mapping",
    "load",
    "read",
    "recorded_config",
    "to_yaml",
]
