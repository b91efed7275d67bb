"""Donors: what a row is shown instead, drawn so that it favours neither of the row's answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from PIL import Image as Pillow

from tests.conversations import references
from vlmrm.data.rows import read_row
from vlmrm.measures.donors import donors_of


def rows_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"index": i, "comparison": read_row(row, f"row-{i}", str)} for i, row in enumerate(rows)]


def question(number: int, images: list[str], chosen="It is red.", rejected="It is blue.", prompt="Which colour?"):
    return {"prompt": prompt, "images": images, "chosen": chosen, "rejected": f"{rejected} {number}"}


def test_a_donor_shares_no_picture_in_any_order():
    """Pairs of pictures, each in both orders, and two rows about each."""
    couples = [(f"{i}.png", f"{i}_.png") for i in range(64)]
    dataset = rows_of([question(i, list(some)) for i, (a, b) in enumerate(couples) for some in ((a, b), (b, a))])
    for place, row in enumerate(dataset):
        donors = donors_of(row["comparison"], place, dataset)
        shown = [picture for each in (row["comparison"], *donors) for picture in references(each.prompt)]
        assert len(donors) == 2 and len(shown) == len({*shown}), "nor has the second donor any of the first's"


def test_a_renamed_copy_of_the_picture_never_donates(tmp_path):
    paths = []
    for number, colour in enumerate(["red", "red", "red", "blue"]):
        paths.append(str(tmp_path / f"{number}.png"))
        Pillow.new("RGB", (56, 56), colour).save(paths[-1])
    dataset = rows_of([question(i, [path]) for i, path in enumerate(paths)])
    for place in range(3):
        [donor] = donors_of(dataset[place]["comparison"], place, dataset)
        assert references(donor.prompt) == [paths[3]]


def test_rows_with_equal_answers_still_have_donors():
    rows = [{"prompt": "A dog?", "images": [f"{i}.png"], "chosen": "Yes.", "rejected": "No."} for i in range(40)]
    dataset = rows_of(rows)
    assert all(donors_of(row["comparison"], place, dataset) for place, row in enumerate(dataset))


def test_donors_share_category_and_image_count_when_near():
    """Sixteen rows in turn of three categories, with one image or two; the three others of each kind are all there."""
    dataset = [
        {"index": i, "comparison": replace(row["comparison"], category=f"category {i % 3}")}
        for i, row in enumerate(rows_of([question(i, [f"{i}.png", f"{i}_.png"][: 1 + i % 2]) for i in range(48)]))
    ]
    for place, row in enumerate(dataset):
        drawn = donors_of(row["comparison"], place, dataset)
        kinds = {(donor.category, len(references(donor.prompt))) for donor in (row["comparison"], *drawn)}
        assert len(drawn) == 2 and len(kinds) == 1
    alone = replace(dataset[5]["comparison"], category="its own")
    assert len(donors_of(alone, 5, dataset)) == 2, "else any"


def test_a_mirror_is_no_donor_even_if_alone():
    first, mirror = (question(0, [f"{i}.png"], "It is red.", "It is blue.") for i in range(2))
    mirror |= {"chosen": first["rejected"], "rejected": first["chosen"]}
    dataset = rows_of([first, mirror, *(question(i, [f"{i}.png"], f"It is {i}.", prompt="Why?") for i in range(2, 6))])
    for place in (0, 1):
        dataset[place]["comparison"] = replace(dataset[place]["comparison"], category="both")
    for place in (0, 1):
        drawn = donors_of(dataset[place]["comparison"], place, dataset)
        assert len(drawn) == 2 and not {donor.id for donor in drawn} & {"row-0", "row-1"}
