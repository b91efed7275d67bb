"""Broken and hostile files are each refused in one sentence, soon, and the others beside them are imported."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save as save_arrays

from vlmrm.errors import DataError
from vlmrm_robots.trajectories import hdf5
from vlmrm_robots.trajectories.importing import episodes_in, import_episodes, read_pickled
from vlmrm_robots.trajectories.rlinf import read_episode, read_payload
from vlmrm_robots.trajectories.trajectory import open_folder, open_trajectory

h5py = pytest.importorskip("h5py")

FRAMES = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
LABELS = np.array([0, 0, 1, 1], dtype=np.float32)


def write_npy(path: Path) -> None:
    np.save(path, {"images": {"cam": FRAMES.transpose(0, 3, 1, 2) / 255}, "labels": LABELS}, allow_pickle=True)  # ty: ignore


def write_pkl(path: Path, **changes: Any) -> None:
    observations = [{"main_images": torch.from_numpy(frame), "wrist_images": frame} for frame in FRAMES]
    infos = [{}, {"success": False}, {"success": np.bool_(True)}, {"episode": {"success_once": True}}]
    path.write_bytes(pickle.dumps({"observations": observations, "infos": infos, "success": True} | changes))


def write_pt(path: Path) -> None:
    torch.save({"images": [torch.from_numpy(frame.copy()) for frame in FRAMES], "labels": [0, 0, 1, 1]}, path)


def write_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        for demo in ("demo_1", "demo_2"):
            file[f"data/{demo}/rewards"] = LABELS
            file.create_dataset(f"data/{demo}/next_obs/agentview_image", data=FRAMES, compression="gzip")


def write_safetensors(path: Path) -> None:
    path.write_bytes(save_arrays({"images.cam": FRAMES.transpose(0, 3, 1, 2).copy(), "labels": LABELS}))


def read_hdf5(path: Path) -> object:
    return [episode.read() for episode in hdf5.episodes_of(path)]


def read_safetensors(path: Path) -> object:
    file = open_trajectory(path)
    return [file.frames(key) for key in file.keys]


FORMATS: dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]] = {
    ".npy": (write_npy, read_pickled),
    ".pkl": (write_pkl, read_episode),
    ".pt": (write_pt, read_payload),
    ".hdf5": (write_hdf5, read_hdf5),
    ".safetensors": (write_safetensors, read_safetensors),
}


def mutated(content: bytes, chance: random.Random) -> bytes:
    """The bytes cut short, with bits flipped, a number made huge, or a piece left out or twice."""
    changed, at = bytearray(content), chance.randrange(len(content))
    match chance.randrange(4):
        case 0:
            return content[:at]
        case 1:
            for _ in range(chance.randrange(1, 5)):
                changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        case 2:
            changed[at : at + 8] = chance.choice([b"\xff" * 8, (1 << 40).to_bytes(8, "little"), bytes(8)])
        case 3:
            end = min(len(content), at + chance.randrange(1, 64))
            return content[:at] + content[end:] if chance.random() < 0.5 else content[:end] + content[at:]
    return bytes(changed)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about versions of pickles
@pytest.mark.parametrize("suffix", FORMATS)
def test_a_broken_file_is_one_sentence_naming_it(tmp_path, suffix):
    write, read = FORMATS[suffix]
    path, chance, refused = tmp_path / f"x{suffix}", random.Random(0), 0
    write(path)
    assert read(path)
    content = path.read_bytes()
    for _ in range(150):
        path.unlink()  # HDF5 keeps what it knows of a file
        path.write_bytes(mutated(content, chance))
        try:
            read(path)
        except DataError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 600, error
    assert refused > 40


# Small files that claim much -----------------------------------------------------------------------------------------


def rewritten(path: Path, compression: int, pickled: bytes | None = None) -> Path:
    """Write an archive of torch.save again, with another compression or pickle."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, pickled if pickled is not None and name.endswith("data.pkl") else content)
    return path


def test_a_deflated_torch_file_is_refused_unread(tmp_path):
    torch.save({"images": [torch.zeros(3, 512, 512, dtype=torch.uint8)], "labels": [0]}, tmp_path / "x.pt")
    path = rewritten(tmp_path / "x.pt", zipfile.ZIP_DEFLATED)
    with pytest.raises(DataError, match="compressed, or claims more bytes"):
        read_payload(path)


