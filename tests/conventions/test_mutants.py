"""`make mutants` can be run: what it takes out is there, and so are the tests that are to notice."""

from __future__ import annotations

import re

import pytest
from mutants import findings
from mutants.__main__ import PARTS
from mutants.model import Mutant
from support.cluster import PROJECT

MUTANTS = [mutant for part in PARTS.values() for mutant in part]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_what_is_taken_out_stands_there_once(mutant: Mutant) -> None:
    times = (PROJECT / mutant.file).read_text().count(mutant.old)
    assert times == 1
    assert mutant.old != mutant.new


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_the_tests_that_are_to_notice_exist(mutant: Mutant) -> None:
    for test in (each for each in mutant.tests if each.startswith("tests/")):
        file, _, function = test.partition("::")
        name = function.partition("[")[0] or r"test_\w+"
        assert re.search(rf"^def {name}\(", (PROJECT / file).read_text(), re.MULTILINE), test


def test_every_finding_of_doctor_has_a_mutant() -> None:
    """Each part of a function that makes findings, and doesn't only gather those of others."""
    missing = []
    for path in sorted((PROJECT / "sql/code/8_looking").glob("doctor_*.sql")):
        for function in re.split(r"^create or replace function ", path.read_text(), flags=re.MULTILINE)[1:]:
            name = function.partition("(")[0]
            for part in re.split(r"(?<=\n {4}union all)\n", function):
                makes = re.search(r"^    select\b(?! f\.\*)", part, re.MULTILINE)
                is_doctor = name.startswith("ulak_private.doctor_")
                if is_doctor and makes and not any(mutant.old in part for mutant in findings.MUTANTS):
                    missing.append((name, part.strip()[:200]))

    assert missing == []
