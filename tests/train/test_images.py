"""Images: what is parsed and refused, where Fashion-MNIST is looked for, and the order of batches."""

import gzip
import hashlib
import itertools
import json
import os
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sdc.settings import SettingError
from sdc.train.iterative import archives, images as images_module
from sdc.train.iterative.images import FILES, INSTALLED, PACKAGE, Images, ImagesError, image_batches, read_images

RNG = np.random.default_rng(0)
TRAIN, TEST = RNG.integers(0, 256, (7, 4, 8), dtype=np.uint8), RNG.integers(0, 256, (3, 4, 8), dtype=np.uint8)
TRAIN[0, 0, :2] = 0, 255
ARRAYS = (TRAIN, np.array([0, 1, 2, 3, 2, 1, 0], np.uint8), TEST, np.array([4, 0, 1], np.uint8))


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


CONTENTS = dict(zip(FILES, map(idx, ARRAYS), strict=True))


def write(folder: Path, contents: dict[str, bytes], packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)
    return folder


def message(source: str | Path) -> str:
    """The message of the error that reading raises; every one names the setting, has a remedy and is one line."""
    with pytest.raises(ImagesError) as caught:
        read_images(source)
    text = str(caught.value)
    assert text.startswith("images=")
    assert "; " in text
    assert "\n" not in text
    return text


def numbered(count: int) -> Images:
    """Images whose only pixel is their number, as is their label."""
    numbers = np.arange(count)
    pixels = numbers.astype(np.float32).reshape(-1, 1, 1, 1)
    return Images(pixels, numbers.astype(np.int32), pixels, numbers.astype(np.int32), count, "numbered", "")


@pytest.mark.parametrize("packed", [False, True])
def test_folder_of_idx_files(tmp_path: Path, packed: bool) -> None:
    images = read_images(str(write(tmp_path, CONTENTS, packed)))
    np.testing.assert_array_equal(images.train_images, TRAIN.astype(np.float32)[..., None] / np.float32(255))
    np.testing.assert_array_equal(images.test_images, TEST.astype(np.float32)[..., None] / np.float32(255))
    np.testing.assert_array_equal(images.train_labels, ARRAYS[1])
    np.testing.assert_array_equal(images.test_labels, ARRAYS[3])
    assert (images.train_images.min(), images.train_images.max()) == (0, 1)
    assert (images.shape, images.classes, images.source) == ((4, 8, 1), 5, str(tmp_path))
    for array in (images.train_images, images.train_labels, images.test_images, images.test_labels):
        assert array.dtype == (np.float32 if array.ndim == 4 else np.int32)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    # Fixed: a digest that changed between versions of this package or of NumPy would make replicas incomparable.
    assert images.digest == "272bcdc30f4f988bd2821867b6c15ceb872014d91b23ad62cbaf1f16a920ebf7"


def test_digest_sees_every_array_and_its_shape(tmp_path: Path) -> None:
    variants: list[tuple[np.ndarray, ...]] = [ARRAYS]
    for index, array in enumerate(ARRAYS):
        changed = array.copy()
        changed.flat[-1] ^= 1
        variants.append((*ARRAYS[:index], changed, *ARRAYS[index + 1 :]))
    variants.append((TRAIN.reshape(7, 8, 4), ARRAYS[1], TEST.reshape(3, 8, 4), ARRAYS[3]))
    digests = set()
    for number, arrays in enumerate(variants):
        folder = write(tmp_path / str(number), dict(zip(FILES, map(idx, arrays), strict=True)))
        digests.add(read_images(folder).digest)
    assert len(digests) == len(variants)


@pytest.mark.parametrize(
    ("file", "data", "expected"),
    [
        (0, idx(TRAIN)[:-1], f"has {16 + TRAIN.size - 1} bytes, expected {16 + TRAIN.size} for shape (7, 4, 8)"),
        (0, idx(TRAIN) + b"\0", f"has {16 + TRAIN.size + 1} bytes, expected {16 + TRAIN.size}"),
        (0, b"", "begins with 0x, expected 0x00000803"),
        (2, b"\0\0\x08\x03\0\0\0", "begins with 0x00000803"),
        (2, idx(TEST.reshape(-1)), "begins with 0x00000801, expected 0x00000803"),
        (1, b"\0\0\x0d" + idx(ARRAYS[1])[3:], "begins with 0x00000d01, expected 0x00000801"),
        (0, struct.pack(">I3I", 0x803, *[2**32 - 1] * 3), f"expected {16 + (2**32 - 1) ** 3} for"),
        (0, struct.pack(">I3I", 0x803, 0, 4, 8), "at least one value"),
        (1, idx(ARRAYS[1][:-1]), "train has 7 images but 6 labels"),
        (3, idx(ARRAYS[1]), "t10k has 3 images but 7 labels"),
        (2, idx(TEST.reshape(3, 8, 4)), "training images of (4, 8) but test images of (8, 4)"),
    ],
)
def test_bad_idx_file_is_named(tmp_path: Path, file: int, data: bytes, expected: str) -> None:
    text = message(write(tmp_path, {**CONTENTS, FILES[file]: data}))
    assert expected in text
    assert str(tmp_path) in text
    assert FILES[file] in text or "files of one data set" in text


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:10] + b"\xff" * 20, lambda _: b"zip"])
def test_damaged_gzip_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = write(tmp_path, CONTENTS, packed=True) / f"{FILES[2]}.gz"
    path.write_bytes(damage(path.read_bytes()))
    assert message(tmp_path).startswith(f"images={path}: is a damaged gzip file")


