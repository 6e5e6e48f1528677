"""Costs of programs written by hand in the form that compilers print."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdc.costs import CHIPS, Uncharged, cycles
from sdc.costs.cycles import Plain, cycles_of
from sdc.costs.hlo import bytes_of, collectives_of, parse_module, traffic_of
from sdc.costs.targets import read_schedules


def op(cycles: int, name: str = "mul") -> str:
    return f'metadata={{op_name="jit(f)/{name}"}}, backend_config={{"estimated_cycles":"{cycles}"}}'


TPU = f"""
HloModule jit_f

%body.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = (s32[], f32[8]{{0:T(128)}}) parameter(0)
  %fusion.3 = f32[8]{{0:T(128)}} fusion(%p), kind=kLoop, calls=%fused, {op(10, "while/body/mul")}
  ROOT %t = (s32[], f32[8]) tuple(%p, %fusion.3)
}}

%condition.1 (p.1: (s32[], f32[8])) -> pred[] {{
  %p.1 = (s32[], f32[8]) parameter(0)
  %limit = s32[]{{:T(128)}} constant(16)
  ROOT %less = pred[] compare(%p.1, %limit), direction=LT
}}

%repair (q: (f32[8], pred[])) -> (f32[8], pred[]) {{
  %q = (f32[8], pred[]) parameter(0)
  %big = f32[8] fusion(%q), kind=kLoop, calls=%fused, {op(1_000_000, "sdc.hidden/sdc.rarely/while/body/mul")}
  ROOT %t.2 = (f32[8], pred[]) tuple(%big, %q)
}}

%flag (q.1: (f32[8], pred[])) -> pred[] {{
  %q.1 = (f32[8], pred[]) parameter(0)
  ROOT %g = pred[] get-tuple-element(%q.1), index=1
}}

%no (n: f32[8]) -> f32[8] {{
  ROOT %n = f32[8] parameter(0)
}}

%yes (y: f32[8]) -> f32[8] {{
  %y = f32[8] parameter(0)
  ROOT %work = f32[8] fusion(%y), kind=kLoop, calls=%fused, {op(700, "cond/branch_1_fun/mul")}
}}

ENTRY %main.9 (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0:T(128)S(1)}} parameter(0)
  %dot = f32[8]{{0}} fusion(%a), kind=kOutput, calls=%fused, {op(100, "dot_general")}
  %loop = (s32[], f32[8]) while(%dot), condition=%condition.1, body=%body.1, metadata={{op_name="jit(f)/while"}}
  %none = (f32[8], pred[]) while(%loop), condition=%flag, body=%repair, metadata={{op_name="x/sdc.rarely/while"}}
  %ours = f32[8] conditional(%a, %a, %a), branch_computations={{%no, %yes}}, metadata={{op_name="sdc.hidden/cond"}}
  %theirs = f32[8] conditional(%a, %a, %a), true_computation=%yes, false_computation=%no, metadata={{op_name="cond"}}
  %sum = f32[8] all-reduce(%dot), replica_groups={{{{0,1}},{{2,3}}}}, use_global_device_ids=true, to_apply=%add
  ROOT %out = f32[8] add(%sum, %theirs), {op(7)}
}}
"""


def devices(*places: tuple[int, int]) -> list[SimpleNamespace]:
    return [SimpleNamespace(process_index=process, slice_index=part) for process, part in places]


def test_the_way_of_a_step_in_which_nothing_is_wrong() -> None:
    found = cycles_of(parse_module(TPU), CHIPS["v5p"])
    assert found.operations == 100 + 16 * 10 + 0 + 0 + 700 + 7
    assert found.parts["jit(f)/dot_general"] == 100
    assert found.parts["jit(f)/while/body/mul"] == 160
    assert not any("rarely" in name for name in found.parts)


def test_a_loop_whose_length_the_compiler_tells() -> None:
    text = TPU.replace("body=%body.1,", 'body=%body.1, backend_config={"known_trip_count":{"n":"3"}},')
    assert cycles_of(parse_module(text), CHIPS["v5p"]).operations == 100 + 3 * 10 + 700 + 7


@pytest.mark.parametrize(
    ("groups", "axes", "crosses"),
    [
        ("{{0,1},{2,3}}", "model", ""),
        ("{{0,2},{1,3}}", "twin", "slices"),
        ("[2,2]<=[2,2]T(1,0)", "twin", "slices"),
        ("[2,2]<=[4]", "model", ""),
        ("{{0,1,2,3}}", "twin,model", "slices"),
        ("{}", "twin,model", "slices"),
    ],
)
def test_collectives_are_charged_by_their_bytes(groups: str, axes: str, crosses: str) -> None:
    text = TPU.replace("replica_groups={{0,1},{2,3}}", f"replica_groups={groups}")
    chip = CHIPS["v5p"]
    places = devices((0, 0), (0, 0), (1, 1), (1, 1))
    (found,) = collectives_of(parse_module(text), chip, places, {"model": 2}, lambda one: 1.0)
    assert found.axes == ""  # of a mesh that has not all of the devices
    (found,) = collectives_of(parse_module(text), chip, places, {"twin": 2, "model": 2}, lambda one: 1.0)
    assert (found.kind, found.axes, found.crosses, found.count, found.blocking) == (
        "all-reduce",
        axes,
        crosses,
        1,
        True,
    )
    size = 4 if "," in axes else 2
    assert found.sent == 2 * (size - 1) / size * 32
    rate, latency = (chip.network, chip.latency[1]) if crosses else (chip.link, chip.latency[0])
    assert found.seconds == pytest.approx(found.sent / rate + latency)


ASYNCHRONOUS = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %begin.1 = ((f32[8]{0}), f32[8]{0}) all-to-all-start(%a), replica_groups={{0,1}}
  %begin.2 = ((f32[8]{0}), f32[8]{0}) all-to-all-start(%a), replica_groups={{0,1}}
  %beside = f32[8]{0} add(%a, %a)
  %end.1 = f32[8]{0} all-to-all-done(%begin.1)
  %end.2 = f32[8]{0} all-to-all-done(%begin.2)
  ROOT %after = f32[8]{0} add(%end.1, %end.2)
}
"""


