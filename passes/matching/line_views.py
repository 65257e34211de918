"""How slices, views and broadcasting move the lines of ``lines`` over other axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import relax

from .lines import Line, Offset, Steps, Value, as_line, proved, reach, uniform
from .spelling import number


def ints(fields: Sequence[relax.Expr]) -> list[int]:
    """Return static operands; TypeError for a symbolic one."""
    return [int(f) for f in fields]


def inserted(slopes: Sequence[int], places: Sequence[int]) -> list[int]:
    """Return slopes with axes of size 1 put in."""
    out = list(slopes)
    for place in places:
        out.insert(place, 0)
    return out


def move(value: Value, slopes: Callable[[Sequence[int]], Sequence[int]], rank: int) -> Value:
    """Return the value over other axes; axes that broadcasting would add are written out first."""

    def move(now: Sequence[int]) -> Sequence[int]:
        return slopes([0] * (rank - len(now)) + list(now))

    return value.move(move(value.slopes)) if isinstance(value, Line) else value.move(move)


def narrow(value: Value, shape: list[int | None] | None) -> Value:
    """Return the value with no slope along axes of size 1, where the index is 0."""
    if shape is None:
        return value
    return move(value, lambda s: [0 if d == 1 else k for k, d in zip(s, shape)], len(shape))


def sliced(value: Value, axes: list, begin: list, end: list, strides: list | None = None, *, rank: int) -> Value:
    """Return the value behind a slice, ValueError where an index counts from the end."""
    steps = dict(zip(ints(axes), zip(map(number, begin), ints(strides or [1] * len(axes)))))
    # Counted from the end, the first index would depend on the size.
    if uniform(value) is None and not all(step >= 1 and proved(first >= 0) for first, step in steps.values()):
        raise ValueError

    def cut(line: Line) -> Line:
        slopes, offset = [0] * (rank - len(line.slopes)) + list(line.slopes), line.offset
        for axis, (first, step) in steps.items():
            offset, slopes[axis % rank] = offset + slopes[axis % rank] * first, slopes[axis % rank] * step
        return Line(tuple(slopes), offset)

    return cut(value) if isinstance(value, Line) else value.each(cut)


def gathered(value: Value, indices: Sequence[Line], shapes: Sequence[Sequence[Offset]]) -> Value | None:
    """Return the value at indices that are lines themselves, one for each axis, over tensors of ``shapes``."""
    # An index below zero would count from the end.
    if not all(proved(reach(line, shape)[0] >= 0) for line, shape in zip(indices, shapes)):
        return None

    def at(line: Line) -> Line:
        total = Line((), line.offset)
        for slope, index in zip((0,) * (len(indices) - len(line.slopes)) + line.slopes, indices):
            total = total.plus(index.times(slope))
        return total

    return at(value) if isinstance(value, Line) else value.each(at)


def joined(values: Sequence[Value], sizes: Sequence[Offset], axis: int, rank: int) -> Value | None:
    """Return one value for tensors one behind another, where the next goes on as the last one ended."""
    if all(isinstance(v, Steps) for v in values):
        numbers = {uniform(v) for v in values}
        return values[0] if len(numbers) == 1 and None not in numbers else None
    known = [line for line in map(as_line, values) if line is not None]
    if len(known) < len(values):
        return None
    lines = [line.move([0] * (rank - len(line.slopes)) + list(line.slopes)) for line in known]
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    # Along an axis of size 1 a line has any slope.
    free = [proved(size == 1) for size in sizes]
    guide = next((n for n, any_slope in enumerate(free) if not any_slope), 0)
    slope = lines[guide].slopes[axis]
    whole = Line(lines[guide].slopes, lines[guide].offset - slope * starts[guide])
    for line, start, any_slope in zip(lines, starts, free):
        same = [a == b or (n == axis and any_slope) for n, (a, b) in enumerate(zip(line.slopes, whole.slopes))]
        away = whole.offset + slope * start - line.offset
        if not all(same) or not (proved(away >= 0) and proved(away <= 0)):
            return None
    return whole