def test_missing_folder_and_file_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = message(tmp_path / "mnist")
    assert text.startswith(f"images={tmp_path / 'mnist'}: is not a folder; expected digits, fashion-mnist, auto or")
    write(tmp_path / "digits", CONTENTS)
    (tmp_path / "digits" / FILES[3]).unlink()
    monkeypatch.chdir(tmp_path)
    assert f"digits: has no {FILES[3]} or {FILES[3]}.gz" in message(Path("digits"))  # a folder of that name
    (tmp_path / "digits" / FILES[3]).mkdir()
    assert "is a folder; give one of the files" in message("./digits")
    (tmp_path / "digits" / FILES[3]).rmdir()
    os.mkfifo(tmp_path / "digits" / FILES[3])
    assert "is a pipe, not a file" in message("./digits")


def test_a_small_file_may_not_unpack_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "LARGEST", 1 << 20)
    path = write(tmp_path, CONTENTS, packed=True) / f"{FILES[0]}.gz"
    path.write_bytes(gzip.compress(bytes(3 << 20)))
    assert message(tmp_path).startswith(f"images={path}: unpacks to more than 1,048,576 bytes")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where the Debian package and the cache would have Fashion-MNIST, whose contents are those of the files above."""
    monkeypatch.setattr(images_module, "INSTALLED", tmp_path / "installed")
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in CONTENTS.items()}
    monkeypatch.setattr(images_module, "_SHA256", digests)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "installed", tmp_path / "cache" / "jax-sdc" / "fashion-mnist"


@pytest.fixture
def fake_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """scikit-learn's digits without scikit-learn: image i has pixels i % 17."""

    def load_digits(return_X_y: bool) -> tuple[np.ndarray, np.ndarray]:
        assert return_X_y
        return np.arange(1797)[:, None] % 17 * np.ones(64), np.arange(1797) % 10

    datasets = types.ModuleType("sklearn.datasets")
    datasets.load_digits = load_digits  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sklearn", types.ModuleType("sklearn"))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", datasets)


@pytest.mark.parametrize("source", ["fashion-mnist", "auto"])
def test_installed_files_are_used_before_the_cache(places: tuple[Path, Path], source: str) -> None:
    installed, cache = places
    write(cache, CONTENTS)
    cached = read_images(source)
    assert cached.source == "Fashion-MNIST (Debian package dataset-fashion-mnist, cached)"
    write(installed, CONTENTS, packed=True)
    found = read_images(source)
    assert found.source == "Fashion-MNIST (Debian package dataset-fashion-mnist, installed)"
    assert found.digest == cached.digest == read_images(installed).digest
    # Files with other contents are passed over, although they can be read.
    write(installed, {**CONTENTS, FILES[1]: idx(ARRAYS[1][::-1].copy() + np.uint8(1))}, packed=True)
    assert read_images(source).source.endswith("cached)")


def test_fashion_mnist_that_is_not_at_hand(places: tuple[Path, Path], fake_digits: None) -> None:
    installed, cache = places
    write(installed, {**CONTENTS, FILES[3]: idx(np.array([0, 0, 0], np.uint8))}, packed=True)
    text = message("fashion-mnist")
    assert text.startswith(f"images=fashion-mnist: is not installed ({FILES[3]}: has SHA-256 ")
    assert f"expected {hashlib.sha256(CONTENTS[FILES[3]]).hexdigest()}), not cached ({cache}: has no " in text
    assert text.endswith(f"install the Debian package {PACKAGE}, give a folder of its files, or use digits")
    # The run record says why there are digits.
    digits = read_images("auto")
    assert digits.source.startswith(
        f"scikit-learn digits, because fashion-mnist is not installed ({FILES[3]}: has SHA-256 "
    )
    assert digits.digest == read_images("digits").digest


