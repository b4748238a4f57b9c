from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import Problem
from gossamer.runner.data.boxes import BoxRows
from gossamer.runner.data.readers import DataProblems

numbers = st.floats(-50, 50, width=32)
rows = st.lists(st.tuples(st.integers(0, 4), st.tuples(numbers, numbers, numbers, numbers)), max_size=30)


def problem_at(record, message):
    return Problem(f"box {record}: {message}")


@given(rows, st.integers(1, 30), st.integers(1, 30))
def test_boxes_are_kept_exactly_if_they_meet_their_image_and_lie_inside_it_then(added, height, width):
    problems = DataProblems(refuse=False)
    builder = BoxRows(problems, problem_at)
    for place, (image, box) in enumerate(added):
        builder.add(image, list(box), place + 1, False, place)
    table = builder.table(np.tile([[height, width]], (5, 1)))
    kept: dict[int, tuple[int, list[float]]] = {}
    for image in range(5):
        found, outside = table.at(image, height, width)
        assert outside == 0
        for label, corners in zip(found.labels.tolist(), found.corners.tolist(), strict=True):
            kept[label - 1] = image, corners
    for place, (image, (x1, y1, x2, y2)) in enumerate(added):
        cut = [min(max(x1, 0), width), min(max(y1, 0), height), min(max(x2, 0), width), min(max(y2, 0), height)]
        sides = np.float32(cut[2:]) - np.float32(cut[:2])
        solid = x1 < x2 and y1 < y2 and (sides > 0).all() and sides[0] * sides[1] > 0
        assert kept.get(place) == ((image, cut) if solid else None)
    lost = sum(int(note.split("left out: ")[1].split(";")[0]) for note in problems.notes if "left out" in note)
    assert lost + len(kept) == len(added)


def test_a_table_of_no_boxes_knows_its_images():
    table = BoxRows(DataProblems(refuse=True), problem_at).table(np.full((3, 2), -1))
    assert len(table) == 3
    assert table.at(2, 5, 5)[0].corners.shape == (0, 4)
