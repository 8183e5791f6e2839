"""Placement of the processes of a run on several hosts, and the variables of their ranks."""

from contextlib import closing

import pytest

from buckeye.cli.dry_run import plan_table
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import ConfigError, UsageError
from buckeye.launch.plan import PlanNode, make_plan
from buckeye.launch.preflight.devices import Machine
from buckeye.launch.preflight.ports import Ports

WORDS = ("--trainer", "--orchestrator.env.0.id", "x", "--inference", "{}", "--inference-gpu-ids", "0,1")


OVER_NODES = (
    *("--cluster.nodes", "3", "--cluster.inference-nodes", "0,1"),
    *("--inference.backend", "vllm", "--inference.parallel.tp", "2", "--inference.parallel.pp", "2"),
)


def load(*words):
    return load_config(RLConfig, [*WORDS, "--trainer-gpu-ids", "2,3", *words])


def site(number, *, gpus=(0, 1, 2, 3), cores=8):
    return PlanNode(
        name=f"node {number} (h{number})",
        machine=Machine(cores=cores, gpus=gpus),
        choose_ports=lambda count: [30_000 + 100 * number + i for i in range(count)],
        address=f"10.0.0.{number + 1}",
        variables={"NCCL_SOCKET_IFNAME": f"eth{number}"},
    )


def plan(config, *other_nodes, gpus=(0, 1, 2, 3), address="127.0.0.1"):
    with closing(Ports()) as ports:
        machine = Machine(cores=8, gpus=gpus)
        return make_plan(
            config,
            machine,
            model_path=None,
            ports=ports,
            other_nodes=other_nodes or None,
            address=address if other_nodes else None,
        )


def test_plan_places_processes_on_every_node():
    config = load("--cluster.nodes", "2")
    found = plan(config, site(1))
    assert [(role.title, role.node, role.devices) for role in found.roles] == [
        ("inference 0", 0, (0,)),
        ("inference 1", 0, (1,)),
        ("inference 2", 1, (0,)),
        ("inference 3", 1, (1,)),
        ("orchestrator", 0, ()),
        ("trainer 0", 0, (2,)),
        ("trainer 1", 0, (3,)),
        ("trainer 2", 1, (2,)),
        ("trainer 3", 1, (3,)),
    ]
    assert found.base_urls[2:] == ["http://10.0.0.2:30100/v1", "http://10.0.0.2:30101/v1"]
    assert all(url.startswith("http://127.0.0.1:") for url in found.base_urls[:2])
    ranks = [role.env for role in found.of_kind("trainer")]
    assert [(env["RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) for env in ranks] == [
        (str(rank), "4", "2") for rank in range(4)
    ]
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in ranks}) == 1
    assert [env.get("NCCL_SOCKET_IFNAME") for env in ranks] == ["lo", "lo", "eth1", "eth1"]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in ranks] == ["2", "3", "2", "3"]
    assert config.trainer_ranks == 4


def test_plan_follows_trainer_and_inference_nodes():
    words = ("--cluster.nodes", "3", "--cluster.trainer-nodes", "1,2", "--cluster.inference-nodes", "0")
    found = plan(load(*words), site(1), site(2))
    assert [role.node for role in found.of_kind("inference")] == [0, 0]
    assert [role.node for role in found.of_kind("trainer")] == [1, 1, 2, 2]
    assert {role.env["MASTER_ADDR"] for role in found.of_kind("trainer")} == {"10.0.0.2"}
    assert {role.env["MASTER_PORT"] for role in found.of_kind("trainer")} == {"30100"}
    table = plan_table(found, load(*words).output_dir).splitlines()
    assert table[0].split()[:3] == ["process", "node", "devices"]
    assert table[-1].split()[:3] == ["trainer", "3", "2"]


def test_plan_serves_replica_on_two_nodes_from_the_first():
    words = (*OVER_NODES, "--cluster.trainer-nodes", "2", "--cluster.engine", "ray")
    found = plan(load(*words), site(1, gpus=()), site(2))
    (server,) = found.of_kind("inference")
    assert (server.node, server.devices) == (0, (0, 1))
    assert [role.node for role in found.of_kind("trainer")] == [2, 2]


@pytest.mark.parametrize(
    ("gpus", "at", "message"),
    [
        ((0, 1), "--trainer-gpu-ids", "no GPU 2, 3 on node 1 (h1); its GPUs: 0,1"),
        ((), "--inference-gpu-ids", "no GPU 0, 1 on node 1 (h1); its GPUs: none"),
    ],
)
def test_plan_refuses_missing_gpus_of_a_node(gpus, at, message):
    with pytest.raises(UsageError) as raised:
        plan(load("--cluster.nodes", "2"), site(1, gpus=gpus))
    error = raised.value
    assert (error.code, error.at, error.message) == ("BK-DEVICE", at, message)


@pytest.mark.parametrize(
    "words",
    [
        ("--cluster.nodes", "2", "--cluster.trainer-nodes", "2"),
        ("--cluster.nodes", "2", "--cluster.trainer-nodes", "1,1"),
        ("--cluster.nodes", "2", "--cluster.trainer-nodes", "0", "--cluster.inference-nodes", "0"),
        (*OVER_NODES[:4], *OVER_NODES[-2:], "--cluster.trainer-nodes", "2"),
        ("--inference.parallel.pp", "2", "--inference.backend", "vllm"),
        (*OVER_NODES, "--cluster.engine", "srun", "--cluster.trainer-nodes", "2"),
        (*OVER_NODES, "--cluster.trainer-nodes", "1,2"),
        ("--cluster.nodes", "3", "--trainer.model.tp", "4"),
        ("--cluster.engine", "ray"),
        ("--cluster.ray-address", "10.0.0.1:6379"),
    ],
    ids=["beyond", "twice", "idle", "torch", "one node", "srun", "of the trainer", "ranks", "ray", "address"],
)
def test_cluster_settings_that_exclude_each_other_are_refused(words, refusal):
    with refusal(ConfigError):
        load(*words)
