"""Pickled trajectories are imported as they are, and a pickle that asks for anything else than arrays is refused."""

from __future__ import annotations

import os
import pickle
import pickletools
from pathlib import Path

import numpy as np
import pytest

from vlmrm import cli
from vlmrm.errors import DataError
from vlmrm_robots.trajectories.importing import Imported, episodes_in, import_episodes, read_pickled
from vlmrm_robots.trajectories.pickles import read_dictionary
from vlmrm_robots.trajectories.trajectory import open_folder, trajectory_paths

STORED = np.random.default_rng(0).integers(0, 256, (3, 3, 4, 4), dtype=np.uint8)
LABELS = np.array([0, 0, 1], dtype=np.float32)


def save(path: Path, images: object, labels: object = LABELS, **more: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    np.save(path, {"images": images, "labels": labels, **more}, allow_pickle=True)  # ty: ignore[invalid-argument-type]
    return path


def import_trajectories(positive: Path | None, negative: Path | None, *to: Path | str) -> Imported:
    return import_episodes(episodes_in(positive, negative), *to)  # ty: ignore[invalid-argument-type]


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path, Path, Path]:
    return tmp_path / "old+", tmp_path / "old-", tmp_path / "new+", tmp_path / "new-"


@pytest.mark.parametrize(
    "frames",
    [STORED, STORED.astype(np.float32), np.asfortranarray(STORED / 255), (STORED / 255).astype(">f4")],
)
def test_every_kind_of_number_becomes_the_same_bytes(tmp_path, frames):
    trajectory = read_pickled(save(tmp_path / "0.npy", {"cam": frames}))
    assert (trajectory.images["cam"] == STORED).all() and trajectory.labels.tolist() == [0, 0, 1]


def test_folders_are_imported_once_and_sorted_by_labels(folders, capsys):
    save(folders[0] / "000000.npy", {"cam": STORED})
    save(folders[0] / "000001.npy", {"cam": STORED / 255}, np.zeros(3))
    save(folders[1] / "000000.npy", {"cam": STORED}, np.array([False, False, False]))
    save(folders[1] / "000001.npy", {"cam": STORED}, np.array([1, 0, 0]))
    actual = import_trajectories(*folders, "Toy")
    assert (len(actual.positive), len(actual.negative), actual.moved, actual.earlier) == (3, 1, 1, 0)
    positive = open_folder(folders[2])
    assert [file.metadata["success_once"] for file in positive] == ["true", "true", "false"]
    assert {file.metadata["environment"] for file in positive} == {"Toy"}
    words = ["--positive", folders[0], "--negative", folders[1], "--positive-dir", folders[2], "--negative-dir"]
    words += [folders[3], "--environment", "Toy"]
    cli.app(["frames", "import", *map(str, words)], result_action="return_value", exit_on_error=False)
    assert "0 positive and 0 negative trajectories" in (output := capsys.readouterr().out)
    assert "4 were there before" in output
    assert len(trajectory_paths(folders[2])) == 3


def test_episodes_that_begin_with_success_are_warned_of(folders, caplog):
    for name, labels in (("a", [1, 1, 1]), ("b", [0, 1, 1])):
        save(folders[0] / f"{name}.npy", {"cam": STORED}, np.array(labels))
    import_trajectories(folders[0], None, *folders[2:], "Toy")
    assert "1 of 2 episodes succeed in every frame (a.npy)" in caplog.text
    assert folders[3].is_dir()  # empty, which a training takes


def test_unimportable_episodes_are_named_after_the_rest(folders):
    save(folders[0] / "good.npy", {"cam": STORED})
    save(folders[0] / "short.npy", {"cam": STORED}, LABELS[:2])
    (folders[0] / "text.npy").write_text("not numpy")
    with pytest.raises(DataError, match=r"2 of 3 episodes were not imported \(short.npy, text.npy\)"):
        import_trajectories(folders[0], None, *folders[2:], "Toy")
    assert len(open_folder(folders[2])) == 1


