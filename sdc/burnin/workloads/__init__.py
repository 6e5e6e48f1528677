"""Workloads of a burn-in: programs that produce the same bits in each run, on data that provoke faults.

workload    `BurninWorkload`, the base class of all workloads; levels, families, and the workloads of a level
arrays      data as functions of a seed, with the same bits on every host
arithmetic  matrix products, attention, functions such as exponentials; reductions and orderings
movement    memory patterns, copies between host and devices, collectives over the devices of a host
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .arrays import (
        keeps_subnormals as keeps_subnormals,
        make_floats as make_floats,
        murmur as murmur,
        normal as normal,
        random_words as random_words,
    )
    from .workload import (
        AXIS as AXIS,
        DTYPES as DTYPES,
        LEVELS as LEVELS,
        SMALLEST as SMALLEST,
        Bench as Bench,
        DataType as DataType,
        Family as Family,
        FamilyRequest as FamilyRequest,
        Level as Level,
        LevelName as LevelName,
        BurninWorkload as BurninWorkload,
        families as families,
        find_level as find_level,
        register as register,
        workloads as workloads,
    )

__getattr__, __dir__, __all__ = facade(__name__, public=False)
