"""A real server on loopback, asked by real clients."""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from real_server import PATIENCE, Served, serving

pytest.importorskip("uvicorn")

from paceline.errors import ConfigError
from paceline.schema.version import Serving
from paceline.serve.door import Listener
from paceline.serve.inputs import Preparer
from paceline.serve.trained import open_trained
from paceline.serve.versions import write_serving


@pytest.fixture(scope="module")
def served(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = tmp_path_factory.mktemp("served") / "models"
    shutil.copytree(exported, models / "digits" / "1")
    with serving(models, "--max-body", "4MB", "--max-pixels", "1000000") as server:
        yield server


@pytest.fixture(scope="module")
def samples() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((100, 1, 28, 28), np.float32)


@pytest.fixture(scope="module")
def expected(trained_run: Path, samples: np.ndarray) -> np.ndarray:
    return open_trained(trained_run).outputs(samples)


def test_tensorflow_clients_get_the_models_outputs(
    served: Served, samples: np.ndarray, expected: np.ndarray
) -> None:
    where = "/v1/models/digits"
    rows = samples[:3].tolist()
    for path in (f"{where}:predict", f"{where}/versions/1:predict"):
        found = served.json(path, {"instances": rows, "signature_name": "serving_default"})
        np.testing.assert_allclose(found["predictions"], expected[:3], atol=1e-4)
    flat = [{"input": row} for row in samples[:2].reshape(2, -1).tolist()]
    found = served.json(f"{where}:predict", {"instances": flat})
    np.testing.assert_allclose(found["predictions"], expected[:2], atol=1e-4)
    found = served.json(f"{where}:predict", {"inputs": {"input": rows}})
    np.testing.assert_allclose(found["outputs"], expected[:3], atol=1e-4)
    found = served.json(f"{where}:classify", {"examples": [{"input": rows[0]}]})
    ((first, *_),) = found["results"]
    assert first[0] == str(expected[0].argmax())
    about = served.json(f"{where}/metadata")
    assert about["model_spec"] == {"name": "digits", "signature_name": "", "version": "1"}
    (status,) = served.json(where)["model_version_status"]
    assert (status["version"], status["state"]) == ("1", "AVAILABLE")


def test_open_inference_in_json(served: Served, samples: np.ndarray, expected: np.ndarray) -> None:
    about = served.json("/v2/models/digits")
    assert about["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 1, 28, 28]}]
    tensor = {"name": "input", "datatype": "FP32", "shape": [2, 1, 28, 28]}
    data = {"id": "abc", "inputs": [tensor | {"data": samples[:2].ravel().tolist()}]}
    found = served.json("/v2/models/digits/infer", data)
    assert (found["id"], found["model_version"]) == ("abc", "1")
    (output,) = found["outputs"]
    assert output["shape"] == [2, 10]
    np.testing.assert_allclose(np.reshape(output["data"], (2, 10)), expected[:2], atol=1e-4)
    assert served.ask("/v2/models/digits/versions/1/ready")[0] == 200
    assert served.json("/v2")["extensions"] == ["binary_tensor_data"]


def test_triton_clients_work_unchanged(
    served: Served, samples: np.ndarray, expected: np.ndarray, digit_files: Path
) -> None:
    triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    client = triton.InferenceServerClient(f"127.0.0.1:{served.port}", network_timeout=PATIENCE)
    try:
        assert client.is_server_live()
        assert client.is_model_ready("digits", "1")
        assert client.get_model_metadata("digits")["name"] == "digits"
        for binary in (True, False):  # more than a batch: split, and put together again
            tensor = triton.InferInput("input", samples.shape, "FP32")
            tensor.set_data_from_numpy(samples, binary_data=binary)
            wanted = triton.InferRequestedOutput("output", binary_data=binary)
            found = client.infer("digits", [tensor], outputs=[wanted]).as_numpy("output")
            np.testing.assert_allclose(found, expected, atol=1e-4)
        pictures = [path.read_bytes() for path in sorted(digit_files.rglob("*.png"))[:2]]
        tensor = triton.InferInput("input", [2], "BYTES")
        tensor.set_data_from_numpy(np.array(pictures, dtype=object))
        assert client.infer("digits", [tensor]).as_numpy("output").shape == (2, 10)
        with pytest.raises(triton.InferenceServerException, match="no model 'nobody'"):
            client.infer("nobody", [tensor])
    finally:
        client.close()


def test_pictures_as_they_are(served: Served, trained_run: Path, digit_files: Path) -> None:
    picture = next((digit_files / "4").iterdir())
    trained = open_trained(trained_run)
    prepared = Preparer(trained.signature).picture(picture.read_bytes())
    ((best, *_),) = trained.guesses(prepared[None])
    status, text, _ = served.ask(
        "/v1/models/digits:predict", picture.read_bytes(), {"Content-Type": "image/png"}
    )
    found = json.loads(text)
    assert (status, found["version"], len(found["predictions"])) == (200, "1", 5)
    assert found["predictions"][0]["label"] == best.label
    assert found["predictions"][0]["probability"] == pytest.approx(best.probability, rel=1e-4)
    coded = base64.b64encode(picture.read_bytes()).decode()
    rows = served.json("/v1/models/digits:predict", {"instances": [{"b64": coded}]})
    assert int(np.argmax(rows["predictions"][0])) == int(best.label)


HEAD = b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
JSON = {"Content-Type": "application/json"}
ONE_WITHOUT_BATCH = json.dumps({"instances": [0.0] * 784}).encode()
PNG = {"Content-Type": "image/png"}


NAN = (
    b'{"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 784],'
    b' "parameters": {"binary_data_size": 3136}}]}   '
)
assert len(NAN) == 115
NAN += np.full(784, np.nan, "<f4").tobytes()


def bomb() -> bytes:
    """A few hundred bytes that become four million pixels."""
    file = io.BytesIO()
    Image.new("1", (2000, 2000)).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "message"),
    [
        ("/v1/models/nobody:predict", b"{}", JSON, 404, "no model 'nobody'"),
        ("/v1/models/digits/versions/9:predict", b"{}", JSON, 404, "version 9 is not served"),
        ("/v1/models/digits/labels/x:predict", b"{}", JSON, 404, "no label 'x'"),
        ("/v1/models/..%2F..%2Fetc:predict", b"{}", JSON, 404, "Not Found"),
        ("/v1/models/digits:predict", None, JSON, 405, "POST"),
        ("/v1/models/digits:predict", b"{", JSON, 400, "not valid JSON"),
        ("/v1/models/digits:predict", b"\x89PNG\r\n", JSON, 400, "its content type"),
        ("/v1/models/digits:predict", b"[" * 100_000, JSON, 400, "depth"),
        ("/v1/models/digits:predict", b'{"instances": []}', JSON, 400, "at least one"),
        ("/v1/models/digits:predict", b'{"instances": [[1, 2]]}', JSON, 400, "do not fit"),
        ("/v1/models/digits:predict", ONE_WITHOUT_BATCH, JSON, 400, "[784] do not fit"),
        ("/v1/models/digits:predict", b'{"instances": [[1], [2, 3]]}', JSON, 400, "one shape"),
        ("/v1/models/digits:predict", b'{"instances": ["a"]}', JSON, 400, "no numbers"),
        ("/v1/models/digits:predict", b"no picture", PNG, 400, "cannot be read"),
        ("/v1/models/digits:predict", bomb(), PNG, 400, "2000 x 2000 pixels"),
        ("/v1/models/digits:predict", b"x" * 4_000_001, JSON, 413, "bytes"),
        ("/v1/models/digits:predict", b"{}", JSON | {"Host": "evil.example"}, 403, "localhost"),
        ("/v1/models/digits:predict", b"{}", {"X-Request-Timeout": "-1"}, 400, "seconds"),
        ("/v1/models/digits:predict", b"{}", {"Content-Encoding": "gzip"}, 415, "compressed"),
        ("/v2/models/digits/infer", b'{"inputs": []}', JSON, 400, "one tensor"),
        (
            "/v2/models/digits/infer",
            b'{"inputs": [{"name": "input", "datatype": "FP32", "shape": [9], "data": [1]}]}',
            JSON, 400, "do not fill the shape",
        ),
        ("/v2/models/digits/infer", NAN, {"Inference-Header-Content-Length": "115"}, 500, "finite"),
        (
            "/v2/models/digits/infer", b"{}",
            {"Inference-Header-Content-Length": "99"}, 400, "length of the JSON",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",
)  # fmt: skip
def test_refusals_say_why(
    served: Served,
    path: str,
    body: bytes | None,
    headers: dict[str, str],
    status: int,
    message: str,
) -> None:
    found, text, _ = served.ask(path, body, headers)
    assert found == status, text
    assert message in json.loads(text)["error"]


def test_too_many_samples_are_refused(served: Served) -> None:
    tensor = {"name": "input", "datatype": "BYTES", "shape": [2000], "data": ["aGk="] * 2000}
    status, text, _ = served.ask(
        "/v2/models/digits/infer", json.dumps({"inputs": [tensor]}).encode()
    )
    assert (status, json.loads(text)["error"].split()[:2]) == (413, ["2000", "samples:"])


def test_metrics_description_and_page(served: Served, samples: np.ndarray) -> None:
    served.json("/v1/models/digits:predict", {"instances": samples[:1].tolist()})
    text = served.ask("/metrics")[1].decode()
    assert 'paceline_requests_total{model="digits",version="1",code="200"}' in text
    assert 'paceline_version_available{model="digits",version="1"} 1' in text
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) .*|paceline_\w+(\{[^}]*\})? [\d.e+-]+", line), line
    spec = served.json("/openapi.json")
    assert spec["openapi"] == "3.1.0"
    assert "/v2/models/{name}/infer" in spec["paths"]
    (model,) = served.json("/api/models")["models"]
    assert model["versions"][0]["metrics"]["test_accuracy"] > 0
    for path in ("/", "/docs"):
        status, page, headers = served.ask(path)
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in headers["content-security-policy"]
        assert b"http://" not in page.replace(b"http://www.w3.org", b"")