def test_one_frame_named_a_thousand_times_is_refused(tmp_path):
    frame = torch.zeros(64, 64, 3, dtype=torch.uint8)
    torch.save({"images": [frame] * 1000, "labels": [0] * 1000}, tmp_path / "x.pt")
    write_pkl(tmp_path / "t.pkl", observations=[{"main_images": frame}] * 1000, infos=[{"success": False}] * 1000)
    array = frame.numpy()
    write_pkl(tmp_path / "a.pkl", observations=[{"main_images": array}] * 1000, infos=[{"success": False}] * 1000)
    np.save(tmp_path / "x.npy", {"images": {str(i): array for i in range(1000)}, "labels": LABELS}, allow_pickle=True)  # ty: ignore
    for name, read in (
        ("x.pt", read_payload),
        ("t.pkl", read_episode),
        ("a.pkl", read_episode),
        ("x.npy", read_pickled),
    ):
        with pytest.raises(DataError, match=rf"{name}.* more than 16 times"):
            read(tmp_path / name)


def test_pictures_of_another_file_are_not_read(tmp_path):
    (tmp_path / "secret").write_bytes(FRAMES.tobytes())
    write_hdf5(tmp_path / "other.hdf5")
    path = tmp_path / "x.hdf5"
    for kind in ("external", "link", "virtual"):
        with h5py.File(path, "w") as file:
            file["data/demo_1/rewards"] = LABELS
            pictures = file.create_group("data/demo_1/next_obs")
            if kind == "external":
                stored = [(str(tmp_path / "secret"), 0, FRAMES.nbytes)]
                pictures.create_dataset("cam_image", FRAMES.shape, "u1", external=stored)
            elif kind == "link":
                pictures["cam_image"] = h5py.ExternalLink("other.hdf5", "data/demo_1/next_obs/agentview_image")
            else:
                layout = h5py.VirtualLayout(FRAMES.shape, "u1")
                layout[:] = h5py.VirtualSource("other.hdf5", "data/demo_1/next_obs/agentview_image", FRAMES.shape)
                pictures.create_virtual_dataset("cam_image", layout)
        with pytest.raises(
            DataError, match=r"demo_1: .*cam_image is in another file|agentview_image is in another file"
        ):
            read_hdf5(path)


# Values that are no frames or labels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("success", ["perhaps", [{}], {"once": True}])
def test_a_success_neither_true_nor_false_is_refused(tmp_path, success):
    write_pkl(tmp_path / "0.pkl", infos=[{}, {}, {}, {"success": success}])
    with pytest.raises(DataError, match=r"0\.pkl has a success that is neither"):
        read_episode(tmp_path / "0.pkl")
    write_pkl(tmp_path / "0.pkl", success=success)
    with pytest.raises(DataError, match=r"0\.pkl has a success that is neither"):
        read_episode(tmp_path / "0.pkl")


def test_an_episode_silent_on_success_is_no_failure(tmp_path):
    write_pkl(tmp_path / "0.pkl", infos=[{"reward": 1.0}] * 4)
    with pytest.raises(DataError, match=r"0\.pkl has no success in its infos"):
        read_episode(tmp_path / "0.pkl")


def test_good_files_are_imported_beside_bad_ones(tmp_path):
    raw, folders = tmp_path / "raw", (tmp_path / "positive", tmp_path / "negative")
    raw.mkdir()
    for name, content in (("bad.hdf5", b"nothing"), ("bad.pkl", b""), ("bad.pt", b"PK")):
        (raw / name).write_bytes(content)
    os.mkfifo(raw / "pipe.pkl")
    (raw / "folder.pt").mkdir()
    (raw / "gone.pkl").symlink_to("nowhere")
    write_hdf5(raw / "good.hdf5")
    write_pkl(raw / "good.pkl")
    write_pt(raw / "good.pt")
    with pytest.raises(DataError, match=r"6 of 10 episodes were not imported .*beside 4 positive and 0 negative"):
        import_episodes(episodes_in(None, None, raw), *folders, "Toy")
    assert len(open_folder(folders[0])) == 4
    with pytest.raises(DataError, match=r"6 of 10 .*4 were there before"):
        import_episodes(episodes_in(None, None, raw), *folders, "Toy")
    assert len(open_folder(folders[0])) == 4
