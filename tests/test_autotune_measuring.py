"""Measuring: what is timed, kept, written and resumed, with a device that answers from a table; and on a real one."""

import json
import shutil
from concurrent.futures import Future
from concurrent.futures import TimeoutError as OutOfTime

import pytest
import torch
import triton

from whiflash_triton.autotune import generate, launches, lookup, measure
from whiflash_triton.autotune.compile_report import CompileReport
from whiflash_triton.autotune.spaces import configurations

DEVICE = "nvidia_h200"


class SamePool:
    """Compiles at once, in this process."""

    def __init__(self, *_, **__):
        pass

    def submit(self, fn, *arguments) -> Future:
        future = Future()
        future.set_result(fn(*arguments))
        return future

    def shutdown(self, **_) -> None:
        pass


class Device:
    """An H200 on which fewer rows and more warps are faster, some launches spill and some configurations find no room."""

    def __init__(self):
        self.timed, self.without_room = [], []
        self.spilling = lambda launch: False

    def microseconds(self, sets, config, replays=5) -> float:
        if config in self.without_room:
            raise triton.runtime.errors.OutOfResources(600, 512, "tensor memory")
        self.timed.append((sets[0].name, config, replays))
        return 10.0 / config["num_warps"] + config.get("BLOCK_R", 0)

    def compile(self, launch, arch) -> CompileReport:
        assert arch == 90
        return CompileReport(arch, 64, 0, 8 * self.spilling(launch), 0)


