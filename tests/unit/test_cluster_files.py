"""The files for slurm and Kubernetes: their syntax, what each kind has to have, and that names fit together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

_ROOT = Path(__file__).parents[2]
_CLUSTER = _ROOT / "docs" / "examples" / "cluster"
_SETTINGS = (_ROOT / "docs" / "settings.md").read_text()

_API_VERSIONS = {
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "Service": "v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
}


def _documents() -> list[dict[str, Any]]:
    return [document for path in sorted(_CLUSTER.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())]


def _of_kind(kind: str) -> list[dict[str, Any]]:
    found = [document for document in _documents() if document["kind"] == kind]
    assert found
    return found


def _pod_specs() -> Iterator[dict[str, Any]]:
    for document in _of_kind("Deployment") + _of_kind("StatefulSet"):
        yield document["spec"]["template"]["spec"]
    for document in _of_kind("JobSet"):
        for job in document["spec"]["replicatedJobs"]:
            yield job["template"]["spec"]["template"]["spec"]


def _environment(container: dict[str, Any]) -> dict[str, Any]:
    return {variable["name"]: variable for variable in container.get("env", [])}


def test_each_document_says_what_it_is() -> None:
    for document in _documents():
        assert document["apiVersion"] == _API_VERSIONS[document["kind"]]
        assert re.fullmatch(r"[a-z0-9-]{1,63}", document["metadata"]["name"])
        assert document["spec"]
    names = [(document["kind"], document["metadata"]["name"]) for document in _documents()]
    assert len(names) == len(set(names))


def test_selectors_find_the_pods_that_are_made() -> None:
    labels = []
    for document in _of_kind("Deployment") + _of_kind("StatefulSet"):
        made = document["spec"]["template"]["metadata"]["labels"]
        assert document["spec"]["selector"]["matchLabels"].items() <= made.items()
        labels.append(made)
    for service in _of_kind("Service"):
        assert any(service["spec"]["selector"].items() <= made.items() for made in labels)


def test_services_lead_to_ports_that_pods_open() -> None:
    ports = {port["name"] for spec in _pod_specs() for each in spec["containers"] for port in each.get("ports", [])}
    for service in _of_kind("Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for stateful_set in _of_kind("StatefulSet"):
        headless = [
            each for each in _of_kind("Service") if each["metadata"]["name"] == stateful_set["spec"]["serviceName"]
        ]
        assert [each["spec"]["clusterIP"] for each in headless] == ["None"]


def test_volumes_are_there_and_the_token_is_no_one_elses() -> None:
    for spec in _pod_specs():
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        for container in spec["containers"]:
            mounted = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", [])}
            assert mounted.keys() <= volumes.keys()
            if token := _environment(container).get("FT_TRANSPORT_TOKEN_FILE"):
                assert token["value"].startswith(mounted["token"])
                assert volumes["token"]["secret"]["defaultMode"] == 0o400


def test_trainers_find_the_lighthouse_and_know_only_variables_that_are_documented() -> None:
    [lighthouse] = [each for each in _of_kind("Service") if each["metadata"]["name"] == "ft-lighthouse"]
    address = f"http://ft-lighthouse:{lighthouse['spec']['ports'][0]['port']}"
    trainers = [each for spec in _pod_specs() for each in spec["containers"] if each["name"] == "trainer"]
    assert len(trainers) == 2
    for trainer in trainers:
        environment = _environment(trainer)
        assert environment["TORCHFT_LIGHTHOUSE"]["value"] == address
        ours = {name for name in environment if name.startswith(("FT_TRANSPORT_", "TORCHFT_"))}
        assert [name for name in ours if f"`{name}`" not in _SETTINGS] == []


def test_the_lighthouse_is_told_options_that_it_has(tmp_path: Path) -> None:
    extension = pytest.importorskip("torchft._torchft").__file__
    # What the program `torchft_lighthouse` calls, without the rest of torchft, whose import takes seconds.
    (tmp_path / "lighthouse.py").write_text(
        "from importlib import util\n"
        f"spec = util.spec_from_file_location('torchft._torchft', {extension!r})\n"
        "extension = util.module_from_spec(spec)\n"
        "spec.loader.exec_module(extension)\n"
        "extension.lighthouse_main()\n"
    )
    command = [sys.executable, str(tmp_path / "lighthouse.py"), "--help"]
    offered = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout

    [deployment] = _of_kind("Deployment")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    for option in ("--bind", "--min_replicas", "--join_timeout_ms", "--heartbeat_timeout_ms"):
        assert re.search(rf"{option}\b", offered)
        assert option in container["command"] + container["args"]
        assert option in (_CLUSTER / "slurm.sbatch").read_text()


def test_a_job_set_is_one_replica_with_a_store_on_its_first_pod() -> None:
    [job_set] = _of_kind("JobSet")
    [job] = job_set["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]

    script = container["command"][-1]

    assert f"--nnodes {job['template']['spec']['parallelism']} " in script
    assert f'--master-addr "$REPLICA-{job["name"]}-0-0.$REPLICA"' in script  # set, job, its number, its first pod
    assert "jobset-name" in str(_environment(container)["REPLICA"]["valueFrom"])
    assert job["template"]["spec"]["completionMode"] == "Indexed"
    assert job["replicas"] == 1


def _scripts() -> list[str]:
    [job_set] = _of_kind("JobSet")
    [job] = job_set["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    return [(_CLUSTER / "slurm.sbatch").read_text(), "#!/usr/bin/env bash\n" + container["command"][-1]]


@pytest.mark.parametrize("index", [0, 1], ids=["slurm", "jobset"])
def test_scripts_are_valid(index: int) -> None:
    script = _scripts()[index]

    subprocess.run(["bash", "-n"], input=script, text=True, timeout=30, check=True)

    if (checker := shutil.which("shellcheck")) is not None:
        checked = subprocess.run([checker, "-"], input=script, text=True, timeout=60, check=False, capture_output=True)
        assert checked.returncode == 0, checked.stdout


def _program(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (directory / name).chmod(0o755)


def test_the_job_for_slurm_starts_a_replica_on_each_node_and_ends_the_lighthouse(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    _program(programs, "scontrol", "printf 'node-a\\nnode-b\\n'")
    # It has no nodes: what follows its options runs here.
    _program(programs, "srun", 'while [[ $1 == --* ]]; do shift; done\nexec "$@"')
    _program(programs, "torchft_lighthouse", f'echo "$@" >{tmp_path}/lighthouse; exec sleep 60')
    report = 'echo "$REPLICA $TORCHFT_LIGHTHOUSE $(wc -c <"$FT_TRANSPORT_TOKEN_FILE") $FT_TRANSPORT_ADVERTISE $*"'
    waited = f"until [[ -e {tmp_path}/lighthouse ]]; do sleep 0.05; done"
    _program(programs, "torchrun", f"{waited}\n{report} >>{tmp_path}/started-$REPLICA")
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_GPUS_ON_NODE": "2",
        "FAST_INTERFACE": "eth1",
    }

    subprocess.run(["bash", str(_CLUSTER / "slurm.sbatch"), "train.py", "--x"], env=environment, timeout=60, check=True)

    for index in (0, 1):
        started = (tmp_path / f"started-{index}").read_text()
        assert started == f"{index} http://node-a:29510 65 eth1 --nnodes 1 --nproc-per-node 2 train.py --x\n"
    assert (tmp_path / "7" / "job-token").stat().st_mode & 0o777 == 0o600
    assert "--min_replicas 1" in (tmp_path / "lighthouse").read_text()


def test_slurms_options_come_before_the_first_command() -> None:
    lines = (_CLUSTER / "slurm.sbatch").read_text().splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))

    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]

    assert options
    assert max(options) < first_command  # sbatch reads none after it
