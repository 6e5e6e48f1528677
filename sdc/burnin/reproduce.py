"""Reruns the cases of a bundle with JAX and NumPy alone. Every bundle contains a copy of this file.

    python reproduce.py [CASE ...] [--runs 10]

A case is a program, compiled from the text in the bundle, with its inputs. Each case runs on every device of this host,
and its output bits are compared with the right bits or, if these are unknown, with those of the other runs.
Exit codes: 0 every run produced the right bits, 1 some runs did not, 2 wrong arguments, 3 no comparison was possible.
Exit code 1 always results from a comparison; an error of this program, of JAX or of the bundle yields exit code 3.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (others run this file; by default, Python would exit with 1)
    print("Python 3.11 or newer is needed; see requirements.txt")
    sys.exit(3)
try:
    import argparse
    import contextlib
    import hashlib
    import io
    import json
    import os
    import time
    from pathlib import Path
    from typing import Any

    import numpy as np
except (Exception, SystemExit) as error:
    print(f"a module cannot be imported ({type(error).__name__}: {error}); install the packages in requirements.txt")
    sys.exit(3)

FLAGS = ("XLA_FLAGS", "NPROC", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64", "JAX_DEFAULT_PRNG_IMPL")
SHOWN = 8  # maximum number of differing elements printed for each output


def main(arguments: list[str], folder: Path) -> int:
    parser = argparse.ArgumentParser(description="Reruns the cases of a bundle; see the top of this file.")
    parser.add_argument("case", nargs="*", help="names of cases (default: all)")
    parser.add_argument("--runs", type=int, default=10, help="number of runs on each device")
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return reproduce(options.case, options.runs, folder)
    except (Exception, SystemExit) as error:
        with contextlib.suppress(OSError):  # nobody reads the output
            print(f"no comparison was possible ({type(error).__name__}: {error})")
        return 3


def reproduce(names: list[str], runs: int, folder: Path) -> int:
    """Checks the bundle, reruns its cases (by default all), and returns the exit code."""
    try:
        manifest = json.loads(content(folder / "manifest.json"))
        checksum = manifest.pop("seal")
        damaged = [] if seal(manifest) == checksum else ["manifest.json"]
        damaged += [
            name
            for name, checksum in manifest["files"].items()
            if hashlib.sha256(content(folder / name)).hexdigest() != checksum
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        damaged = [f"manifest.json or one of its files ({type(error).__name__}: {error})"]
    if damaged:
        print(f"{damaged[0]} is damaged: its checksum does not match; unpack the bundle again")
        return 3
    cases = manifest["cases"]
    unknown = set(names) - {case["name"] for case in cases}
    if unknown or runs < 1:
        print(f"no such case: {', '.join(sorted(unknown))}" if unknown else "--runs: expected at least 1")
        return 3
    if manifest["devices"] < 1 or any(case["program"] is not None and case["outputs"] < 1 for case in cases):
        print("manifest.json lists no device, or a program without outputs: there is nothing to compare")
        return 3
    # Environment variables determine which bits are right; they must be set before JAX starts.
    os.environ.update({name: manifest["variables"][name] for name in FLAGS if manifest["variables"].get(name)})
    if manifest["platform"] == "cpu":
        os.environ.update({"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(manifest["devices"])})
    import importlib.metadata  # which Python 3.7 lacks

    import jax

    for name, here, there in (
        ("jax", jax.__version__, manifest["versions"]["jax"]),
        ("jaxlib", importlib.metadata.version("jaxlib"), manifest["versions"]["jaxlib"]),
        ("device", jax.local_devices()[0].device_kind, manifest["kind"]),
    ):
        if here != there:
            print(f"{name} is {here} on this host, but was {there} in the burn-in: the right bits may differ")
    if manifest["simulated"]:
        print("SIMULATION: the fault was simulated; this hardware should produce the right bits")
    codes = []
    for case in cases:
        if names and case["name"] not in names:
            continue
        try:
            codes.append(run_case(case, manifest, folder, runs))
        except Exception as error:  # other cases may still be compared
            print(f"  cannot run on this host ({type(error).__name__}: {error})")
            codes.append(3)
    if manifest["simulated"]:
        print("SIMULATION: this result says nothing about the hardware, which should produce the right bits")
    return 1 if 1 in codes else max(codes, default=3)


def content(path: Path) -> bytes:
    if not path.is_file():  # reading a pipe would never end
        raise OSError(f"{path.name} is not a file")
    return path.read_bytes()


def seal(manifest: dict[str, Any]) -> str:
    """Returns the SHA-256 of a manifest without its seal, in hexadecimal."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def run_case(case: dict[str, Any], manifest: dict[str, Any], folder: Path, runs: int) -> int:
    import jax
    from jax import export

    print(f"{case['name']}: {case['sentence']}")
    if case["program"] is None:
        print(f"  not reproducible from this bundle: {case['missing']}")
        return 3
    devices = jax.local_devices()[: manifest["devices"]]
    program = export.deserialize(bytearray((folder / case["program"]).read_bytes()))
    if export.default_export_platform() not in program.platforms:
        print(f"  compiled for {', '.join(program.platforms)}, but this host has {export.default_export_platform()}")
        return 3
    if case["multi"] and len(devices) < manifest["devices"]:
        print(f"  needs {manifest['devices']} devices, but this host has {len(devices)}")
        return 3
    inputs = load(folder / case["inputs"], case["types"])
    results: dict[int, list[str]] = {}
    right = {index: case["right"].get(str(index), case["right"].get("all")) for index in range(len(devices))}
    wrong: Any = None
    for place in [None] if case["multi"] else devices:
        call = jax.jit(program.call)
        arguments = _placed(inputs, place, devices)
        for _ in range(runs):
            for index, outputs in _outputs(call, arguments, inputs, place, devices, case):
                checksum = sum_of(outputs)
                results.setdefault(index, []).append(checksum)
                if wrong is None and right[index] not in (None, checksum):
                    wrong = outputs
    bad = 0
    for index, sums in results.items():
        known = right[index]
        differing = sum(each != known for each in sums) if known else len(sums) - max(map(sums.count, sums))
        bad += differing
        print(f"  device {index}: {differing} of {len(sums)} runs {'wrong' if known else 'differ from most'}")
    if not all(right[index] for index in results):
        distinct = {each for index, sums in results.items() if not right[index] for each in sums}
        print(f"  the right bits are unknown; the runs gave {len(distinct)} different outputs")
        return 1 if wrong is not None or (len(distinct) > 1 and not case["multi"]) else 3
    if wrong is not None and case["expected"] is not None:
        show(load(folder / case["expected"], case["expected_types"]), wrong)
    return 1 if bad else 0