@pytest.fixture
def device(tmp_path, monkeypatch) -> Device:
    shutil.copytree(lookup.CONFIGS / "default", tmp_path / "default")
    device = Device()
    monkeypatch.setattr(lookup, "CONFIGS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(lookup, "device_name", lambda index: DEVICE)
    monkeypatch.setattr(generate, "ProcessPoolExecutor", SamePool)
    monkeypatch.setattr(launches, "compile_launch", device.compile)
    monkeypatch.setattr(measure, "input_sets", lambda case, config: [case])
    monkeypatch.setattr(measure, "microseconds", device.microseconds)
    lookup.forget()
    yield device
    lookup.forget()


def file(tmp_path, kernel: str) -> dict:
    text = (tmp_path / DEVICE / f"{kernel}.json").read_text()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    return json.loads(text)


def test_the_fastest_is_written_and_picked(device, tmp_path, capsys):
    assert generate.main(["--kernels", "tree_walk,kv_injection"]) == 0
    walk, injection = file(tmp_path, "tree_walk"), file(tmp_path, "kv_injection")
    assert walk["entries"] == {"N=32": {"num_warps": 1}, "N=128": {"num_warps": 4}, "N=512": {"num_warps": 16}}
    assert injection["entries"]["D=64"] == {"BLOCK_R": 1, "num_warps": 4}  # 2.5 + 1
    assert walk["arch"] == 90 and walk["versions"]["triton"] == triton.__version__
    measured = injection["measured"]["D=64"]
    assert measured["microseconds"] == {f"smollm2-135m rows={rows}": 3.5 for rows in (6, 64, 1024)}
    assert set(measured["default_microseconds"].values()) == {18.0}  # 10 + 8, the shipped default
    assert (measured["timed"], measured["pruned"]) == (15, 0)
    assert lookup.pick("kv_injection", D=64) == {"BLOCK_R": 1, "num_warps": 4}  # no stale look-up
    assert f"5 of 5 buckets measured, in {tmp_path / DEVICE}" in capsys.readouterr().out


def test_every_survivor_is_timed_and_nothing_else(device, tmp_path):
    device.spilling = lambda launch: dict(launch.constexprs)["BLOCK_R"] == 1 and launch.num_warps == 4
    refused = {"BLOCK_R": 1, "num_warps": 4}
    device.without_room = [{"BLOCK_R": 1, "num_warps": 2}]
    assert generate.main(["--kernels", "kv_injection"]) == 0
    space = configurations("kv_injection", {"D": 64})
    once = [config for name, config, replays in device.timed if name == "smollm2-135m rows=6" and replays == 5]
    assert sorted(map(str, once)) == sorted(str(c) for c in space if c not in [refused, *device.without_room])
    content = file(tmp_path, "kv_injection")
    assert content["entries"]["D=64"] == {"BLOCK_R": 2, "num_warps": 4}
    assert (content["measured"]["D=64"]["timed"], content["measured"]["D=64"]["pruned"]) == (13, 2)
    again = [config for name, config, replays in device.timed if name == "smollm2-135m rows=6" and replays > 5]
    assert content["entries"]["D=64"] in again and len(again) == 4  # the three fastest and the default


def test_no_survivor_is_an_error(device, capsys):
    device.spilling = lambda launch: True
    assert generate.main(["--kernels", "tree_walk"]) == 2
    assert "tree_walk N=32: no configuration runs on this device" in capsys.readouterr().err


def test_an_interrupted_run_goes_on(device, tmp_path):
    real = device.microseconds

    def dies_in_the_second_bucket(sets, config, replays=5):
        if sets[0].sizes["nodes"] == 64:
            raise KeyboardInterrupt
        return real(sets, config, replays)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(measure, "microseconds", dies_in_the_second_bucket)
        with pytest.raises(KeyboardInterrupt):
            generate.main(["--kernels", "tree_walk"])
    content = file(tmp_path, "tree_walk")
    assert list(content["entries"]) == list(content["measured"]) == ["N=32"]
    assert not list(tmp_path.rglob("*.part"))
    device.timed.clear()
    assert generate.main(["--kernels", "tree_walk"]) == 0
    assert {case.split("=")[-1] for case, *_ in device.timed} == {"64", "256"}  # what was finished is not measured again
    assert list(file(tmp_path, "tree_walk")["entries"]) == ["N=128", "N=32", "N=512"]
    device.timed.clear()
    assert generate.main(["--kernels", "tree_walk"]) == 0 and not device.timed
    assert generate.main(["--kernels", "tree_walk", "--force"]) == 0 and device.timed


def test_minutes_end_between_buckets(device, tmp_path, monkeypatch, capsys):
    clock = iter(range(0, 10**6, 10))  # ten seconds go by from each look to the next
    monkeypatch.setattr(generate.time, "monotonic", lambda: next(clock))
    assert generate.main(["--kernels", "tree_walk", "--minutes", "1.5"]) == 0
    out = capsys.readouterr().out
    assert "1.5 minutes are over: the next run goes on with tree_walk N=128" in out and "1 of 3 buckets measured" in out
    assert list(file(tmp_path, "tree_walk")["entries"]) == ["N=32"]


def test_a_compilation_that_takes_too_long_ends_the_run(device, capsys, monkeypatch):
    def result(self, timeout=None):
        assert 0 < timeout <= 60
        raise OutOfTime

    monkeypatch.setattr(Future, "result", result)
    assert generate.main(["--kernels", "tree_walk", "--minutes", "1"]) == 0
    assert "0 of 3 buckets measured" in capsys.readouterr().out


def test_other_versions_are_not_mixed(device, tmp_path, capsys):
    assert generate.main(["--kernels", "tree_walk"]) == 0
    path = tmp_path / DEVICE / "tree_walk.json"
    content = json.loads(path.read_text())
    content["versions"]["triton"] = "0.1"
    path.write_text(json.dumps(content))
    assert generate.main(["--kernels", "tree_walk"]) == 2
    assert "'triton': '0.1'" in (error := capsys.readouterr().err) and "--force measures anew" in error
    assert generate.main(["--kernels", "tree_walk", "--force"]) == 0
    assert file(tmp_path, "tree_walk")["versions"]["triton"] == triton.__version__


def test_unknown_architectures_are_refused(device, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert generate.main([]) == 2
    assert "sm_89: tuning knows sm_80, sm_90, sm_100" in capsys.readouterr().err


def test_discrete_names_stay_discrete(device, tmp_path):
    wide = {"D": 256, "M": 16, "dtype": "bf16"}
    assert generate.main(["--kernels", "tree_attention", "--limit", "1"]) == 0
    assert file(tmp_path, "tree_attention")["discrete"] == ["D"]
    assert lookup.pick("tree_attention", **wide) == lookup.find("tree_attention", wide, "default")


def test_defaults_suit_every_architecture(device, tmp_path, monkeypatch, capsys):
    """What one architecture refuses is nobody's default."""

    def report(launch, arch):
        return CompileReport(arch, 64, 0, 4 if launch.num_warps in {80: (1,), 90: (2, 8), 100: (16,)}[arch] else 0, 0)

    monkeypatch.setattr(launches, "compile_launch", report)
    before = json.loads((tmp_path / "default/tree_walk.json").read_text())["entries"]
    with pytest.raises(SystemExit):
        generate.main(["--write-defaults", "--dry-run"])
    assert generate.main(["--write-defaults", "--kernels", "tree_walk"]) == 2  # N=32 has one configuration, refused on sm_80
    assert "every configuration is refused" in capsys.readouterr().err
    monkeypatch.setattr(generate, "find_buckets", lambda kernels, find=generate.find_buckets: find(kernels)[1:])
    assert generate.main(["--write-defaults", "--kernels", "tree_walk"]) == 0
    after = json.loads((tmp_path / "default/tree_walk.json").read_text())["entries"]
    assert after == before | {"N=128": {"num_warps": 4}, "N=512": {"num_warps": 4}}


@pytest.mark.gpu
def test_tuning_on_gpu(tmp_path, monkeypatch):
    """A whole run over two kernels into another folder: entries of this device, used from the next look-up on."""
    shutil.copytree(lookup.CONFIGS / "default", tmp_path / "default")
    monkeypatch.setattr(lookup, "CONFIGS", tmp_path)
    lookup.forget()
    assert generate.main(["--kernels", "tree_walk,block_sampling", "--limit", "2", "--jobs", "2"]) == 0
    name = lookup.device_name(0)
    for kernel in ("tree_walk", "block_sampling"):
        content = json.loads((tmp_path / name / f"{kernel}.json").read_text())
        assert content["entries"].keys() == content["measured"].keys() != set()
        assert all(us > 0 for entry in content["measured"].values() for us in entry["microseconds"].values())
    assert lookup.pick("tree_walk", N=32) == json.loads((tmp_path / name / "tree_walk.json").read_text())["entries"]["N=32"]
    lookup.forget()
