"""What the tests of the Hub share: a hub on this machine, its client with and without it, concept files; each made once."""

import pytest

import tiny_engram
from tests.pipelines.fake_hub import FakeHub
from tests.pipelines.hub_client import LOAD, HubClient


@pytest.fixture(scope="session")
def hub_server():
    with FakeHub() as hub:
        yield hub


@pytest.fixture(scope="session")
def hub_home(tmp_path_factory):
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="session")
def hub_clients(hub_server, hub_home):
    """Two processes, one with the Hub and one without; they start side by side."""
    both = HubClient(hub_server.endpoint, hub_home), HubClient(hub_server.endpoint, hub_home, HF_HUB_OFFLINE="1")
    yield both
    for client in both:
        client.end()
    for client in both:
        client.close()


@pytest.fixture(scope="session")
def online(hub_clients):
    return hub_clients[0]


@pytest.fixture(scope="session")
def offline(hub_clients):
    return hub_clients[1]


@pytest.fixture
def hub(hub_server):
    hub_server.repos.clear()
    hub_server.requests.clear()
    hub_server.lying.clear()
    hub_server.large.clear()
    hub_server.failing = ""
    hub_server.tokens.update({"t-ann": "ann", "t-bob": "bob"})
    return hub_server


@pytest.fixture(scope="session")
def concept_blobs(hub_clients, tiny, tmp_path_factory):
    """Trigger -> bytes of a concept file."""
    pipe = tiny.build()
    adapter = tiny_engram.attach(pipe)
    folder = tmp_path_factory.mktemp("concepts")
    made = {}
    for seed, trigger in enumerate(("zqx", "zqy", "zqz")):
        concept = tiny.concept(adapter, trigger, seed=seed).with_details(base="tiny-sd", recipe={"step": 7, "pictures": 5})
        made[trigger] = concept.save(folder / f"{trigger}.safetensors").read_bytes()
    adapter.detach()
    return made


@pytest.fixture
def load(online):
    return lambda source, **options: online(LOAD, source=source, options=options)