def test_no_request_is_lost_while_versions_change(served: Served, samples: np.ndarray) -> None:
    digits, stop = served.models / "digits", threading.Event()
    codes: list[int] = []
    versions: set[str] = set()
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, 784]}
    body = json.dumps({"inputs": [tensor | {"data": samples[0].ravel().tolist()}]}).encode()

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE)
        while not stop.is_set():
            connection.request("POST", "/v2/models/digits/infer", body, JSON)
            answer = connection.getresponse()
            text = answer.read()
            codes.append(answer.status)
            versions.add(json.loads(text).get("model_version", ""))
        connection.close()

    def now() -> str:
        return str(served.json("/v2/models/digits")["versions"])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in ("2", "3"):
            shutil.copytree(digits / "1", digits / f".partial-{number}")
            (digits / f".partial-{number}").rename(digits / number)
            served.until(lambda n=number: now() == f"['{n}']")
        broken = digits / "4"
        broken.mkdir()
        (broken / "version.json").write_text("{}")

        def named() -> bool:
            lines = served.json("/v1/models/digits")["model_version_status"]
            return any(one["version"] == "4" and one["state"] == "END" for one in lines)

        served.until(named)
        write_serving(digits, Serving(labels={"stable": 1}))
        served.until(lambda: "'1'" in now())
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert set(codes) == {200}
    assert {"2", "3"} <= versions <= {"1", "2", "3"}
    assert json.loads(served.ask("/v2/models/digits/infer", body)[1])["model_version"] == "1"
    shutil.rmtree(broken)
    for number in ("2", "3"):
        shutil.rmtree(digits / number)
    (digits / "serving.json").unlink()


