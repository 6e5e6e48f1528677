"""`sdc train --aggregate` in real processes, and the specifications that it takes."""

import pytest

from sdc.aggregation.delays import parse_latency
from sdc.aggregation.methods import parse_aggregation


def test_spaces_do_not_matter() -> None:
    spaced = parse_aggregation(" noise , sigma = 0.1 + paft , max_period = 20 ")
    plain = parse_aggregation("noise,sigma=0.1+paft,max_period=20")
    assert (spaced.noise, spaced.method) == (plain.noise, plain.method)


def test_specifications() -> None:
    found = parse_aggregation("noise,workers=0+2,sigma=1e-3+dropcompute,threshold=auto,latency=lognormal,mean=1,std=2")
    assert found.noise is not None
    assert found.noise.workers == (0, 2)
    assert found.dropcompute is not None
    assert found.dropcompute.threshold == "auto"
    assert found.dropcompute.latency == parse_latency("lognormal,mean=1,std=2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dropcompute,threshold=-1", "threshold=-1: expected a number of seconds above 0, inf, or auto"),
        ("dropcompute,threshold=nan", "threshold=nan"),
        ("dropcompute,latency=constant,seconds=1,micro_batches=4", "the value of latency extends to the end"),
        ("lossy,p=1.5", "aggregation 'lossy,p=1.5': p=1.5"),
        ("foo", "unknown method 'foo'"),
        ("paft,period=3", "unknown key 'period'; method paft takes initial_period"),
        ("paft,max_period=x", "max_period=x: expected a whole number"),
        ("paft_sync,sync_state=maybe", "expected true or false"),
        ("dropcompute,correction=some", "expected one of none, rate, count"),
        ("noise,workers=a", "expected whole numbers, as in"),
        ("noise,sigma", "not of the form key=value"),
        ("noise,sigma=1,sigma=2", "given twice"),
        ("paft+lossy", "lossy cannot be combined with paft"),
        ("noise+lossy", "lossy takes the workers' own gradients"),
        ("dropcompute+lossy,stale=true", "stale packets have none"),
        ("shadow+noise", "use it alone"),
    ],
)
def test_bad_specifications(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_aggregation(text)
