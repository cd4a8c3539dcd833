"""The drawing of the house counts rooms, wings and arrows as a person would."""

from __future__ import annotations

from house import arrows_of, floors_of, rooms_of

SOURCES = {
    "hall/__init__.py": "import mezzo.hall.roof\n",
    "hall/cellar.py": "",
    "hall/ground.py": "from mezzo.hall import cellar\nfrom mezzo.hall.cellar import x\n",
    "hall/wing/__init__.py": "",
    "hall/wing/a.py": "from mezzo.hall.wing import b\nfrom mezzo.hall.ground import y\n",
    "hall/wing/b.py": "def f():\n    from mezzo.hall import ground\n",
    "hall/roof.py": "from mezzo.hall.wing.a import z\nif TYPE_CHECKING:\n    from mezzo.hall import cellar\n",
    "other.py": "from mezzo.hall import cellar\n",
}


def test_rooms_are_files_and_wings() -> None:
    assert rooms_of("hall", SOURCES) == {"cellar", "ground", "wing", "roof"}


def test_an_arrow_is_one_room_that_imports_another_of_its_hall() -> None:
    assert arrows_of("hall", SOURCES) == {("ground", "cellar"), ("wing", "ground"), ("roof", "wing")}


def test_floors_are_the_longest_chain() -> None:
    rooms, arrows = rooms_of("hall", SOURCES), arrows_of("hall", SOURCES)
    assert floors_of(rooms, arrows) == 4
    assert floors_of(rooms, arrows | {("roof", "cellar")}) == 4
    assert floors_of(rooms, arrows | {("cellar", "roof")}) == 4  # a ring is counted once
    assert floors_of(rooms, set()) == 1
