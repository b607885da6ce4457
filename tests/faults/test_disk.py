"""Disks that are full or read-only: noticed at the start where they can be, and otherwise the earlier state stays."""

import shutil
import subprocess

import pytest

from fastjax.errors import UserError
from fastjax.train.files import check_room
from fastjax.train.state import CheckpointStore


def refused(code: int, output: str) -> str:
    """The message of a command that was refused as it ought to be."""
    assert code == 2, output
    assert "Traceback" not in output and output.count("error:") == 1
    message = output[output.index("error:") :]
    assert len(message.splitlines()) <= 3
    return message


def test_no_room_for_a_checkpoint_is_noticed_before_the_first_step(server, settings, tmpfs):
    disk = tmpfs("16k")
    message = refused(*server.run({**settings, "output_dir": disk / "run", "max_steps": 2}))
    assert f"output_dir='{disk / 'run'}'" in message and "no room" in message and "another disk" in message
    assert list(disk.iterdir()) == []


def test_a_disk_that_fills_while_a_run_goes_on_leaves_the_checkpoints_before_whole(server, settings, tmpfs):
    disk = tmpfs("1m")
    message = refused(*server.run({**settings, "output_dir": disk / "run", "max_steps": 200}))
    assert str(disk / "run") in message and "No space left on device" in message
    store = CheckpointStore(disk / "run" / "checkpoints")
    newest, complaints = store.newest()
    assert newest is not None and complaints == []
    assert not list((disk / "run").rglob(".*"))
    # With room again the run goes on from there.
    for step in store.steps()[:-1]:
        shutil.rmtree(store.path(step))
    more = {"output_dir": disk / "run", "max_steps": int(newest.name) + 1, "resume": "auto"}
    more["lr_scheduler_type"] = "constant"
    code, output = server.run({**settings, **more})
    assert code == 2 and "lr_scheduler_type was 'linear' and is now 'constant'" in output
    assert "--resume_override lr_scheduler_type" in output
    code, output = server.run({**settings, **more, "resume_override": "lr_scheduler_type"})
    assert code == 0 and f"going on from {newest}" in output, output


def test_a_file_size_limit_is_a_message_and_leaves_nothing(server, settings, tmp_path):
    flags = {**settings, "output_dir": tmp_path / "run", "max_steps": 2}
    message = refused(*server.run(flags, limits={"RLIMIT_FSIZE": 10_000}))
    assert "File too large" in message
    assert not (tmp_path / "run").exists()


def test_a_read_only_output_folder_is_refused_before_a_model_is_read(server, settings, read_only, tmp_path):
    (tmp_path / "mine").mkdir()
    place = read_only(tmp_path / "mine")
    flags = {**settings, "model": tmp_path / "no_such_model", "output_dir": place / "run"}
    message = refused(*server.run(flags))
    assert f"{place} cannot be written" in message


def test_a_folder_that_becomes_read_only_leaves_the_checkpoints_before_whole(server, settings, tmpfs):
    disk = tmpfs("64m")
    running = server.start({**settings, "output_dir": disk / "run", "max_steps": 5000})
    store = CheckpointStore(disk / "run" / "checkpoints")
    running.until(store.steps)
    # As a file system does that meets an error of its disk; this one lets itself be made so only while no file is open
    # for writing, and metrics.jsonl always is.
    done = subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True)
    if done.returncode:
        running.kill()
        running.wait()
        pytest.skip("a file system with a file open for writing cannot be made read-only here")
    message = refused(running.wait(), running.output())
    assert "Read-only file system" in message
    newest, complaints = store.newest()
    assert newest is not None and complaints == []


def test_a_model_is_read_from_a_read_only_folder(server, settings, model_folder, read_only, tmp_path):
    flags = {**settings, "model": read_only(model_folder), "output_dir": tmp_path / "run", "max_steps": 1}
    code, output = server.run(flags)
    assert code == 0, output


def test_room_is_asked_of_the_disk_and_of_the_limit(tmpfs):
    disk = tmpfs("1m")
    check_room(disk, 1 << 19)
    with pytest.raises(OSError, match="No space left"):
        check_room(disk, 1 << 21)


def test_a_user_without_rights_is_told(tmp_path, monkeypatch):
    """As root every folder can be written, so the system's answer is put in its place."""
    from fastjax.models.checkpoint import files

    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="cannot be written; give a folder that can"):
        files.check_folder(tmp_path / "run", "output_dir")