@pytest.mark.parametrize(("beside", "hidden"), [(0.0, 0.0), (0.5, 0.5), (1.5, 1.5), (9.0, 2.0)])
def test_what_runs_between_beginning_and_end_hides_no_more_than_it_takes(beside: float, hidden: float) -> None:
    """In units of what one of the two collectives takes."""
    chip, two = CHIPS["v5p"], devices((0, 0), (0, 0))
    one = 16 / chip.link + chip.latency[0]
    (found,) = collectives_of(parse_module(ASYNCHRONOUS), chip, two, {"x": 2}, lambda _: beside * one)
    assert not found.blocking
    assert found.seconds == pytest.approx(2 * one)
    assert found.hidden == pytest.approx(hidden * one)


def test_a_group_of_one_says_nothing_to_anybody() -> None:
    text = TPU.replace("{{0,1},{2,3}}", "{{0},{1}}")
    assert collectives_of(parse_module(text), CHIPS["v5p"], devices((0, 0), (0, 0)), {"twin": 2}, float) == []


def test_a_kernel_is_charged_by_its_schedule_or_not_at_all(tmp_path: Path) -> None:
    kernel = '%mine.1 = f32[1048576]{0} custom-call(%a), custom_call_target="tpu_custom_call", operand_layouts={}'
    module = parse_module(TPU.replace("  %sum =", f"  {kernel}\n  %sum ="))
    chip = CHIPS["v5p"]
    with pytest.raises(Uncharged, match=r"kernel %mine\.1 has no estimate"):
        cycles_of(module, chip)
    bundles = "\n".join(f" 0x{line:x}   :  {{ %s1 = sadd }}" for line in range(50))
    (tmp_path / "17-mine.1-67-final_bundles.txt").write_text(f"iteration_bounds: (16, 4)\n{bundles}\n")
    (tmp_path / "17-mine.1-67-schedule-analysis_final_bundles.txt").write_text(bundles)
    schedules = read_schedules(tmp_path)
    assert schedules == {"mine.1": 50 * 64}
    assert cycles_of(module, chip, schedules).kernels == 3200
    least = round((4 * 2**20 + 32) / chip.bandwidth * chip.clock)
    assert cycles_of(module, chip, {"mine.1": 1}).kernels == least > 1


def test_a_kernel_that_computes_a_product_is_no_cheaper_than_a_product() -> None:
    said = 'frontend_attributes={kernel_metadata={\n"sdc_product":"10"\n}}, backend_config={"bytes_accessed":"4096000"}'
    kernel = f'%sdc_kernel.1 = f32[128,128]{{1,0}} custom-call(%a), custom_call_target="tpu_custom_call", {said}'
    module = parse_module(TPU.replace("  %sum =", f"  {kernel}\n  %sum ="))
    chip = CHIPS["v5p"]
    told = round(4_096_000 / chip.bandwidth * chip.clock)  # some of it is read again and again
    for instructions, product, charged in (
        (10, None, told),
        (10, Plain(5000, 4000), 5000),  # by instructions, the product would be 4,000
        (6000, Plain(5000, 4000), 7500),
    ):
        products = {} if product is None else {"sdc_kernel.1": product}
        found = cycles_of(module, chip, {"sdc_kernel.1": instructions}, products)
        assert (found.kernels, found.scheduled) == (charged, instructions)


