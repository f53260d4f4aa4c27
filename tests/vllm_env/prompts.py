"""Prompts for the tests: English words in an order that a seed decides. So prompts of equal seeds share a
prefix.
"""

from __future__ import annotations

import random

_TEXT = """
about after again against all also always and another answer are around ask away back because been before began below
between both but call came can carry change children city close could country course cut did different does done door
down each early earth end enough even every example eye face family far feet few find first follow food for form found
four from gave get girl give good great group grow had hand hard has have head hear help her here high him his home
house how idea important into its just keep kind knew know land large last later learn leave left letter life light
like line list little live long look made make man many may mean might mile more most mother mountain move much must
name near need never next night number off often old once one only open order other our out over own page paper part
people place plant play point read real right river run said same saw say school sea second see seem sentence set she
should show side small some something soon sound start state still stop story study such take talk tell than that the
their them then there these they thing think this those thought three through time together took tree try turn two
under until use very walk want was watch water way well went were what when where which while white who why will with
without word work world would write year you young your
"""
WORDS = tuple(_TEXT.split())


def prose(seed: str, *, words: int) -> str:
    """Return sentences of about `words` words, which end in a newline. Equal seeds give equal sentences."""
    choose = random.Random(seed)
    sentences: list[str] = []
    left = words
    while left > 0:
        length = min(left, choose.randint(6, 16))
        sentences.append(" ".join(choose.choices(WORDS, k=length)).capitalize() + ".")
        left -= length
    return " ".join(sentences) + "\n"