def _placed(inputs: list[Any], place: Any, devices: list[Any]) -> Any:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    if place is None:
        place = NamedSharding(Mesh(np.asarray(devices), ("device",)), PartitionSpec("device"))
    return [jax.device_put(each, place) for each in inputs]


def _outputs(call: Any, arguments: Any, inputs: list[Any], place: Any, devices: list[Any], case: dict[str, Any]) -> Any:
    """Runs a case and returns the outputs of each device; data take the same path as in the burn-in."""
    import jax

    if case["way"] == "host-device-host":
        arguments = _placed(inputs, place, devices)
    out = jax.block_until_ready(call(*arguments)[: case["outputs"]])
    if case["way"] == "device-device":
        for other in devices:
            if other != place:
                out = jax.device_put(jax.device_put(out, other), place)
    time.sleep(case["wait"])
    if place is not None:
        return [(devices.index(place), [np.asarray(x) for x in out])]
    return [
        (index, [np.asarray(next(s.data for s in x.addressable_shards if s.device == device)) for x in out])
        for index, device in enumerate(devices)
    ]


def show(expected: list[Any], found: list[Any]) -> None:
    for number, (right, got) in enumerate(zip(expected, found, strict=True)):
        width = right.dtype.itemsize
        old, new = (np.ascontiguousarray(x).reshape(-1).view(f"u{width}") for x in (right, got))
        places = np.flatnonzero(old != new)
        for at in places[:SHOWN]:
            value, other = right.reshape(-1)[at], got.reshape(-1)[at]
            print(f"    output {number}[{at}]: {old[at]:0{2 * width}x} -> {new[at]:0{2 * width}x}  {value} -> {other}")
        if places.size:
            print(f"    output {number}: {places.size} of {old.size} elements differ")


def load(path: Path, types: list[str]) -> list[Any]:
    """Loads arrays from a file that stores types unknown to NumPy as integers of the same width."""
    import jax.numpy as jnp

    with np.load(path) as arrays:
        return [arrays[f"a{number}"].view(jnp.dtype(name)) for number, name in enumerate(types)]


def sum_of(arrays: list[Any]) -> str:
    """Returns the SHA-256 of the concatenated bytes of arrays, in hexadecimal."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent))
