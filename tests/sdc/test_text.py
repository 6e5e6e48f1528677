"""The grammar of texts: what is written is read again, what is mistyped is refused in one line, without JAX."""

import contextlib
import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given, strategies as st

import sdc
from sdc.aggregation.delays import (
    LATENCIES as FORMS,
    Bernoulli,
    BoundedLogNormal,
    Constant,
    Exponential,
    Gamma,
    Latency,
    LogNormal,
    Normal,
    parse_latency,
)  # fmt: skip
from sdc.aggregation.methods import (
    METHODS,
    Aggregation,
    DropCompute,
    Lossy,
    Noise,
    Paft,
    PaftSync,
    Shadow,
    parse_aggregation,
)  # fmt: skip
from sdc.faults.fault import Fault, Lattice, One, Pattern, Row, Run, Stride, Tile, When, Whole, as_fault, parse_fault
from sdc.faults.kinds import (
    KINDS,
    Add,
    BitFlip,
    Extreme,
    Gaussian,
    Mixed,
    Relative,
    Rotate,
    Scale,
    Sign,
    Stuck,
    StuckBit,
    Tailed,
)
from sdc.nodes.simulated_nodes import SuspectName, parse_suspect
from sdc.program import as_selector
from sdc.text import Rest, read_value, split
from sdc.train.keeper import LOSSES, LostShards, Running
from sdc.train.specs import Simulation, parse_simulation

POSITIVE = st.floats(1e-30, 1e30)
PROBABILITY = st.floats(0, 1)
NUMBER = st.floats(allow_nan=False)
COUNT = st.integers(1, 99)
BITS = st.lists(st.integers(0, 63), max_size=3, unique=True).map(tuple)
FIELD = st.sampled_from(["sign", "exponent", "mantissa"])
CHOICE = st.one_of(st.fixed_dictionaries({"bits": BITS}), st.fixed_dictionaries({"field": FIELD}))


def several(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    return st.one_of(numbers, st.lists(numbers, min_size=1, max_size=4).map(tuple))


def kinds() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(lambda choice, count: BitFlip(**choice, count=count), CHOICE, COUNT),
        st.builds(lambda choice, value: StuckBit(value, **choice), CHOICE, st.integers(0, 1)),
        st.just(Sign()),
        st.builds(Scale, NUMBER),
        st.builds(Add, NUMBER),
        st.builds(Relative, several(POSITIVE)),
        st.builds(Gaussian, POSITIVE),
        st.builds(Stuck, NUMBER),
        st.builds(Rotate, st.sampled_from([-7, -1, 1, 3, 5])),
    )


PATTERNS: st.SearchStrategy[Pattern] = st.one_of(
    st.sampled_from([Row(), Whole()]),
    st.builds(Run, st.integers(11, 99)),  # a rotation by up to 7 moves the values of so many
    st.builds(Stride, st.integers(11, 99), COUNT, COUNT),
    st.builds(Tile, st.just(11), COUNT),
)
LATENCIES: st.SearchStrategy[Latency] = st.one_of(
    st.builds(Constant, st.floats(0, 1e9)),
    st.builds(Normal, POSITIVE, POSITIVE),
    st.builds(LogNormal, POSITIVE, POSITIVE),
    st.builds(Exponential, POSITIVE),
    st.builds(Gamma, POSITIVE, POSITIVE),
    st.builds(Bernoulli, st.floats(0, 1e9), st.floats(0, 1e9), PROBABILITY),
    st.builds(BoundedLogNormal, POSITIVE),
)
WHENS = st.builds(
    lambda onset, lasts, spike, burst, decay, gamma: When(onset, spike, burst, decay, lasts and onset + lasts, gamma),
    st.integers(0, 999), st.none() | COUNT, st.floats(1e-9, 1), st.floats(0, 1e9), POSITIVE,
    st.none() | st.floats(0.1, 1e9),
)  # fmt: skip
SITES = st.one_of(
    st.sampled_from(["*", "fwd/attn", "[fb]wd/*", "fwd/a,b", 'bwd/"quoted"', "fwd/a+b", "fwd/it's", "fwd/f(x", " fwd"]),
    st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1).map(lambda text: f"fwd/{text}"),
    st.sampled_from(['primitive("a,b", "c(") & ~direction("bwd")', "probes | iteration(1, loop=0)", "everything"]),
)
FAULTS = st.builds(
    Fault, kinds(), several(PROBABILITY), SITES, st.none() | st.integers(0, 99),
    st.dictionaries(st.sampled_from(["twin", "data", "fsdp", "expert"]), st.integers(0, 99)), WHENS, PATTERNS,
)  # fmt: skip


