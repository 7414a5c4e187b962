"""Random numbers of a request: three independent streams, each number addressed by seed, purpose and position.

Counter-based (Philox 4x64-10, Salmon et al. 2011), so that a number depends on nothing that was drawn before. One stream used for two
purposes would make the output follow another law than the target's; a test shows it. Knows numbers only.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from dspark.runtime.engine import Array

_WORDS = 4
"""64-bit words of one Philox block: a position owns a block and uses one word."""


class Purpose(IntEnum):
    """What a number decides at its position."""

    DRAFT = 0
    """Which token is proposed."""
    ACCEPT = 1
    """Whether the proposal stands."""
    NEXT = 2
    """Which token follows the accepted ones; keyed by the round's first position."""


def uniforms(seed: int, purpose: Purpose, position: int, count: int) -> Array:
    """Return float32 numbers in [0, 1) for `count` positions from `position` on, in steps of 2**-24."""
    generator = np.random.Philox(key=np.array([seed, purpose], np.uint64), counter=np.array([position, 0, 0, 0], np.uint64))
    words = generator.random_raw(_WORDS * count)[::_WORDS]
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
