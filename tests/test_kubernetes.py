"""`tools/kubernetes/job.yaml`: its schema and equal values for repeated settings. These tests need
no cluster.
"""

from pathlib import Path

import pytest
import yaml

from parallel2d.base.config.composition import compose

FILE = Path(__file__).parent.parent / "tools" / "kubernetes" / "job.yaml"


@pytest.mark.extras("kubernetes_validate")
@pytest.mark.parametrize("version", ["1.31", "1.36"])
def test_kubernetes_job_follows_the_schema_and_the_configuration(version):
    import kubernetes_validate

    service, job = yaml.safe_load_all(FILE.read_text())
    for document in (service, job):
        kubernetes_validate.validate(document, version, strict=True)
    job, pod = job["spec"], job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert job["completions"] == job["parallelism"]
    (train,), volumes = pod["containers"], [volume["name"] for volume in pod["volumes"]]
    mounts = {mount["name"]: mount["mountPath"] for mount in train["volumeMounts"]}
    assert sorted(mounts) == sorted(volumes)
    python, dash_m, module, *words = train["command"]
    assert (python, dash_m, module) == ("python", "-m", "parallel2d.train")
    config = compose(words).config.launch
    assert max(config.node_range) == job["completions"]
    assert config.rdzv_endpoint.split(":")[0] in pod["initContainers"][0]["command"][2]
    assert config.secret_file.startswith(mounts["secret"])
    assert pod["terminationGracePeriodSeconds"] > config.grace_s
    (saved, *_) = job["podFailurePolicy"]["rules"]
    assert saved["action"] == "Ignore"
    assert saved["onExitCodes"]["values"] == [config.requeue_exit_code]
    assert saved["onExitCodes"]["containerName"] == train["name"]
