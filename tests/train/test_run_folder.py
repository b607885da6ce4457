"""Whose folder it is, and what of an earlier run stays."""

import pytest

from fastjax.errors import UserError
from fastjax.train.manifest import write_manifest
from fastjax.train.run_folder import RunFolder


@pytest.fixture
def used(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.start({"seed": 1}, keep=False)
    folder.metrics.write_text('{"step": 1}\n')
    (folder.checkpoints / "5").mkdir(parents=True)
    write_manifest(folder.checkpoints / "5", {"step": 5})
    return folder


def test_an_absent_or_empty_folder_is_free(tmp_path):
    RunFolder(tmp_path / "absent").check()
    RunFolder(tmp_path).check(resume="auto")


def test_a_used_folder_needs_resume_or_overwrite(used):
    with pytest.raises(UserError, match="is not empty.*--resume auto.*--overwrite_output_dir"):
        used.check()
    used.check(resume="auto")
    used.check(overwrite=True)
    used.check(resume=str(used.checkpoints / "5"))


@pytest.mark.parametrize("settings", [{"overwrite": True}, {"resume": "auto"}])
def test_a_folder_that_no_run_wrote_is_never_touched(tmp_path, settings):
    (tmp_path / "config.yaml").write_text("somebody: else\n")
    with pytest.raises(UserError, match="no fastjax run wrote"):
        RunFolder(tmp_path).check(**settings)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunFolder(tmp_path / "file").check()


def test_resume_wants_a_checkpoint_and_says_where_one_is(used, tmp_path):
    with pytest.raises(UserError, match="is not a checkpoint.*give .*checkpoints/5"):
        used.check(resume=str(used.path))
    with pytest.raises(UserError, match="is not a checkpoint"):
        used.check(resume=str(tmp_path / "nowhere"))
    other = RunFolder(tmp_path / "other")
    other.check(resume=str(used.checkpoints / "5"))
    other.start({}, keep=False)
    with pytest.raises(UserError, match="another run"):
        other.check(resume=str(used.checkpoints / "5"))


def test_a_new_start_removes_what_runs_write_and_nothing_else(used):
    mine = [
        used.path / "notes.txt",
        used.path / ".notes.tmp",
        used.adapter / "README.md",
        used.checkpoints / "plot.png",
    ]
    used.adapter.mkdir()
    used.tensorboard.mkdir()
    for path in (*mine, used.adapter / "adapter_config.json", used.tensorboard / "events.out.tfevents.1"):
        path.write_text("mine")
    used.start({"seed": 2}, keep=False)
    assert sorted(p for p in used.path.rglob("*") if p.is_file()) == sorted([used.config, *mine])
    assert not used.tensorboard.exists()


def test_linked_parts_of_a_run_stay_links_and_are_emptied(used, tmp_path):
    big = tmp_path / "big"
    used.checkpoints.rename(big)
    used.checkpoints.symlink_to(big)
    (tmp_path / "link").symlink_to(used.path)
    folder = RunFolder(tmp_path / "link")
    folder.check(resume=str(used.checkpoints / "5"))
    folder.check(overwrite=True)
    folder.start({}, keep=False)
    assert used.checkpoints.is_symlink() and list(big.iterdir()) == []


@pytest.mark.parametrize("part", ["checkpoints", "tensorboard", "adapter", "metrics", "loss_plot"])
@pytest.mark.parametrize("kind", ["other kind", "dangling link"])
def test_a_part_of_the_wrong_kind_is_refused_before_anything_is_removed(used, part, kind):
    path = getattr(used, part)
    path.rename(path.with_name("moved")) if path.exists() else None
    if kind == "dangling link":
        path.symlink_to("nowhere")
    elif part in ("metrics", "loss_plot"):
        path.mkdir()
    else:
        path.write_text("")
    for settings in ({"overwrite": True}, {"resume": "auto"}):
        with pytest.raises(UserError, match=path.name):
            used.check(**settings)


def test_a_resumed_start_keeps_everything(used):
    used.start({"seed": 2}, keep=True)
    assert used.find_checkpoint("auto") == (used.checkpoints / "5", [])
    assert used.find_checkpoint("never") == (None, [])
    assert "seed: 2" in used.config.read_text()
    assert used.metrics.exists()