def test_where_the_cache_is(places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert f"not cached ({tmp_path / 'home' / '.cache' / 'jax-sdc' / 'fashion-mnist'}: " in message("fashion-mnist")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert "there is no home folder for a cache)" in message("fashion-mnist")


@pytest.mark.skipif(not INSTALLED.is_dir(), reason="Debian's Fashion-MNIST is not installed")
def test_real_fashion_mnist() -> None:
    images = read_images("fashion-mnist")
    assert images.digest == "dc6b49c2ab7fa36ecc779ffa866be4a30396faec7ae31840deb4ee00f67b41de"
    assert (images.train_images.shape, len(images.test_labels), images.classes) == ((60_000, 28, 28, 1), 10_000, 10)


def test_split_of_the_digits(fake_digits: None) -> None:
    images = read_images("digits")
    assert (len(images.train_labels), len(images.test_labels)) == (1437, 360)
    pairs = []
    for pixels, labels in ((images.train_images, images.train_labels), (images.test_images, images.test_labels)):
        assert pixels.shape[1:] == images.shape == (8, 8, 1)
        np.testing.assert_array_equal(pixels, np.broadcast_to(pixels[:, :1, :1], pixels.shape))
        pairs += list(zip((pixels[:, 0, 0, 0] * 16).tolist(), labels.tolist(), strict=True))
    assert sorted(pairs) == sorted((number % 17, number % 10) for number in range(1797))
    # Shuffled: all digits in the test set, and not as they came.
    assert min(np.bincount(images.test_labels)) > 20
    assert images.test_labels[:10].tolist() != list(range(10))


def test_real_digits() -> None:
    images = read_images()
    assert (images.classes, images.source) == (10, "scikit-learn digits")
    assert (images.train_images.min(), images.train_images.max()) == (0, 1)
    assert images.digest == "a4985adf822bf298845ecf90dd67768d489c8ca1044fe657b6625a8845ef8318"


def test_missing_scikit_learn_names_the_extra(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    for source in ("digits", "auto"):
        assert "pip install 'jax-sdc[study]'" in message(source)


def test_batches_are_images_with_their_labels(tmp_path: Path) -> None:
    images = read_images(write(tmp_path, CONTENTS))
    label_of = {pixels.tobytes(): label for pixels, label in zip(images.train_images, images.train_labels, strict=True)}
    iterator = image_batches(images, batch_size=3, seed=0)
    for _ in range(10):
        pixels, labels = next(iterator)
        assert (pixels.shape, pixels.dtype, labels.shape, labels.dtype) == ((3, 4, 8, 1), np.float32, (3,), np.int32)
        assert [label_of[image.tobytes()] for image in pixels] == labels.tolist()


@settings(max_examples=50)
@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 2**64 - 1))
def test_every_epoch_has_every_image_once(batch_size: int, extra: int, seed: int) -> None:
    count = batch_size + extra
    iterator = image_batches(numbered(count), batch_size=batch_size, seed=seed)
    stream = list(itertools.chain.from_iterable(next(iterator)[1].tolist() for _ in range(3 * count)))
    for epoch in range(3 * batch_size):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = set()
    for seed in range(5):
        iterator = image_batches(numbered(20), batch_size=20, seed=seed)
        orders |= {tuple(next(iterator)[1].tolist()) for _ in range(5)}
    assert len(orders) == 25


def test_order_is_that_of_every_host() -> None:
    iterator = image_batches(numbered(6), batch_size=6, seed=7)
    assert [next(iterator)[1].tolist() for _ in range(2)] == [[4, 1, 3, 2, 5, 0], [3, 1, 2, 5, 4, 0]]


@settings(max_examples=50)
@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 10))
def test_resumed_batches_are_the_uninterrupted_ones(saved: int, moved: int, further: int) -> None:
    uninterrupted = image_batches(numbered(17), batch_size=5, seed=3)
    for _ in range(saved):
        next(uninterrupted)
    state = json.loads(json.dumps(uninterrupted.get_state()))
    resumed = image_batches(numbered(17), batch_size=5, seed=3)
    for _ in range(moved):  # wherever the other iterator stands
        next(resumed)
    resumed.set_state(state)
    assert resumed.get_state() == state
    for _ in range(further):
        for left, right in zip(next(resumed), next(uninterrupted), strict=True):
            np.testing.assert_array_equal(left, right)


def test_a_batch_belongs_to_its_caller() -> None:
    images = numbered(3)
    pixels, labels = next(image_batches(images, batch_size=3, seed=0))
    pixels[...], labels[...] = -1, -1
    assert images.train_images.min() == images.train_labels.min() == 0


def test_batch_larger_than_the_set_and_bad_seeds() -> None:
    with pytest.raises(ImagesError, match="images=numbered: has 3 training images, but a batch needs 4; use smaller"):
        image_batches(numbered(3), batch_size=4, seed=0)
    next(image_batches(numbered(3), batch_size=3, seed=2**64 - 1))
    for seed in (-1, 2**64):
        with pytest.raises(SettingError, match=f"seed={seed}: expected a whole number from 0 to"):
            image_batches(numbered(3), batch_size=3, seed=seed)


def test_batches_start_no_thread() -> None:
    before = threading.active_count()
    iterator = image_batches(numbered(8), batch_size=3, seed=0)
    for _ in range(20):
        next(iterator)
    assert threading.active_count() == before


def test_reading_images_starts_no_backend(tmp_path: Path) -> None:
    """What makes a backend deterministic is set later, before it starts."""
    program = (
        "import sys, jax\n"
        "from sdc.train.iterative.images import image_batches, read_images\n"
        f"next(image_batches(read_images({str(write(tmp_path, CONTENTS))!r}), batch_size=2, seed=0))\n"
        "assert 'sklearn' not in sys.modules\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # an error once a backend has started\n"
        "assert jax.device_count() == 3\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