@given(FAULTS)
def test_faults_are_read_as_they_are_written(fault: Fault) -> None:
    assert parse_fault(str(fault)) == fault


@given(kinds(), PATTERNS)
def test_kinds_are_read_as_they_are_written(kind: Any, pattern: Pattern) -> None:
    fault = Fault(kind, pattern=pattern)
    read = as_fault(str(fault))
    assert read == fault
    assert repr(read) == repr(fault)  # -0.0 equals 0.0
    assert as_fault(str(kind)).what == kind


@pytest.mark.parametrize(
    ("call", "shorthand"),
    [
        ('bitflip(bits=30, rate=1e-4, site="fwd/attn")', "bitflip,bits=30,rate=1e-4,site=fwd/attn"),
        ("bitflip(row, bits=(30, 31), rate=[0.1, 0.2])", "bitflip,bits=30+31,row,rate=0.1+0.2"),
        ('stuck(value=-0.0, rate=1, site="fwd/a,b", row=True)', 'stuck,value=-0.0,rate=1,site="fwd/a,b",row'),
        (
            "scale(factor=2.0, rate=1, site=primitive('a') & probes)",
            "scale,factor=2.0,rate=1,site=primitive('a') & probes",
        ),
    ],
)
def test_a_term_is_a_call_with_keywords(call: str, shorthand: str) -> None:
    assert repr(parse_fault(call)) == repr(parse_fault(shorthand))


def test_calls_nest() -> None:
    found = parse_aggregation("noise(sigma=0.1) + dropcompute(latency=gamma(shape=2.0, mean=1.0), micro_batches=3)")
    same = parse_aggregation("noise,sigma=0.1+dropcompute,latency=(gamma,shape=2.0,mean=1.0),micro_batches=3")
    assert (found.noise, found.dropcompute) == (same.noise, same.dropcompute)