def test_a_folder_with_nothing_to_import_is_named(folders):
    save(folders[0] / "good.npy", {"cam": STORED})
    for absent in (folders[1], folders[1] / "nowhere"):
        with pytest.raises(DataError, match=rf"there is no \.npy file in {absent}"):
            import_trajectories(folders[0], absent, folders[2], folders[3], "Toy")
    with pytest.raises(DataError, match="nothing to import"):
        import_trajectories(None, None, folders[2], folders[3], "Toy")
    assert not folders[2].exists()


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ({}, LABELS, "no images by key"),
        ([STORED], LABELS, "no images by key"),
        ({"cam": "text"}, LABELS, "images cam that are no array"),
        ({"cam": STORED}, [0, 0, 1], "labels that are no array"),
        ({"cam": STORED}, None, "and no labels, of which each frame needs one"),
        ({"cam": STORED.astype(np.float32) * 2}, LABELS, r"values that are outside \[0, 255\]"),
        ({"cam": np.full((3, 3, 4, 4), np.nan)}, LABELS, r"144 of 144 values"),
        ({"cam": STORED.astype(np.int64)}, LABELS, "are int64"),
    ],
)
def test_what_is_no_labelled_frame_is_refused(tmp_path, images, labels, message):
    path = save(tmp_path / "0.npy", images, labels)
    with pytest.raises(DataError, match=message) as refused:
        read_pickled(path)
    assert str(path) in str(refused.value)


# Pickles that would do harm ------------------------------------------------------------------------------------------


class Harm:
    """Makes a file where it is unpickled by a reader that runs pickles."""

    def __init__(self, function: object, *arguments: object):
        self.asked = function, arguments

    def __reduce__(self):
        return self.asked


@pytest.mark.parametrize("position", ["image", "label", "key", "more"])
def test_a_pickle_running_a_program_is_refused_unrun(tmp_path, position):
    victim = tmp_path / "ran"
    harm = Harm(os.system, f"touch {victim}")
    path = save(
        tmp_path / "0.npy",
        {"cam": harm if position == "image" else STORED},
        np.array([harm], dtype=object) if position == "label" else LABELS,
        **({"more": harm} if position == "more" else {"key": {(harm,): 1}} if position == "key" else {}),
    )
    dumped = tmp_path / "0.pkl"
    dumped.write_bytes(pickle.dumps({"infos": [harm]}))
    for file in (path, dumped):
        with pytest.raises(DataError, match=r"is refused: it asks for posix.system"):
            read_dictionary(file)
    assert not victim.exists()
    np.load(path, allow_pickle=True)
    assert victim.exists()  # so it was harmful


@pytest.mark.parametrize(
    "harm",
    [
        Harm(eval, "1"),
        Harm(getattr, "x", "upper"),
        Harm(np.load, "x.npy"),
        Harm(np.lib.format.open_memmap, "x.npy", "w+", float, (1,)),
        Harm(np.memmap, "x", "u1", "w+", 0, (1,)),
        Path("x"),
        np.datetime64(1, "s"),
        np.array(["text"]),
        np.array([{"a": 1}, 2], dtype=object),
        np.array([(1,)], dtype=[("a", "i4")]),
    ],
)
def test_only_number_arrays_and_plain_containers_are_read(tmp_path, harm, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"is refused|cannot be read"):
        read_dictionary(save(tmp_path / "0.npy", {"cam": harm}))
    assert [path.name for path in tmp_path.iterdir()] == ["0.npy"]


def pickled(path: Path, stream: bytes) -> Path:
    save(path, {})
    header = path.read_bytes()[:128]
    path.write_bytes(header + stream)
    return path


def test_streams_that_are_broken_or_huge_are_refused(tmp_path):
    complete = pickle.dumps({"images": {}, "labels": LABELS}, protocol=4)
    assert read_dictionary(pickled(tmp_path / "0.npy", complete))["labels"].tolist() == [0, 0, 1]
    opcode = {code.name: code.code.encode("latin1") for code in pickletools.opcodes}
    streams = [
        *(complete[:end] for end in range(0, len(complete), 7)),
        opcode["EMPTY_DICT"] + opcode["LONG_BINPUT"] + b"\xff" * 4 + b"N.",  # a memo of 4 billion places
        opcode["BINBYTES8"] + (2**62).to_bytes(8, "little") + b".",
        opcode["EMPTY_LIST"] + opcode["MEMOIZE"] + opcode["BINGET"] + b"\0" + opcode["APPEND"] + b".",  # in itself
        complete.replace(b"\x4b\x03", b"\x4b\x7f"),  # another shape than the content's
    ]
    for stream in streams:
        with pytest.raises(DataError, match=r"0\.npy (is refused|cannot be read|holds no dictionary)"):
            read_dictionary(pickled(tmp_path / "0.npy", stream))


def test_flags_of_a_forged_type_are_not_taken(tmp_path):
    stream = pickle.dumps({"labels": LABELS}, protocol=4)
    forged = stream.replace(b"J\xff\xff\xff\xffK\x00t", b"J\xff\xff\xff\xffK\x3ft")  # NumPy would see pointers

    read = read_dictionary(pickled(tmp_path / "0.npy", forged))

    assert forged != stream and not read["labels"].dtype.hasobject
