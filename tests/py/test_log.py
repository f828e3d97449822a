"""Log: spans, sums, drawings, files. And what the library says, through logging."""
import json
import logging
import pathlib

import pytest
import sidestream
from sim import device, floats, pinned, run_python, said, zeros


def logged(d: sidestream.Device) -> sidestream.Log:
    log = sidestream.Log(d)
    outs = [pinned(d, zeros(1000)) for _ in range(6)]
    sidestream.Pipeline(d, [pinned(d, floats(1000)) for _ in range(6)], lambda s, i: s.affine(i.result, i.data.view("f32")), outs, log=log).run()
    return log


def test_spans() -> None:
    d = device()
    log = logged(d)
    spans = log.spans()
    assert len(spans) == 18 and log.dropped == 0 and log.device is d
    assert [span["begin_ns"] for span in spans] == sorted(span["begin_ns"] for span in spans)
    for lane in ("H2D", "compute", "D2H"):
        assert [span["item"] for span in spans if span["lane"] == lane] == list(range(6))
    assert {span["bytes"] for span in spans if span["lane"] == "H2D"} == {4000}
    assert all(span["queued_ns"] <= span["begin_ns"] < span["end_ns"] for span in spans)


def test_account() -> None:
    a = logged(device()).account()
    assert a["h2d_bytes"] == a["d2h_bytes"] == 24000 and 0 < a["compute_busy"] <= 1 and 0 < a["copy_hidden"] <= 1
    assert a["total_s"] == pytest.approx(a["compute_busy_s"] + a["exposed_s"] + a["idle_s"])


def test_spans_of_ones_own() -> None:
    d = device()
    log, s = sidestream.Log(d), sidestream.Stream(d)
    with log.span(s, "compute", "first", item=7, nbytes=5):
        s.spin(0.5)
    with pytest.raises(KeyError), log.span(s, "D2H"):
        raise KeyError
    number = log.begin(s, "H2D")
    log.end(s, number)
    first = log.spans()[0]
    assert (first["name"], first["item"], first["bytes"], first["lane"]) == ("first", 7, 5, "compute")
    assert first["end_ns"] - first["begin_ns"] == pytest.approx(5e8, rel=0.01)
    assert [span["item"] for span in log.spans()][1:] == [None, None]
    with pytest.raises(ValueError, match="lane"):
        log.begin(s, "sideways")
    with pytest.raises(TypeError, match="stream"):
        log.begin(d)  # type: ignore[arg-type]
    log.clear()
    assert log.spans() == [] and log.account()["total_s"] == 0


def test_many_and_too_many() -> None:
    d = device()
    s, log = sidestream.Stream(d), sidestream.Log(d, capacity=700)
    for _ in range(710):
        with log.span(s):
            pass
    assert len(log.spans()) == 700 and log.dropped == 10
    with pytest.raises(ValueError, match="capacity"):
        sidestream.Log(d, -1)


def test_drawings() -> None:
    log = logged(device())
    text = log.text(60, title="six items", device="sim")
    assert "six items" in text and "compute" in text and "│" in text and max(map(len, text.splitlines())) <= 60
    assert log.text(ascii=True).isascii()
    svg = log.svg(title="a<b", device="sim")
    assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>") and "a&lt;b" in svg
    for draw in (lambda: log.text(3), lambda: log.svg(3)):
        with pytest.raises(sidestream.InvalidArgument, match="width"):
            draw()


def test_trace(tmp_path: pathlib.Path) -> None:
    log = logged(device())
    log.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    assert len([event for event in events if event["ph"] == "X"]) == 18
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        log.trace(tmp_path / "folder")
    with pytest.raises(OSError):
        log.trace(tmp_path / "absent" / "trace.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "trace.json"]


def test_bound() -> None:
    assert sidestream.bound(10, 1, 2) == 21 and sidestream.bound(10, 1, 2, 3) == 33 and sidestream.bound(10, 1, 2, 3, copy_engines=1) == 40
    assert sidestream.bound(1, 1, 2, 3) == 6


def test_a_log_outlives_its_device_object() -> None:
    log = logged(device())
    assert len(log.spans()) == 18


# ---------------------------------------------------------------- messages

def test_messages_reach_logging(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "sidestream")
    d = device()
    pool = sidestream.PinnedPool(device(refuse_register=1))
    pool.alloc(64)
    d.memory()
    said_so = [record for record in caplog.records if "registering" in record.getMessage()]
    assert said_so and said_so[0].name == "sidestream" and said_so[0].levelno == logging.INFO


def test_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Less memory than asked for: the depth shrinks, and it is said."""
    d = device(memory="1M")
    line = sidestream.Pipeline(d, [bytes(300 << 10)] * 4, lambda s, i: None, depth=8)
    assert line.stats()["depth"] < 8
    assert [record for record in caplog.records if record.levelno == logging.WARNING and "depth" in record.getMessage()]


SAYS = """
import sidestream
sidestream.PinnedPool(sidestream.Device("sim:refuse_register=1")).alloc(64)
sidestream.Pipeline(sidestream.Device("sim:memory=1M"), [bytes(300 << 10)] * 4, lambda s, i: None, depth=8)
"""


def test_nothing_is_printed() -> None:
    assert said(run_python(SAYS)) == (0, "")


def test_what_is_said_is_printed_where_logging_says_so() -> None:
    done = run_python("import logging\nlogging.basicConfig(level='INFO')\n" + SAYS)
    assert done.returncode == 0 and "WARNING:sidestream:" in done.stderr and "INFO:sidestream:" in done.stderr


def test_a_handler_that_fails_does_not_fail_the_call() -> None:
    code = """
import logging, os, signal
class Handler(logging.Handler):
    def handle(self, record):
        {act}
logging.getLogger("sidestream").addHandler(Handler())
logging.getLogger("sidestream").setLevel("INFO")
try:
""" + SAYS.replace("\n", "\n    ") + """
    for _ in range(1000): pass
    print("went on")
except KeyboardInterrupt:
    print("KeyboardInterrupt")
"""
    done = run_python(code.replace("{act}", "raise ValueError('handler')"))
    assert done.returncode == 0 and done.stdout == "went on\n" and "handler" in done.stderr
    # A Ctrl-C that comes in it is not lost.
    assert said(run_python(code.replace("{act}", "os.kill(os.getpid(), signal.SIGINT)"))) == (0, "KeyboardInterrupt\n")


def test_messages_of_many_threads_are_bounded() -> None:
    code = """
import logging, sidestream, threading
got = []
class Handler(logging.Handler):
    def handle(self, record):
        got.append(record.getMessage())
        sidestream.list_devices()  # calls into the module from a handler
logger = logging.getLogger("sidestream")
logger.addHandler(Handler())
logger.setLevel("INFO")
d = sidestream.Device("sim:refuse_register=1")
pools = [sidestream.PinnedPool(d, region_bytes=1 << 16, huge_pages=False) for _ in range(200)]
threads = [threading.Thread(target=pool.alloc, args=(64,)) for pool in pools]
for thread in threads: thread.start()
for thread in threads: thread.join()
d.memory()
print(len(got) > 10)
"""
    assert said(run_python(code)) == (0, "True\n")