@pytest.mark.parametrize("text", ["bitflip(bits=30", "bitflip(bits=30)x", "bitflip(rate=1, row)", "bitflip()()"])
def test_a_call_that_python_cannot_read(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be parsed; use Python syntax, as in 'bitflip"):
        parse_fault(text)


# One of everything that a text stands for, its text, and what reads it.
WRITTEN: list[tuple[Any, str, Callable[[str], Any]]] = [
    *[(kind, text, lambda text: as_fault(text).what) for kind, text in [
        (BitFlip(), "bitflip"),
        (StuckBit(1, (3,)), "stuck1(bits=3)"),
        (Stuck(math.nan), "nan"),
        (Stuck(-math.inf), "stuck(value=-inf)"),
        (BitFlip(bits=(30,)), "bitflip(bits=30)"),
        (BitFlip(field="exponent", count=2), 'bitflip(field="exponent", count=2)'),
        (StuckBit(0), "stuck0"),
        (StuckBit(1, (3, 5)), "stuck1(bits=(3, 5))"),
        (Sign(), "sign"),
        (Scale(2.0), "scale(factor=2.0)"),
        (Add(-1e-9), "add(value=-1e-09)"),
        (Relative((0.5,)), "relative(severity=(0.5,))"),
        (Tailed((0.5, 1e20), tail=1.0), "tailed(severity=(0.5, 1e+20), tail=1.0)"),
        (Gaussian(0.1), "gaussian(sigma=0.1)"),
        (Stuck(0.0), "zero"),
        (Stuck(math.inf), "inf"),
        (Stuck(-0.0), "stuck(value=-0.0)"),
        (Mixed(zero=0.5, flips=(0.25, 0.75)), "mixed(zero=0.5, flips=(0.25, 0.75))"),
        (Extreme(), "extreme"),
        (Extreme(zero=0.5, flipped=0.25, factor=1024.0), "extreme(zero=0.5, flipped=0.25, factor=1024.0)"),
        (Rotate(), "swap"),
        (Rotate(3), "rotate(by=3)"),
    ]],
    *[(Fault(BitFlip(), pattern=pattern), text, as_fault) for pattern, text in [
        (One(), "bitflip"),
        (Run(8), "bitflip(run=8)"),
        (Stride(4, 32, 32), "bitflip(stride=(4, 32))"),
        (Stride(4, 32), "bitflip(stride=(4, 32, 1))"),
        (Tile(4, 32), "bitflip(tile=(4, 32))"),
        (Lattice(4, 64, 128), "bitflip(lattice=(4, 64, 128))"),
        (Row(), "bitflip(row=True)"),
        (Whole(), "bitflip(whole=True)"),
    ]],
    (Fault(Rotate(), pattern=Run(2)), "swap", as_fault),
    (Fault(Rotate(), pattern=Run(3)), "swap(run=3)", as_fault),
    *[(fault, text, parse_fault) for fault, text in [
        (Fault(Stuck(0.0), 0.5, "fwd/a,b", 2, {"fsdp": 1}),
         'zero(rate=0.5, site="fwd/a,b", layer=2, fsdp=1)'),
        (Fault(Sign(), (0.5,), 'primitive("a", "b") & ~direction("bwd")', pattern=Row()),
         'sign(row=True, rate=(0.5,), where=primitive("a", "b") & ~direction("bwd"))'),
        (Fault(Sign(), 1e-4, band=(0.5, 2.0), dtype="bfloat16", when=When(rise=0.01)),
         'sign(band=(0.5, 2.0), dtype="bfloat16", rate=0.0001, rise=0.01)'),
        (Fault(Sign(), 1e-4, '\n"" ', when=When(onset=3, end=4, gamma=0.5)),
         'sign(rate=0.0001, site="\\n\\"\\" ", onset=3, end=4, gamma=0.5)'),
        (Fault(Sign(), 1e-4, " & ".join(["probes"] * 100)), f"sign(rate=0.0001, where={' & '.join(['probes'] * 100)})"),
    ]],
    *[(latency, text, parse_latency) for latency, text in [
        (Constant(0.5), "constant(seconds=0.5)"),
        (Normal(1.0, 2.0), "normal(mu=1.0, sigma=2.0)"),
        (LogNormal(0.1, 0.05), "lognormal(mean=0.1, std=0.05)"),
        (Exponential(2.0), "exponential(mean=2.0)"),
        (Gamma(2.0, 3.0), "gamma(mean=2.0, shape=3.0)"),
        (Bernoulli(1.0, 2.0, 0.5), "bernoulli(base=1.0, extra=2.0, probability=0.5)"),
        (BoundedLogNormal(1.0), "boundedlognormal(base=1.0)"),
    ]],
    *[(Aggregation(**methods), text, parse_aggregation) for methods, text in [
        ({"noise": Noise(0.1, workers=(0, 2)), "method": Paft(max_period=50)},
         "noise(sigma=0.1, workers=(0, 2)) + paft(max_period=50)"),
        ({"method": PaftSync(sync_state=True)}, "paft_sync(sync_state=True)"),
        ({"dropcompute": DropCompute("auto", Gamma(2.0, 3.0), correction="count"), "method": Lossy(0.25, replay="a+b")},
         'dropcompute(threshold="auto", latency=gamma(mean=2.0, shape=3.0), correction="count")'
         ' + lossy(p=0.25, replay="a+b")'),
        ({"method": Shadow()}, "shadow"),
    ]],
    (Simulation(Fault(BitFlip((30,)), at={"pipe": 1}, pattern=Run(4)), 3, "fwd/attn", (0, 2), 7),
     'bitflip(bits=30, run=4, step=3, site="fwd/attn", iteration=(0, 2), element=7, pipe=1)', parse_simulation),
    (Simulation(Fault(Sign()), 3, "a*", (1,)), 'sign(step=3, site="a*", iteration=(1,))', parse_simulation),
    (Simulation(), "none", parse_simulation),
    (SuspectName("healthy"), "healthy", parse_suspect),
    (SuspectName("node4", times=1e6), "node4(times=1000000.0)", parse_suspect),
    (SuspectName("node11", "uniform", 0.5), "node11:uniform(times=0.5)", parse_suspect),
    (SuspectName("silicon:tensor-core", times=2.0), "silicon:tensor-core(times=2.0)", parse_suspect),
    (LostShards(step=3, optimizer="zeroed"), 'shards(step=3, optimizer="zeroed")',
     lambda text: Running(losses=[text]).lost[0]),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text", "read"), WRITTEN, ids=[text[:40] for _, text, _ in WRITTEN])
def test_everything_is_written_as_the_call_that_makes_it(value: Any, text: str, read: Callable[[str], Any]) -> None:
    assert str(value) == repr(value) == text
    assert read(text) == value
    assert repr(read(text)) == text  # -0.0 equals 0.0


def test_every_form_is_in_the_table() -> None:
    forms = {*KINDS, *FORMS, *METHODS, *LOSSES}
    assert forms <= {head for _, text, _ in WRITTEN for head in re.findall(r"(?:^| \+ )(\w+)", text)}


@pytest.mark.parametrize("chosen", ['primitive("a", "b") & ~direction("bwd")', "probes | iteration(1, loop=0)"])
def test_a_selector_is_written_as_the_expression_that_makes_it(chosen: str) -> None:
    assert str(as_selector(chosen)) == repr(as_selector(chosen)) == chosen


def test_a_call_may_be_a_value_of_the_shorthand() -> None:
    found = parse_aggregation("dropcompute,latency=gamma(mean=2.0, shape=3.0),micro_batches=3").dropcompute
    assert found == DropCompute(latency=Gamma(2.0, 3.0), micro_batches=3)


@given(LATENCIES)
def test_latencies_are_read_as_they_are_written(latency: Latency) -> None:
    assert parse_latency(str(latency)) == latency
    found = parse_aggregation(f"dropcompute,latency=({latency}),micro_batches=3+paft").dropcompute
    assert found is not None
    assert (found.latency, found.micro_batches) == (latency, 3)
    last = parse_aggregation(f"noise + dropcompute , micro_batches = 3 , latency = {latency}").dropcompute
    assert last is not None
    assert (last.latency, last.micro_batches) == (latency, 3)


def test_any_other_key_with_a_number_names_a_mesh_axis() -> None:
    assert parse_fault("nan,rate=1,fsdp=1,expert=3", at={"twin": 1}).at == {"twin": 1, "fsdp": 1, "expert": 3}
    simulation = parse_simulation("bitflip,run=4,step=3,site=a*,iteration=0+2,element=7,pipe=1")
    assert simulation.fault == Fault(BitFlip(), at={"pipe": 1}, pattern=Run(4))
    assert (simulation.step, simulation.site, simulation.iteration, simulation.element) == (3, "a*", (0, 2), 7)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nan,rate=1,layers=3", "unknown key 'layers'; did you mean 'layer'?"),
        ("nan,rate=1,oneset=3", "unknown key 'oneset'; did you mean 'onset'?"),
        ("nan,rate=1,coumt=3", "unknown key 'coumt'; did you mean 'count'?"),  # a key of another kind
        ("nan,raet=1", "unknown key 'raet'; did you mean 'rate'?"),
        ("nan,rate=1,factor=3", "unknown key 'factor'; kind nan takes run, stride"),
        ("nan,rate=1,fsdp=x", "unknown key 'fsdp'; kind nan takes .*, and name=number for a mesh axis"),
        ("nan,rate=1,fsdp=1,fsdp=2", "'fsdp' is given twice"),
        ("nan,rate=0.1+x", "rate=0.1.x: expected a number, as in 0.1, or numbers, as in .* joined by"),
        ('nan,rate=1,site="a', "expected a string with a closing quote"),
        ("bitflip,rate=1,stride=4x2x1x9", "stride=4x2x1x9: expected 2 or 3 numbers"),
        ('nan,rate=1,site=primitve("a")', "selector 'primitve.*is not a selector"),
    ],
)
def test_what_is_mistyped_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        parse_fault(text)
    assert str(caught.value).startswith(f"fault {text!r}: ")
    assert "\n" not in str(caught.value)


