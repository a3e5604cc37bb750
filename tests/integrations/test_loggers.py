"""`semidice train --log mlflow --log wandb`, with the real packages: the values are those of log.jsonl."""

import json
import socket
import struct
import sys
import threading

import pytest
from prepared import make_prepared
from start import Started

from semidice.paths import RunFolder

pytestmark = pytest.mark.integrations

# a training that ends after some steps: its checkpoints of steps up to 4 are written, then HOW
STOP = """
import os, semidice.training.engine as engine
of_step = engine._FoldTrainer._save
def save(self, num_done):
    self.saved_at = -1e9 if num_done <= 4 else 1e9
    of_step(self, num_done)
    if num_done == 7:
        {how}
engine._FoldTrainer._save = save
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "phantom"
    make_prepared(path, num_cases=8, size=(32, 32), cases_per_patient=1)
    return path


@pytest.fixture(scope="module")
def connections():
    """What processes with these variables send to a proxy that refuses every connection."""
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
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    yield asked, {each: address for name in names for each in (name, name.lower())}
    server.close()


def train(dataset, out, *options, environment=None, setup=""):
    sets = [f"data.dataset={dataset}", "data.num_folds=2", "data.folds=[0]", "schedule.epochs=6", "workers=0"]
    sets += ["batch_size=2", "log_every=1", "model.options.channels=[8,16]", "validation.every=2"]
    arguments = ["train", "quick", "-o", str(out), "--accelerator", "cpu", *options]
    arguments += [part for option in sets for part in ("--set", option)]
    code = f"import sys; sys.argv[1:] = {arguments!r}\n{setup}\nfrom semidice.__main__ import main; main()"
    return Started([sys.executable, "-c", code], env=environment or {}, cwd=None).end()


def logged_lines(folder):
    """(step, name, value) of every value in log.jsonl."""
    lines = [json.loads(line) for line in folder.fold(0).log.read_text().splitlines()]
    return sorted(
        (line["step"], name, value) for line in lines for name, value in line.items() if name != "step"
    )


def mlflow_run(folder, monkeypatch):
    """The only run in the store, and its lines as those of log.jsonl."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=folder.mlflow.as_uri())
    (experiment,) = [each for each in client.search_experiments() if each.name != "Default"]
    (run,) = client.search_runs([experiment.experiment_id])
    values = [each for name in run.data.metrics for each in client.get_metric_history(run.info.run_id, name)]
    return run, sorted((each.step, each.key, each.value) for each in values)


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
            items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            values = {name: json.loads(value) for name, value in items.items()}
            lines += [(values["_step"], name, value) for name, value in values.items() if name[0] != "_"]
    return sorted(lines)


def test_a_killed_and_resumed_training_logs_every_value_once_and_sends_nothing(
    dataset, tmp_path, connections, monkeypatch
):
    """Killed after step 7, with checkpoints of step 4 and before, then resumed."""
    folder, logs = RunFolder(tmp_path / "run"), ("--log", "mlflow", "--log", "wandb")
    asked, proxied = connections
    kill = STOP.format(how="os.kill(os.getpid(), 9)")
    killed = train(dataset, folder.path, *logs, setup=kill, environment=proxied)
    assert killed.code == -9, killed.err
    assert {step for step, _, _ in logged_lines(folder)} == set(range(1, 8))
    identity = [path.name.split("-", 3)[3] for path in folder.wandb.glob("offline-run-*")]
    resumed = train(dataset, folder.path, *logs, "--resume", environment=proxied)
    assert resumed.code == 0, resumed.err
    expected = logged_lines(folder)
    assert {step for step, _, _ in expected} == set(range(1, 13))
    run, lines = mlflow_run(folder, monkeypatch)
    assert lines == expected
    assert run.info.status == "FINISHED"
    assert (run.data.params["loss.form"], run.data.params["fold"]) == ("min", "0")
    assert wandb_lines(folder) == expected
    (path,) = folder.wandb.glob("offline-run-*")
    assert [path.name.split("-", 3)[3]] == identity
    assert asked == []
    # the proxy sees a connection, if there is one
    code = "import urllib.request; urllib.request.urlopen('http://example.invalid/')"
    Started([sys.executable, "-c", code], env=proxied, cwd=None).end()
    assert len(asked) == 1


def test_a_logger_that_is_added_when_a_run_is_resumed_gets_the_steps_before(dataset, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    stopped = train(dataset, folder.path, setup=STOP.format(how="raise KeyboardInterrupt"))
    assert stopped.code == 130, stopped.err
    assert not folder.mlflow.exists()
    done = train(dataset, folder.path, "--log", "mlflow", "--resume")
    assert done.code == 0, done.err
    assert mlflow_run(folder, monkeypatch)[1] == logged_lines(folder)


def test_a_logger_that_fails_does_not_stop_a_training(dataset, tmp_path):
    folder = RunFolder(tmp_path / "run")
    fail = """
import semidice.integrations.loggers as loggers
def scalars(self, step, values):
    raise OSError("the store is gone")
loggers.MLflow.scalars = scalars
"""
    done = train(dataset, folder.path, "--log", "mlflow", "--log", "wandb", setup=fail)
    assert done.code == 0, done.err
    assert done.out.count("logging to mlflow failed") == 1
    assert "the store is gone" in " ".join(done.out.split())
    assert folder.fold(0).is_finished
    assert wandb_lines(folder) == logged_lines(folder)
