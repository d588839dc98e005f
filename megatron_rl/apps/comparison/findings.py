"""Sentences on a comparison: recommended label, best beyond noise, distance from the reference."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_rl.apps.comparison.comparison import Cell, Comparison, beyond_noise
from megatron_rl.tracking.metrics_file import AREA, IN_BF16

CRITERIA = {AREA: "area under the accuracy curve", IN_BF16: "accuracy in a BF16 engine"}
TEST = (
    "Noise: a paired t-test over the seeds, two-sided at 95 %, each pair of cells by itself. The "
    "runs of one seed begin with the same policy and see the same prompts in the same order."
)


@dataclass(frozen=True)
class Finding:
    """Ranking at one place of a comparison, among the cells that have all their runs."""

    place: tuple[str, ...]
    best: Cell
    beaten: tuple[Cell, ...]
    level: tuple[Cell, ...]  # within noise of the best; with one seed, all others
    left_out: tuple[Cell, ...]  # a run is missing, or has not finished
    criterion: str = AREA
    alike: tuple[tuple[Cell, ...], ...] = ()  # several, whose runs came to the very same

    @property
    def seeds(self) -> int:
        return len(self.best.by_seed(self.criterion))

    def never_beaten(self) -> list[str]:
        return [cell.labels[-1] for cell in (self.best, *self.level)]

    def __str__(self) -> str:
        where = f"{' / '.join(self.place)}: " if self.place else ""
        same = "".join(
            f" The settings that differ among {_names(cells)} changed no weight: their "
            f"runs are the same.{_differ(cells)}"
            for cells in self.alike
        )
        return f"{where}{self._best()}{same}"

    def _best(self) -> str:
        if not self.beaten and not self.level:
            noise = "; nothing else finished there"
        elif self.seeds < 2:
            noise = ". One seed says nothing about noise"
        elif not self.beaten:
            noise = f", but nothing is best there beyond the noise of {self.seeds} seeds"
        else:
            noise = f". Beyond the noise of {self.seeds} seeds it is above {_names(self.beaten)}"
            if self.level:
                noise += f", and is not distinguishable from {_names(self.level)}"
        name = CRITERIA[self.criterion]
        largest = f"{self.best.labels[-1]} has the largest {name}"
        return f"{largest}, {self.best.written(self.criterion)}{noise}{_left_out(self.left_out)}."


def findings(comparison: Comparison) -> list[Finding]:
    """A finding for each place where something has finished."""
    found = []
    number = comparison.criterion
    for place, cells in comparison.places().items():
        whole = [cell for cell in cells if cell.whole and cell.by_seed(number)]
        rest = tuple(cell for cell in cells if cell not in whole)
        if not whole:
            continue
        best = max(whole, key=lambda cell: cell.mean(number) or 0.0)
        beaten = tuple(
            cell for cell in whole if cell is not best and beyond_noise(best, cell, number)
        )
        level = tuple(cell for cell in whole if cell is not best and cell not in beaten)
        found.append(Finding(place, best, beaten, level, rest, number, tuple(_alike(whole))))
    return found


def _alike(cells: Sequence[Cell]) -> Iterator[tuple[Cell, ...]]:
    left = list(cells)
    while left:
        same = tuple(cell for cell in left if cell.outcome() == left[0].outcome())
        left = [cell for cell in left if cell not in same]
        if len(same) > 1:
            yield same


def _differ(cells: Sequence[Cell]) -> str:
    """The smallest setting in which cells of the same outcome would not have had it."""
    ratios = [one.ratios for cell in cells for one in cell.runs if one.ratios]
    further = "the smallest grid with a sampler that is further off is python tools/compare_corrections.py by itself"
    if not ratios:
        return f" {further[0].upper()}{further[1:]}."
    low = min(low for low, _ in ratios)
    high = max(high for _, high in ratios)
    return (
        f" All ratios of learner and sampler lay in [{low:.3g}, {high:.3g}], and a bound acts "
        f"inside of that, such as correction.weight.high={1 + (high - 1) / 2:.3g}; {further} "
        "(recipes/first_comparison.yaml)."
    )


def recommendation(comparison: Comparison) -> str:
    """Recommend one of the compared labels, as far as the runs support it."""
    judged = [one for one in findings(comparison) if one.seeds > 1 and (one.beaten or one.level)]
    axis = comparison.axes[-1]
    if not judged:
        return f"No recommendation: it takes two finished seeds of at least two choices of {axis}."
    if not any(one.beaten for one in judged):
        return f"No choice of {axis} is best anywhere beyond the noise of the seeds: take the cheapest."
    everywhere = [
        label
        for label in judged[0].never_beaten()
        if all(label in one.never_beaten() for one in judged)
    ]
    if not everywhere:
        best = "; ".join(
            f"{' / '.join(one.place)}: {one.best.labels[-1]}" for one in judged if one.beaten
        )
        return f"No choice of {axis} holds everywhere. Beyond the noise of the seeds: {best}."
    if len(everywhere) == 1:
        return f"Take {everywhere[0]}: no other choice of {axis} is above it anywhere beyond the noise of the seeds."
    times = {cell.labels: cell.mean("step_s") or 0.0 for cell in comparison.cells}
    timed = {
        tuple(place)
        for *place, _ in times
        if all(times.get((*place, label)) for label in everywhere)
    }
    fastest = min(everywhere, key=lambda label: sum(times[*place, label] for place in timed))
    shortest = f" {fastest} has the shortest steps." if timed else ""
    best = f"Take one of {_listed(everywhere)}: nothing is above them anywhere beyond the noise of the seeds."
    return best + shortest


def beside_reference(comparison: Comparison) -> Iterator[str]:
    """Distance of the best of each place from the reference."""
    reference = comparison.beside()
    number = comparison.criterion
    if reference is None or not reference.by_seed(number):
        return
    yield f"{reference.name} (reference): {reference.written(number)}."
    for one in findings(comparison):
        difference = (one.best.mean(number) or 0.0) - (reference.mean(number) or 0.0)
        above = beyond_noise(one.best, reference, number)
        if above is None:
            noise = "one seed"
        elif above or beyond_noise(reference, one.best, number):
            noise = "beyond noise"
        else:
            noise = "within noise"
        yield f"{one.best.name} is {difference:+.3f} from it, {noise}."


def summary(comparison: Comparison) -> list[str]:
    """The recommendation, the findings, and the distances from the reference."""
    return [
        recommendation(comparison),
        *map(str, findings(comparison)),
        *beside_reference(comparison),
    ]


def _left_out(cells: Sequence[Cell]) -> str:
    if not cells:
        return ""
    return "; not judged: " + ", ".join(
        f"{cell.labels[-1]} ({len(cell.finished)} of {len(cell.runs)} runs finished)"
        for cell in cells
    )


def _names(cells: Sequence[Cell]) -> str:
    return _listed([cell.labels[-1] for cell in cells])


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
