"""The log of a run."""

from __future__ import annotations

import logging
import logging.config
import shutil

from vlmrm.logs import start_log


def test_a_log_whose_folder_is_gone_ends_nobody_who_logs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = start_log("eval")
    logging.getLogger("vlmrm").info("one")
    assert path.read_text().endswith("INFO one\n")
    shutil.rmtree(tmp_path / "logs")
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # it closes all handlers
    for line in ("two", "three"):
        logging.getLogger("vlmrm").info(line)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line in ("one", "two", "three")] == ["one", "two", "three"]
    [told] = [line for line in lines if "cannot be written any more" in line]
    assert told.startswith(str(tmp_path / path))
