"""Two runs never share a folder, and a killed one does not keep it."""

import multiprocessing
import os
import signal
import socket

import pytest

from fastjax.errors import UserError
from fastjax.train.run_folder import RunFolder
from fastjax.train.run_lock import LOCK, check_not_locked, locked


def _hold(folder, pipe):
    with locked(folder):
        pipe.send(None)
        pipe.recv()


@pytest.fixture
def owner(tmp_path):
    """A process that has the folder `run`."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(tmp_path / "run", there))
    process.start()
    here.recv()
    yield process
    process.kill()
    process.join()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_second_run_is_told_who_has_the_folder_until_the_owner_is_killed(owner, tmp_path):
    folder = tmp_path / "run"
    words = f"in use by a run of process {owner.pid} on host {socket.gethostname()}"
    for settings in ({}, {"resume": "auto"}, {"overwrite": True}):
        with pytest.raises(UserError, match=words):
            RunFolder(folder).check(**settings)
    with pytest.raises(UserError, match=words), locked(folder):
        pass
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    assert (folder / LOCK).exists() and RunFolder(folder).is_empty()
    check_not_locked(folder)
    with locked(folder):
        pass
    assert list(folder.iterdir()) == []


def test_one_process_cannot_take_a_folder_twice(tmp_path):
    with locked(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()} "), locked(tmp_path):
        pass


def test_folders_made_for_the_lock_go_with_it_unless_something_came_in(tmp_path):
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "note").write_text("")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["note"]
    with pytest.raises(RuntimeError), locked(tmp_path / "c" / "d"):
        raise RuntimeError
    assert not (tmp_path / "c").exists()
