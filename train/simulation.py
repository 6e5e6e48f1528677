"""The text form of one simulated fault in a trace."""

import dataclasses
from collections.abc import Sequence

import jax

import sdc
from sdc.faults._strike import Strike, no_strike, strike_on
from sdc.faults.language import parse_kind
from sdc.program.selectors import matching

from .parallel import DATA, MODEL

AXES = (DATA, MODEL)
EXAMPLE = "bitflip,bits=30,step=3,site=fwd/attn,iteration=0+2,element=7,model=1"


@dataclasses.dataclass(frozen=True)
class Simulation:
    """One fault of a traced run, or none: a run of the same program without it.

    Attributes:
        text: the line it was read from.
        kind: what becomes of the elements, in the language of `faults.parse_kind`; empty for no fault.
        step: of the run.
        site: pattern of site names.
        iteration: index in the enclosing loops.
        element: flat index of the first element.
        device: index along mesh axes.
    """

    text: str
    kind: str = ""
    step: int = -1
    site: str = ""
    iteration: tuple[int, ...] = ()
    element: int = 0
    device: dict[str, int] = dataclasses.field(default_factory=dict)

    def strike(self, sites: Sequence[sdc.Site], step: int) -> Strike:
        """What happens at a step of a program with these sites.

        Raises:
            ValueError: the fault cannot be placed.
        """
        if not self.kind:
            return no_strike(axes=AXES)
        what, pattern = parse_kind(self.kind)
        exact = [site for site in sites if site.name == self.site]
        found = exact or [site for site in sites if matching(self.site)(site)]
        if len(found) != 1:
            names = ", ".join(site.name for site in found[:5])
            raise ValueError(
                f"--simulate site={self.site}: {len(found)} of the traced sites match{': ' + names if found else ''}; "
                "name one that --where selects"
            )
        shape = found[0].outputs[0].shape
        elements = [int(i) for i in pattern.positions(jax.numpy.asarray([self.element]), shape)[0]]
        size = int(jax.numpy.prod(jax.numpy.asarray(shape)))
        inside = [i for i in elements if i < size] or [self.element]
        struck = strike_on(
            found[0], what, inside, iteration=self.iteration, device=self.device, axes=AXES, room=len(elements)
        )
        return struck if step == self.step else no_strike(room=len(elements), axes=AXES)


def parse_simulation(text: str) -> Simulation:
    """Reads `--simulate`.

    Raises:
        ValueError: the line cannot be understood.

    Example:
        >>> from sdc.train.simulation import parse_simulation
        >>> parse_simulation("bitflip,bits=30,step=3,site=fwd/attn,iteration=0+2,model=1").iteration
        (0, 2)
    """
    if text == "none":
        return Simulation(text)
    kind: list[str] = []
    own: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if equals and key in ("step", "site", "iteration", "element", *AXES):
            own[key] = value
        else:
            kind.append(part.strip())
    if missing := [key for key in ("step", "site") if key not in own]:
        raise ValueError(f"--simulate {text!r}: {missing[0]!r} is missing, as in {EXAMPLE!r}; or give none")
    try:
        parse_kind(",".join(kind))
        return Simulation(
            text=text,
            kind=",".join(kind),
            step=int(own["step"]),
            site=own["site"],
            iteration=tuple(int(index) for index in own["iteration"].split("+")) if "iteration" in own else (),
            element=int(own.get("element", 0)),
            device={axis: int(own[axis]) for axis in AXES if axis in own},
        )
    except ValueError as error:
        raise ValueError(f"--simulate {text!r}: {error}; as in {EXAMPLE!r}, or none") from error