DEEP = {
    "brackets": lambda n: n * "(" + "probes" + n * ")",
    "not": lambda n: n * "~" + "probes",
    "and": lambda n: " & ".join(["probes"] * (n + 1)),
    "quotes": lambda n: '"' + n * '"' + '"',
    "sums": lambda n: '"a"' + n * '+"a"',
    "minus": lambda n: '"a"+' + n * "-" + "1",
}


@pytest.mark.parametrize("levels", [101, 1_000, 100_000])
@pytest.mark.parametrize("deep", DEEP.values(), ids=DEEP)
@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parse_fault, "nan,rate=1,where={}"),
        (as_fault, "bitflip,field={}"),
        (parse_aggregation, "dropcompute,threshold=1,latency={}"),
        (parse_aggregation, "{}"),
        (parse_simulation, "nan,step=1,site={}"),
        (parse_latency, "{}"),
    ],
)
def test_however_deep_a_text_is_it_is_read_or_refused(read: Any, text: str, deep: Any, levels: int) -> None:
    """Any other error, such as a RecursionError, fails this test."""
    with contextlib.suppress(ValueError):
        read(text.format(deep(levels)))


def test_brackets_and_quotes_hold_together() -> None:
    assert split('a,b=f("x,)",(1,2)),c="d,e+f",g', ",") == ["a", 'b=f("x,)",(1,2))', 'c="d,e+f"', "g"]
    assert split("a,b=0+1+c,d=(e+f)+ g", "+") == ["a,b=0+1", "c,d=(e+f)", " g"]
    assert parse_fault("nan,rate=1,site=fwd/it's,layer=2").layer == 2
    lossy = parse_aggregation('lossy,replay="runs/a+b,c"').method
    assert lossy.replay == "runs/a+b,c"  # type: ignore[union-attr] # lossy has it


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "3", 3),
        (float, "1e-4", 1e-4),
        (bool, "false", False),
        (str, "a=b", "a=b"),
        (str, '"a\\"b"', 'a"b'),
        (Literal["a", "b"], "b", "b"),
        (tuple[int, ...], "0+2", (0, 2)),
        (float | tuple[float, ...], "1e+5", 1e5),
        (float | tuple[float, ...], "1e+5+2", (1e5, 2.0)),
        (int | None, "7", 7),
        (Rest(lambda text: text.upper()), "(a,b)", "A,B"),
        (str.title, "ab", "Ab"),
    ],
)
def test_values_have_declared_types(kind: Any, text: str, value: Any) -> None:
    found = read_value(kind, text)
    assert (found, type(found)) == (value, type(value))


