import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.personalization.crops import crop_sprites
from benchmarks.personalization.features import CHANNELS, SqueezeNet, lpips, lpips_vectors, smooth
from benchmarks.personalization.make_squeezenet import ArrayUnpickler, arrays, state_of
from benchmarks.personalization.subjects import load_subjects


@pytest.fixture(scope="module")
def network() -> SqueezeNet:
    return SqueezeNet.load()


@pytest.fixture(scope="module")
def owl_and_robot() -> tuple[torch.Tensor, torch.Tensor]:
    """Crops of two subjects, three styles each, `[3, 3, 128, 128]`."""
    found = {subject.name: torch.tensor(subject.sprites).permute(0, 3, 1, 2).float() / 255 for subject in load_subjects("final")}
    plain = torch.tensor((0.3, 0.7, 0.9))
    return crop_sprites(found["owl"], plain, 96.0), crop_sprites(found["robot"], plain, 96.0)


def test_the_network_is_the_published_one(network):
    # 1,235,496 values in SqueezeNet 1.1, of which 513,000 are its classifier's
    assert sum(parameter.numel() for parameter in network.parameters()) == 1_235_496 - 513_000
    maps = network(torch.rand(2, 3, 128, 128))
    assert [tuple(x.shape[1:]) for x in maps] == list(zip(CHANNELS, (63, 31, 15, 7, 7, 7, 7), (63, 31, 15, 7, 7, 7, 7), strict=True))
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_similarity_is_lpips_spelt_out(network):
    a, b = torch.rand(2, 1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    expected = 0.0
    for one, other in zip(network(a), network(b), strict=True):
        difference = F.normalize(one, dim=1, eps=1e-5) - F.normalize(other, dim=1, eps=1e-5)
        expected += difference.square().sum(1).mean().item() / 2 / 7
    assert 0.02 < expected < 0.98
    assert lpips(network, a, b).item() == pytest.approx(expected, abs=1e-4)


def test_a_picture_is_like_itself_and_likeness_is_mutual(network, owl_and_robot):
    owl, robot = owl_and_robot
    assert lpips(network, owl, owl).abs().max() < 1e-5
    assert torch.allclose(lpips(network, owl, robot), lpips(network, robot, owl), atol=1e-6)
    assert torch.allclose(lpips_vectors(network(owl)).norm(dim=1), torch.ones(3), atol=1e-5)


@pytest.mark.parametrize("kind", ["blur", "noise"])
def test_distance_grows_with_damage(network, owl_and_robot, kind):
    owl = owl_and_robot[0][:1]
    noise = torch.randn(owl.shape, generator=torch.Generator().manual_seed(1))
    levels = (1.0, 2.0, 4.0) if kind == "blur" else (0.02, 0.06, 0.2)
    damaged = [smooth(owl, level) if kind == "blur" else (owl + level * noise).clamp(0, 1) for level in levels]
    found = lpips(network, owl.expand(3, -1, -1, -1), torch.cat(damaged)).tolist()
    assert 0 < found[0] < found[1] < found[2]


def test_a_damaged_picture_stays_nearer_to_its_subject_than_to_another(network, owl_and_robot):
    owl, robot = owl_and_robot
    damaged = smooth(owl, 2.0).roll((2, -2), (2, 3))
    assert (lpips(network, owl, damaged) < lpips(network, robot, damaged)).all()


def test_smoothing_keeps_what_is_plain_and_takes_away_what_alternates():
    plain = torch.full((1, 3, 32, 32), 0.4)
    assert torch.allclose(smooth(plain), plain, atol=1e-6)
    chequered = ((torch.arange(32)[:, None] + torch.arange(32)) % 2).float().expand(1, 3, 32, 32)
    assert (smooth(chequered)[..., 4:-4, 4:-4] - 0.5).abs().max() < 0.01


def test_weights_are_turned_to_the_layout_of_torch():
    rng = np.random.default_rng(0)
    kernel, bias = rng.normal(size=(3, 3, 3, 64)).astype(np.float32), rng.normal(size=64).astype(np.float32)
    state = state_of({"conv1": [kernel, bias], "fire2/squeeze1x1": [kernel[:1, :1], bias], "conv10": [kernel, bias]})
    assert set(state) == {"conv1.weight", "conv1.bias", "fire2.squeeze1x1.weight", "fire2.squeeze1x1.bias"}
    patch = rng.normal(size=(3, 3, 3)).astype(np.float32)
    expected = np.einsum("hwi,hwio->o", patch, kernel) + bias
    found = F.conv2d(torch.from_numpy(patch).permute(2, 0, 1)[None], state["conv1.weight"].float(), state["conv1.bias"].float())
    assert np.allclose(found.flatten().numpy(), expected, atol=0.02)


def test_only_the_known_archive_is_read_and_only_arrays_from_it(tmp_path):
    forged = tmp_path / "forged.tar.gz"
    forged.write_bytes(b"not it")
    with pytest.raises(ValueError, match="forged.tar.gz has the sha256"):
        arrays(forged)
    with open(tmp_path / "call.pkl", "wb") as file:
        pickle.dump(print, file)
    with open(tmp_path / "call.pkl", "rb") as file, pytest.raises(pickle.UnpicklingError, match="builtins.print"):
        ArrayUnpickler(file).load()
    old = pickle.dumps({"a": np.arange(3.0)}, protocol=3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    (tmp_path / "old.pkl").write_bytes(old)
    with open(tmp_path / "old.pkl", "rb") as file:
        assert ArrayUnpickler(file).load()["a"].tolist() == [0.0, 1.0, 2.0]


def test_missing_weights_say_how_to_make_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="make_squeezenet"):
        SqueezeNet.load(tmp_path / "none.safetensors")
