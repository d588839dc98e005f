"""Questions on the command line, before and after a run."""

from megatron_rl.workshop.commands import models, recipes, runs

COMMANDS = (recipes, runs, models)
