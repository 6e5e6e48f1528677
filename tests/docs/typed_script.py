"""A user's script, which type checkers accept in strict mode: transformations keep the types of the step."""

from typing import assert_type

import jax
import jax.numpy as jnp

import sdc
from sdc.checksums import Flags

Both = tuple[jax.Array, jax.Array]


def step(w: jax.Array, x: jax.Array) -> Both:
    return w - 0.1 * x, jnp.sum(w @ x)


def main() -> None:
    w = x = jax.random.normal(jax.random.key(0), (4, 4))
    out, flags = sdc.abft(step)(w, x)
    assert_type(out, Both)
    assert_type(flags, sdc.Reports[Flags])
    assert_type(flags["fwd/dot_general"], Flags)
    struck, events = sdc.inject(step, ["bitflip,rate=0.1,where=products"])(
        sdc.Moment(jax.random.key(0), jnp.int32(0)), w, x
    )
    assert_type(struck, Both)
    assert_type(events, sdc.Reports[sdc.Events])
    printed, digests = sdc.fingerprint(step, "products")(w, x)
    assert_type(printed, Both)
    assert_type(sdc.first_difference(digests, digests), sdc.FirstDifference | None)
    twice, witnessed = sdc.witness(step)(w, x)
    assert_type(twice, Both)
    watch = sdc.guard(step)
    assert_type(watch(w, x), Both)
    print(flags.verdict(), events.table(), witnessed.verdict(), watch.verdict())


if __name__ == "__main__":
    main()