def test_the_product_in_whose_place_a_kernel_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, one of which is vmapped: four products of the same factors."""
    text = """
ENTRY %main (a: bf16[2048,1024], b: bf16[2048,512]) -> f32[1024,512] {
  %a = bf16[2048,1024]{1,0} parameter(0)
  %b = bf16[2048,512]{1,0} parameter(1)
  %as = bf16[4,2048,1024]{2,1,0} parameter(2)
  %w = f32[1,512]{1,0} parameter(3)
  %sdc_kernel.1 = f32[1024,512] custom-call(%a, %b, %w), frontend_attributes={kernel_metadata={
"sdc_product":"00"
}}
  ROOT %mapped.2 = f32[4,1024,512] custom-call(%as, %b, %w), frontend_attributes={kernel_metadata={"sdc_product":"00"}}
}
"""
    asked: list[object] = []

    def plain(target: str, forms: tuple[Any, ...]) -> dict[Any, Plain]:
        asked.extend([target, *forms])
        return dict.fromkeys(forms, Plain(100, 80))

    monkeypatch.setattr(cycles, "_plain", plain)
    found = cycles.replaced_products(parse_module(text), "v5p:2x2x1")
    assert asked == ["v5p:2x2x1", ((2048, 1024), (2048, 512), (0, 0))]
    assert found == {"sdc_kernel.1": Plain(100, 80), "mapped.2": Plain(400, 320)}


def loop(condition: str) -> int:
    text = f"""
%cond (p: (s32[], u32[], f32[])) -> pred[] {{
  %p = (s32[], u32[], f32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %zero = s32[] constant(0)
  %thirty = s32[]{{:T(128)}} constant(30)
  %low = u32[] constant(30)
  %half = f32[] constant(0.5)
{condition}
}}

%fused (q: s32[], r: s32[]) -> pred[] {{
  %q = s32[] parameter(0)
  %r = s32[] parameter(1)
  ROOT %inner = pred[] compare(%q, %r), direction=LT
}}

ENTRY %main (a: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  ROOT %loop = (s32[], u32[], f32[]) while(%a), condition=%cond, body=%body
}}
"""
    module = parse_module(text)
    return module.trips(module.computations["main"][-1])


@pytest.mark.parametrize(
    ("condition", "turns"),
    [
        ("ROOT %c = pred[] compare(%i, %thirty), direction=LT", 30),
        ("ROOT %c = pred[] compare(%i, %thirty), direction=LE", 31),
        ("ROOT %c = pred[] compare(%i, %zero), direction=GT", 1),  # downwards, from nobody knows where
        ("ROOT %c = pred[] compare(%i, %zero), direction=GE", 1),
        ("ROOT %c = pred[] compare(%i, %n), direction=LT", 1),
        # 64 bits in two halves: the upper one below zero, or the lower one below thirty
        ("%h = pred[] compare(%i, %zero), direction=LT\n %l = pred[] compare(%i, %low), direction=LT\n"
         " ROOT %c = pred[] or(%h, %l)", 30),
        ("ROOT %c = pred[] fusion(%i, %thirty), kind=kLoop, calls=%fused", 30),
    ],
)  # fmt: skip
def test_how_often_a_loop_runs(condition: str, turns: int) -> None:
    """At least once, whatever its condition compares with."""
    assert loop(condition) == turns


def test_kernels_and_bytes_of_a_gpu() -> None:
    found = traffic_of(parse_module(TPU), CHIPS["h100"])
    # the product, sixteen turns of the loop, one branch, and the sum: none for tuples, loops or the collective
    assert found.kernels == 1 + 16 + 1 + 1
    assert found.moved == 64 + 16 * (32 + 36) + 64 + 96
    assert found.seconds == found.moved / CHIPS["h100"].bandwidth


def test_sizes_of_shapes() -> None:
    assert bytes_of("(bf16[4096,2]{0,1:T(8,128)(2,1)}, /*index=1*/pred[3], u32[], f8e4m3fn[5], s4[3])") == (
        4096 * 4 + 3 + 4 + 5 + 2
    )
    with pytest.raises(ValueError, match="has no ENTRY computation"):
        parse_module("HloModule empty\n")