TEXTS = """
import sys
from pathlib import Path
from sdc.aggregation.delays import parse_latency
from sdc.faults import as_fault, parse_fault
from sdc.nodes import NODES, node_faults
from sdc.program import as_selector
from sdc.checksums import Profile, Rounding, Settings
from sdc.train.specs import parse_simulation
from sdc.train.programs.config import check, get_config
from sdc.aggregation.methods import parse_aggregation

as_selector('primitive("dot_general") & direction("bwd")')
parse_fault('bitflip,bits=30,rate=1e-4,where=products & iteration(2),gamma=0.5,fsdp=1')
as_fault("rotate,by=2,row")
parse_latency("lognormal,mean=0.1,std=0.05")
parse_aggregation("noise,sigma=0.01+paft,max_period=50")
parse_aggregation("dropcompute,latency=constant,seconds=1+lossy,p=0.1,burst=3")
parse_simulation("bitflip,bits=30,step=3,site=fwd/attn,iteration=0+2")
for name in ("healthy", *NODES):
    node_faults(name, layers=4, at={"twin": 1})
check(get_config("tiny"), 1, 2)
Settings("correct", "blocks", Rounding(kappa=16.0))
for wrong in (
    lambda: Settings("correct", "paper"),
    lambda: Settings("mend"),
    lambda: Profile.read(Path("no such file")),
    lambda: parse_fault("meteor"),
    lambda: as_selector("dot"),
    lambda: parse_aggregation("lossy,p=1.5"),
    lambda: parse_aggregation("lossy,p=0.1,burst=3,sender=1"),
    lambda: parse_latency("gamma,mean=1"),
):
    try:
        wrong()
    except ValueError as error:
        print(error)
    else:
        raise AssertionError(wrong)
sys.exit("jax" in sys.modules or "jaxtyping" in sys.modules)
"""