def test_a_client_that_goes_away_harms_nobody(served: Served) -> None:
    for text in (b"", b"POST /v1/models/digits:predict HTTP/1.1\r\n", b"\x00\xff\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as client:
            client.sendall(text)
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as client:
        client.sendall(HEAD + b"{")
    assert served.ask("/v2/health/live")[0] == 200


@pytest.mark.slow
def test_slow_clients_are_cut_off(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        assert client.recv(100) == b""
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as client:
        client.sendall(HEAD + b"{")
        assert client.recv(100).startswith(b"HTTP/1.1 408 ")


def test_only_this_machine_is_let_in_without_a_secret(tmp_path: Path) -> None:
    Listener().check()
    Listener(host="::1").check()
    key = tmp_path / "key"
    key.write_text("x")
    with pytest.raises(ConfigError, match="--token-file"):
        Listener(host="0.0.0.0").check()
    with pytest.raises(ConfigError, match="--tls-cert"):
        Listener(host="0.0.0.0", token="x" * 16).check()
    with pytest.raises(ConfigError, match="16 characters"):
        Listener(token="short").check()
    with pytest.raises(ConfigError, match="belong together"):
        Listener(certificate=key).check()
    Listener(host="0.0.0.0", token="x" * 16, plain=True).check()
    with pytest.raises(ConfigError, match="no certificate and its key"):
        Listener(certificate=key, key=key).check()


@pytest.mark.slow
def test_others_need_the_token_and_see_nothing_on_the_way(exported: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    certificate, key, token = (tmp_path / name for name in ("cert.pem", "key.pem", "token"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key),
         "-out", str(certificate)],
        check=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    token.write_text("correct-horse-battery\n")
    models = exported.parent.parent
    words = ["serve", str(models), "--port", "0", "--host", "0.0.0.0", "--token-file", str(token)]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "paceline", *words, "--tls-cert", str(certificate),
         "--tls-key", str(key)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline().strip().rpartition(":")[2])
        context = ssl.create_default_context(cafile=str(certificate))

        def ask(path: str, headers: dict[str, str]) -> int:
            connection = http.client.HTTPSConnection(
                "localhost", port, timeout=PATIENCE, context=context
            )
            connection.request("GET", path, headers=headers)
            status = connection.getresponse().status
            connection.close()
            return status

        right = {"Authorization": "Bearer correct-horse-battery"}
        wrong = (
            {},
            {"Authorization": "Bearer correct-horse-batterx"},
            {"Authorization": "Basic x"},
        )
        for path in ("/api/models", "/metrics", "/v1/models/digits", "/openapi.json", "/nowhere"):
            assert {ask(path, headers) for headers in wrong} == {401}
        assert ask("/api/models", right) == 200
        assert ask("/", {}) == ask("/v2/health/live", {}) == 200
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert not client.recv(100).startswith(b"HTTP/1.1 200")
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
