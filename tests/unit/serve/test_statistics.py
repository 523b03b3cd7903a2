"""Counts for Prometheus and rates for the page, in bounded memory."""

from __future__ import annotations

import pytest

from paceline.serve import statistics
from paceline.serve.statistics import MOST, Statistics, prometheus


def test_rates_quantiles_and_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(statistics.time, "monotonic", lambda: now[0])
    found = Statistics()
    record = found.of("digits", 1)
    for number in range(100):
        record.note(200, 0.002 if number < 98 else 0.3, 2)
    assert record.lately() == {"rate": 10.0, "p50": 0.002, "p99": 0.3}
    text = prometheus(found, [])
    assert 'request_seconds_bucket{model="digits",version="1",le="0.001"} 0' in text
    assert 'request_seconds_bucket{model="digits",version="1",le="0.0025"} 98' in text
    assert 'request_seconds_bucket{model="digits",version="1",le="+Inf"} 100' in text
    assert 'samples_total{model="digits",version="1"} 200' in text
    now[0] = 200.0
    assert record.lately()["rate"] == 0.0
    for version in range(2, MOST + 2):
        found.of("digits", version)
    assert not record._recent
    assert len(found.records) == MOST
    assert ("digits", 1) not in found.records