def test_texts_and_settings_are_checked_without_jax() -> None:
    ended = subprocess.run([sys.executable, "-c", TEXTS], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 8
    assert lines[0].startswith("mode=correct: needs to know which rows are wrong, but scheme=paper")


def test_the_same_text_means_the_same_sites_everywhere() -> None:
    """Selector, text and predicate, in every function that asks for sites."""
    import jax
    import jax.numpy as jnp

    from sdc.program import as_selector, primitive, rewrite, substitute

    def step(x: Any) -> Any:
        return jnp.sin(jnp.cos(x) @ jnp.ones((3, 3)))

    class Look:
        def __call__(self, place: Any, bind: Any, *inputs: Any) -> Any:
            return bind(*inputs), jnp.uint32(1)

        def merge(self, total: Any, new: Any) -> Any:
            return total + new

    x, moment = jnp.ones((3, 3)), sdc.Moment(jax.random.key(0), jnp.int32(0))
    forms: list[Any] = [
        primitive("dot_general"),
        'primitive("dot_general")',
        lambda site: site.primitive == "dot_general",
    ]

    def twins(where: Any) -> Any:
        return jax.vmap(sdc.lockstep(step, "twin", where=where), axis_name="twin")(jnp.stack([x, x]))

    tools: list[Any] = [
        lambda where: {site.name: site for site in sdc.sites(step, x, where=where)},
        lambda where: rewrite(step, where, Look())(x)[1],
        lambda where: rewrite(step, where, Look(), required=True)(x)[1],
        lambda where: sdc.fingerprint(step, where)(x)[1],
        lambda where: twins(where)[1],
        lambda where: sdc.strike(step, where)(sdc.no_strike(), x)[1],
        lambda where: sdc.inject(step, [Fault(BitFlip(), 0.1, where)])(moment, x)[1],
        lambda where: sdc.abft(step, where)(x)[1],
    ]  # fmt: skip
    for where in forms:
        for tool in tools:
            assert list(tool(where)) == ["fwd/dot_general"]
        zeros = substitute(step, where, lambda primitive, params, inputs: [jnp.zeros((3, 3))])
        assert not zeros(x).any()
    with pytest.raises(ValueError, match="where=3: expected a selector or its text"):
        as_selector(3)  # type: ignore[arg-type]


def test_one_is_the_pattern_of_no_words() -> None:
    assert as_fault("nan").pattern == One()


def test_a_sum_in_a_call_is_no_list() -> None:
    """The shorthand has `+` between values; a call is Python, where the same is another number."""
    assert parse_fault("bitflip,bits=30+31,rate=1e-4") == parse_fault("bitflip(bits=(30, 31), rate=1e-4)")
    with pytest.raises(ValueError, match=r"30 \+ 31 is a sum; write several values as a tuple, as in \(30, 31\)"):
        parse_fault("bitflip(bits=30+31, rate=1e-4)")
