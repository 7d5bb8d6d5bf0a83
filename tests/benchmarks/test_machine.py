"""What a benchmark's page says of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("benchmark_scripts")


def test_the_cpu_has_its_name_and_what_it_multiplies_with(tmp_path: Path) -> None:
    from machine import cpu

    described = tmp_path / "cpuinfo"
    core = "processor\t: {}\nmodel name\t: Intel(R) Xeon(R) Gold 6130 CPU @ 2.1GHz\nflags\t\t: fpu avx avx2 avx512f\n\n"
    described.write_text(core.format(0) + core.format(1))
    assert cpu(described) == "Intel Xeon Gold 6130 with AVX2, AVX-512; "
    described.write_text("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\n")  # an ARM CPU
    assert cpu(described) == ""
    assert cpu(tmp_path / "missing") == ""


def test_a_page_names_each_machine_once() -> None:
    from machine import machines

    assert machines([{"machine": "a"}, {}, {"machine": "b"}, {"machine": "a"}]) == (
        "a and on a machine that is not recorded and on b"
    )
    assert machines([]) == ""
