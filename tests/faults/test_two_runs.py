"""Two commands that want one folder: the second is told who has it, and the first does not notice."""


def test_the_second_of_two_runs_is_refused_and_the_first_ends_well(server, settings, tmp_path):
    flags = {**settings, "output_dir": tmp_path / "run", "max_steps": 60}
    first = server.start(flags)
    first.until((tmp_path / "run" / "metrics.jsonl").exists)
    for more in ({}, {"resume": "auto"}, {"overwrite_output_dir": True}):
        second = server.start({**flags, **more})
        assert second.wait() == 2, second.output()
        assert f"in use by a run of process {first.pid}" in second.output() and "Traceback" not in second.output()
    assert first.wait() == 0, first.output()
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 60


def test_of_two_that_start_together_one_runs(server, settings, tmp_path):
    flags = {**settings, "output_dir": tmp_path / "run", "max_steps": 2}
    both = [server.start(flags) for _ in range(2)]
    codes = sorted(running.wait() for running in both)
    assert codes == [0, 2], "\n".join(running.output() for running in both)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
