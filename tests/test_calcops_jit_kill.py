"""Kill-proof: many processes import at once, some or all are killed at a random moment, others come later."""
# ruff: noqa: F811 - pytest's fixtures are imported and then named as arguments

import random
import time

import pytest
from test_calcops_jit import checkout, in_cache, staging, wait_for  # noqa: F401

PROCESSES = 16
LATER = 3


def one_round(checkout, number: int, chance: random.Random) -> str:
    """A new key; nobody hangs, nobody loads anything but the new library, and one compile of it succeeds."""
    checkout.write("ops/tiny/tiny.h", f"#define ANSWER {number}\n")
    before = set(checkout.libraries())
    children = [checkout.start() for _ in range(PROCESSES)]
    time.sleep(chance.uniform(0, 2))
    everyone = chance.random() < 0.3
    victims = children if everyone else chance.sample(children, chance.randint(1, PROCESSES - 1))
    for victim in victims:
        victim.kill()  # a child that is not yet reaped can be signalled whether it ended or not
    children += [checkout.start() for _ in range(LATER)]
    for child in children:
        child.wait()
    survivors = [child for child in children if child not in victims]
    assert [(child.code, child.out) for child in survivors] == [(0, f"{number}\n")] * len(survivors), (
        "\n".join(child.err for child in survivors)
    )
    assert all(child.out in ("", f"{number}\n") for child in victims)
    assert len(set(checkout.libraries()) - before) == 1
    assert staging(checkout) == []
    wait_for(lambda: in_cache(checkout) == [], 5)
    return "all" if everyone else f"{len(victims)}"


def rounds(checkout, count: int, seed: int) -> None:
    # A stand-in for a compiler that takes a second.
    checkout.compiler.write_text(checkout.compiler.read_text().replace(' -c "*) ', ' -c "*) sleep 1; '))
    print(f"seed {seed}")
    chance = random.Random(seed)
    start = time.monotonic()
    for number in range(1, count + 1):
        killed = one_round(checkout, number, chance)
    print(
        f"{count} rounds, {(time.monotonic() - start) / count:.1f} s each; in the last {killed} were killed"
    )


def test_one_round_of_killing_importers(checkout):
    rounds(checkout, 1, seed=time.time_ns())


@pytest.mark.long
def test_500_rounds_of_killing_importers(checkout):
    rounds(checkout, 500, seed=time.time_ns())
