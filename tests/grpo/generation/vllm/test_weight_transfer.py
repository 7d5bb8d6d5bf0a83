"""Weights on their way from a trainer to an engine: what is sent arrives, bit by bit, and what does not is noticed."""

from __future__ import annotations

import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo.generation.vllm import weight_transfer
from grpo.generation.vllm.weight_transfer import Fingerprint, Receiver, Sender, buckets, layout

WEIGHTS = [
    ("a", torch.arange(6.0).reshape(2, 3)),
    ("b", torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
    ("turned", torch.arange(8).reshape(2, 4).T),
    ("number", torch.tensor(3.0)),
    ("half", torch.ones(3, requires_grad=True, dtype=torch.float16)),
]


def fingerprint(weights):
    found = Fingerprint()
    for name, tensor in weights:
        found.add(name, tensor)
    return found


def test_a_fingerprint_can_be_worked_out_by_hand():
    assert fingerprint([("w", torch.tensor([1, 2, 3], dtype=torch.int32))]) == Fingerprint(1, 6 * zlib.crc32(b"w"))
    # The bits of the float 1.0 are 0x3F800000.
    ones = fingerprint([("w", torch.ones(2))])
    assert ones == Fingerprint(1, 2 * 0x3F800000 * zlib.crc32(b"w") & (2**62 - 1))


def test_a_fingerprint_is_summed_in_parts_that_are_small(monkeypatch):
    """On a GPU, torch copies what it sums to int64."""
    expected, summed = fingerprint(WEIGHTS), []

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket is torch.ops.aten.sum and args[0].dtype != torch.int64:
                summed.append(args[0].numel())
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(weight_transfer, "_SUMMED", 2)
    with Sums():
        assert fingerprint(WEIGHTS) == expected
    assert max(summed) == 2 and any(tensor.numel() > 2 for _, tensor in WEIGHTS)


def test_a_fingerprint_sees_order_of_nothing_but_name_and_bits():
    whole = fingerprint(WEIGHTS)
    assert fingerprint(reversed(WEIGHTS)) == whole
    assert fingerprint([("z", WEIGHTS[0][1]), *WEIGHTS[1:]]) != whole
    changed = WEIGHTS[0][1].clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))  # the smallest change there is
    assert fingerprint([("a", changed), *WEIGHTS[1:]]) != whole
    assert fingerprint(WEIGHTS[:-1]) != whole


def test_buckets_hold_what_fits_and_at_least_one():
    weights = [(str(i), torch.zeros(n)) for i, n in enumerate((10, 10, 10, 100, 1))]  # 40, 40, 40, 400 and 4 bytes
    assert [[name for name, _ in bucket] for bucket in buckets(weights, 80)] == [["0", "1"], ["2"], ["3"], ["4"]]
    assert list(buckets([], 80)) == []


@pytest.fixture
def connected():
    """A sender with receivers, each as if in a process of its own."""

    def connect(receivers, timeout_s=30.0):
        sender = Sender("127.0.0.1", receivers, "gloo", timeout_s)
        with ThreadPoolExecutor(receivers) as pool:
            ends = [pool.submit(Receiver, 1 + i, **sender.rendezvous()) for i in range(receivers)]
            sender.connect()
            return sender, [end.result() for end in ends]

    return connect


def test_two_receivers_get_every_bit(connected):
    sender, receivers = connected(2)
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(lambda r: list(r.receive(layout(WEIGHTS))), receiver) for receiver in receivers]
        sender.send(WEIGHTS, lambda: None)
    for received in (f.result() for f in found):
        assert fingerprint(received) == fingerprint(WEIGHTS)
        for (name, tensor), (other, expected) in zip(received, WEIGHTS, strict=True):
            assert (name, tensor.dtype) == (other, expected.dtype)
            assert torch.equal(tensor, expected)


def test_a_sender_stops_when_its_receivers_have_given_up(connected):
    sender, receivers = connected(1)
    refused, began = threading.Event(), time.monotonic()

    def refuse():
        refused.set()
        receivers.clear()

    threading.Timer(0.3, refuse).start()

    def check():
        if refused.is_set():
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        sender.send([("large", torch.zeros(30_000_000))], check)
    del sender
    assert time.monotonic() - began < 20


def test_a_sender_does_not_wait_for_ever(connected):
    sender, _ = connected(1, timeout_s=4.0)
    with pytest.raises(RuntimeError, match="[Tt]imed out"):
        sender.send([("large", torch.zeros(30_000_000))], lambda: None)
