"""Questions on the command line, before and after a run."""

from megatron_rl.apps.commands import installation, models, recipes, runs

COMMANDS = (recipes, runs, models, installation)
