"""Small generated files in the formats that public scripts read, so that nothing is downloaded; ``scripts.csv`` names these functions."""

from __future__ import annotations

import datetime
import math
import random
import subprocess
from pathlib import Path

WORDS = "the a sun moon river hill tree bird sings falls shines over under near far old".split()


def text(path: Path, num_lines: int) -> None:
    """Write lines of eight words: every second word follows from the one before, so that there is something to learn."""
    draw = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_lines):
            first = [draw.randrange(len(WORDS)) for _ in range(4)]
            file.write(" ".join(f"{WORDS[i]} {WORDS[i * 7 % len(WORDS)]}" for i in first) + "\n")


def images(folder: Path, *, count: int, side: int = 64, suffix: str = "jpg", masks: bool = False) -> None:
    """Write RGB images of a bright disc on noise, named by number; with ``masks`` the disc alone, 0 and 255."""
    import numpy
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.RandomState(0)
    rows, columns = numpy.mgrid[:side, :side]
    for number in range(count):
        centre, radius = draw.randint(side // 4, 3 * side // 4, 2), draw.randint(side // 8, side // 4)
        noise = draw.rand(side, side, 3)
        disc = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 < radius**2
        picture = numpy.where(disc[..., None], 0.7, 0.0) + 0.3 * noise
        array = disc.astype("uint8") * 255 if masks else (255 * picture).astype("uint8")
        Image.fromarray(array).convert("L" if masks else "RGB").save(folder / f"{number:03}.{suffix}")


def corpus(folder: Path) -> None:
    """Write the three texts of a word-level language model."""
    for name, num_lines in (("train", 400), ("valid", 40), ("test", 40)):
        text(folder / f"data/wikitext-2/{name}.txt", num_lines)


def penn_treebank(folder: Path) -> None:
    """Write the three texts of a word-level language model in the folder of the Penn Treebank."""
    for name, num_lines in (("train", 300), ("valid", 40), ("test", 10)):
        text(folder / f"data/penn/{name}.txt", num_lines)


def shakespeare(folder: Path) -> None:
    text(folder / "data/shakespeare_char/input.txt", 400)


def segmentation(folder: Path) -> None:
    images(folder / "data/imgs", count=24)
    images(folder / "data/masks", count=24, suffix="png", masks=True)


def super_resolution(folder: Path) -> None:
    """Write BSDS300's folders, with 24 images for training and 8 for tests."""
    for split, count in (("train", 24), ("test", 8)):
        images(folder / "dataset/BSDS300/images" / split, count=count, side=300)


def image_folders(folder: Path) -> None:
    """Write a folder of images a class, two classes, for training and for validation."""
    for split, count in (("train", 32), ("val", 8)):
        _classes(folder / "images" / split, count)


def few_image_folders(folder: Path) -> None:
    _classes(folder / "images/train", 6)


def _classes(folder: Path, count: int) -> None:
    images(folder / "disc", count=count)
    images(folder / "mask", count=count, suffix="png", masks=True)


def citations(folder: Path) -> None:
    """Write a graph in the format of Cora: 1,600 papers of seven topics, the words of each mostly its topic's, cited within topics."""
    cora = folder.parent / "data" / "cora"
    cora.mkdir(parents=True)
    draw = random.Random(0)
    topics = [draw.randrange(7) for _ in range(1600)]
    with (cora / "cora.content").open("w", encoding="utf-8") as file:
        for paper, topic in enumerate(topics):
            has = [int(draw.random() < (0.2 if word % 7 == topic else 0.02)) for word in range(140)]
            file.write("\t".join([str(paper + 1), *map(str, has), f"Topic_{topic}"]) + "\n")
    with (cora / "cora.cites").open("w", encoding="utf-8") as file:
        for paper, topic in enumerate(topics):
            same = [other for other in draw.sample(range(1600), 40) if topics[other] == topic and other != paper]
            file.writelines(f"{paper + 1}\t{other + 1}\n" for other in same[:3])


def characters(folder: Path) -> None:
    """Write Omniglot's array: 1,220 characters, 20 drawings of each, which are its pattern under noise."""
    import numpy

    draw = numpy.random.RandomState(0)
    drawings = 0.7 * draw.rand(1220, 1, 28, 28, 1) + 0.3 * draw.rand(1220, 20, 28, 28, 1)
    (folder / "omniglot").mkdir()
    numpy.save(folder / "omniglot" / "omniglot.npy", drawings.astype("float32"))


def knowledge_graph(folder: Path) -> None:
    """Write 600 triples over 60 entities: each of four relations leads a fixed distance around a circle."""
    graph = folder / "triples"
    graph.mkdir()
    for kind, letter, count in (("entities", "e", 60), ("relations", "r", 4)):
        (graph / f"{kind}.dict").write_text("".join(f"{i}\t{letter}{i}\n" for i in range(count)), encoding="utf-8")
    draw = random.Random(0)
    for split, count in (("train", 600), ("valid", 20), ("test", 20)):
        pairs = [(draw.randrange(60), draw.randrange(4)) for _ in range(count)]
        lines = "".join(f"e{head}\tr{by}\te{(head + 7 * by + 1) % 60}\n" for head, by in pairs)
        (graph / f"{split}.txt").write_text(lines, encoding="utf-8")


def hourly_series(folder: Path) -> None:
    """Write ETT's table: 20 months of hours, seven noisy sines of a day or longer."""
    draw, start = random.Random(0), datetime.datetime(2016, 7, 1)
    (folder / "data" / "ETT").mkdir(parents=True)
    with (folder / "data" / "ETT" / "ETTh1.csv").open("w", encoding="utf-8") as file:
        file.write("date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT\n")
        for hour in range(20 * 30 * 24):
            values = (math.sin(2 * math.pi * hour / (24 * k)) + 0.3 * draw.gauss(0, 1) for k in range(1, 8))
            file.write(f"{start + datetime.timedelta(hours=hour)},{','.join(f'{value:.4f}' for value in values)}\n")


def own_images(folder: Path) -> None:
    subprocess.run(["tar", "-x", "-f", "test_images/lite_data.tar"], cwd=folder, check=True)
