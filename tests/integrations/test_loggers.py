"""`semidice train --log mlflow --log wandb`, with the real packages: the values are those of log.jsonl."""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter

import pytest
from prepared import make_prepared

from semidice.paths import RunFolder

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "phantom"
    make_prepared(path, num_cases=8, size=(32, 32), cases_per_patient=1)
    return path


@pytest.fixture(scope="module")
def connections():
    """The addresses that a process with `proxied` asks for: a proxy that refuses every connection."""
    asked, server = [], socket.create_server(("127.0.0.1", 0))

    def listen():
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                asked.append(client.recv(200))

    threading.Thread(target=listen, daemon=True).start()
    port = server.getsockname()[1]
    proxied = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), f"http://127.0.0.1:{port}")
    proxied |= {name.lower(): value for name, value in proxied.items()}
    yield asked, proxied
    server.close()


def train(dataset, out, *options, environment=None, setup=""):
    sets = [f"data.dataset={dataset}", "data.num_folds=2", "data.folds=[0]", "schedule.epochs=6", "workers=0"]
    sets += ["batch_size=2", "log_every=1", "model.options.channels=[8,16]", "validation.every=2"]
    arguments = ["train", "quick", "-o", str(out), "--accelerator", "cpu", *options]
    arguments += [part for option in sets for part in ("--set", option)]
    code = f"import sys; sys.argv[1:] = {arguments!r}\n{setup}\nfrom semidice.__main__ import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )


def logged_lines(folder):
    """(step, name, value) of every value in log.jsonl."""
    lines = [json.loads(line) for line in folder.fold(0).log.read_text().splitlines()]
    return sorted(
        (line["step"], name, value) for line in lines for name, value in line.items() if name != "step"
    )


def mlflow_runs(folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=folder.mlflow.as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name != "Default"]
    return client, client.search_runs([experiment.experiment_id])


def mlflow_lines(folder, monkeypatch):
    client, (run,) = mlflow_runs(folder, monkeypatch)
    history = [
        metric for name in run.data.metrics for metric in client.get_metric_history(run.info.run_id, name)
    ]
    return sorted((metric.step, metric.key, metric.value) for metric in history)


def wandb_records(path):
    """The records of a .wandb file: a header of 7 bytes, then the blocks of LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    content, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        # 1 is a whole record, 4 the last part of one
        if kind in (1, 4):
            parsed = wandb_internal_pb2.Record()
            parsed.ParseFromString(record)
            yield parsed
            record = b""


def wandb_lines(folder):
    (path,) = folder.wandb.glob("offline-run-*/*.wandb")
    lines = []
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "history":
            names = [item.key or item.nested_key[0] for item in record.history.item]
            values = dict(
                zip(names, (json.loads(item.value_json) for item in record.history.item), strict=True)
            )
            lines += [(values["_step"], name, value) for name, value in values.items() if name[0] != "_"]
    return sorted(lines)


@pytest.fixture(scope="module")
def killed_and_resumed(dataset, tmp_path_factory, connections):
    """A run whose process was killed after step 7, with checkpoints of steps 4 and before, then resumed."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "killed")
    kill = """
import os, semidice.training.engine as engine
of_step = engine._FoldTrainer._save
def save(self, num_done):
    self.seconds_between_checkpoints = 0 if num_done <= 4 else 1e9
    of_step(self, num_done)
    if num_done == 4:
        self.writer._wait(0)
    if num_done == 7:
        os.kill(os.getpid(), 9)
engine._FoldTrainer._save = save
"""
    logs = ("--log", "mlflow", "--log", "wandb")
    killed = train(dataset, folder.path, *logs, setup=kill, environment=connections[1])
    assert killed.returncode == -9, killed.stderr
    before = logged_lines(folder)
    identity = [path.name.split("-", 3)[3] for path in folder.wandb.glob("offline-run-*")]
    resumed = train(dataset, folder.path, *logs, "--resume", environment=connections[1])
    assert resumed.returncode == 0, resumed.stderr
    return folder, before, identity


class TestKilledAndResumed:
    def test_mlflow_has_every_value_of_the_log_once(self, killed_and_resumed, monkeypatch):
        folder, before, _ = killed_and_resumed
        assert {step for step, _, _ in before} == set(range(1, 8))
        expected = logged_lines(folder)
        assert {step for step, _, _ in expected} == set(range(1, 13))
        assert mlflow_lines(folder, monkeypatch) == expected
        _, (run,) = mlflow_runs(folder, monkeypatch)
        assert run.info.status == "FINISHED"
        assert run.data.params["loss.form"] == "min"
        assert run.data.params["fold"] == "0"

    def test_wandb_has_every_value_of_the_log_once_in_a_run_with_the_same_identity(self, killed_and_resumed):
        folder, _, identity = killed_and_resumed
        assert wandb_lines(folder) == logged_lines(folder)
        (path,) = folder.wandb.glob("offline-run-*")
        assert [path.name.split("-", 3)[3]] == identity
        (config,) = [
            {item.key: json.loads(item.value_json) for item in record.config.update}
            for record in wandb_records(*path.glob("*.wandb"))
            if record.WhichOneof("record_type") == "config"
        ]
        assert config["loss.form"] == "min"

    def test_the_log_is_that_of_a_training_without_loggers(self, killed_and_resumed, dataset, tmp_path):
        plain = RunFolder(tmp_path / "plain")
        assert train(dataset, plain.path).returncode == 0
        assert plain.fold(0).log.read_text() == killed_and_resumed[0].fold(0).log.read_text()
        assert not plain.mlflow.exists()
        assert not plain.wandb.exists()

    def test_no_connection_was_opened(self, killed_and_resumed, connections):
        asked, proxied = connections
        assert asked == []
        # the proxy sees a connection, if there is one
        code = "import urllib.request; urllib.request.urlopen('http://example.invalid/')"
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | proxied, capture_output=True, check=False
        )
        assert len(asked) == 1
        asked.clear()


def test_a_logger_that_is_added_when_a_run_is_resumed_gets_the_steps_before(dataset, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    stop = """
import semidice.training.engine as engine
of_step = engine._FoldTrainer._save
def save(self, num_done):
    self.seconds_between_checkpoints = 0
    of_step(self, num_done)
    if num_done == 5:
        raise KeyboardInterrupt
engine._FoldTrainer._save = save
"""
    assert train(dataset, folder.path, setup=stop).returncode == 130
    done = train(dataset, folder.path, "--log", "mlflow", "--resume")
    assert done.returncode == 0, done.stderr
    assert mlflow_lines(folder, monkeypatch) == logged_lines(folder)


def test_a_logger_that_fails_does_not_stop_a_training(dataset, tmp_path):
    folder = RunFolder(tmp_path / "run")
    fail = """
import semidice.integrations.loggers as loggers
def scalars(self, step, values):
    raise OSError("the store is gone")
loggers.MLflow.scalars = scalars
"""
    done = train(dataset, folder.path, "--log", "mlflow", "--log", "wandb", setup=fail)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("logging to mlflow failed") == 1
    assert "the store is gone" in " ".join(done.stdout.split())
    assert folder.fold(0).is_finished
    assert wandb_lines(folder) == logged_lines(folder)
    assert max(Counter(step for step, name, _ in wandb_lines(folder) if name == "loss").values()) == 1
