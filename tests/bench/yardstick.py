"""What others are measured by, on the same machine in the same minute: libcurl with nothing around it."""

from __future__ import annotations

import statistics
import time
import uuid
from typing import NamedTuple

import pycurl

from bench.measure import Sample

PAYLOAD = "x" * 180  # with its key and number about 200 bytes
AT_ONCE = 128  # as many as a worker has in flight


class Bare(NamedTuple):
    messages: int
    seconds: float
    processor: float
    # Seconds, by libcurl's account: the median.
    round_trip: float

    @property
    def rate(self) -> float:
        return self.messages / self.seconds

    @property
    def sample(self) -> Sample:
        return Sample(self.seconds * 1e6 / self.messages, self.processor * 1e6 / self.messages)


def bare_loop(url: str, count: int, at_once: int = AT_ONCE, pause: float = 0) -> Bare:
    """libcurl's multi interface: as many requests at once, the same bodies and headers, and a pause after each answer."""
    multi = pycurl.CurlMulti()
    fixed = ["content-type: application/json", "user-agent: ulak/0.0.0"]
    fixed += ["webhook-timestamp: 1800000000", "ulak-attempt: 1"]
    requests = [
        ([*fixed, f"webhook-id: {uuid.uuid4()}"], b'{"n": %d, "text": "%b"}' % (n, PAYLOAD.encode()))
        for n in range(1, count + 1)
    ]
    free, round_trips = [], []
    for _ in range(at_once):
        curl = pycurl.Curl()
        curl.setopt(pycurl.URL, url)
        curl.setopt(pycurl.POST, 1)
        curl.setopt(pycurl.WRITEFUNCTION, lambda chunk: None)
        free.append(curl)
    done = 0
    began, used = time.monotonic(), time.process_time()
    while done < count:
        while free and requests:
            curl = free.pop()
            headers, body = requests.pop()
            curl.setopt(pycurl.HTTPHEADER, headers)
            curl.setopt(pycurl.POSTFIELDS, body)
            multi.add_handle(curl)
        multi.perform()
        left = 1
        while left:
            left, ended, failed = multi.info_read()
            assert not failed, failed
            for curl in ended:
                assert curl.getinfo(pycurl.RESPONSE_CODE) == 200
                round_trips.append(curl.getinfo(pycurl.TOTAL_TIME))
                multi.remove_handle(curl)
                free.append(curl)
                done += 1
                if pause:
                    time.sleep(pause)
        if not free:
            multi.select(0.1)
    took, used = time.monotonic() - began, time.process_time() - used
    return Bare(count, took, used, statistics.median(round_trips))
