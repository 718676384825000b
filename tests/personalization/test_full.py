"""Full fine-tuning against a copy of the denoiser that is trained the plain way."""

import torch

from benchmarks.personalization.draw import draw
from benchmarks.personalization.methods import METHODS, RATES
from benchmarks.personalization.teach import teach


def test_training_and_pictures_equal_those_of_a_trained_copy(base, taught, run, own_pipe, plain_batch):
    own = {name: weight.clone() for name, weight in base.denoiser.named_parameters()}
    adapters = METHODS["full"](base, [run("full", "disc", seed=3, factor=20)])
    rate = 20 * RATES["full"]
    losses = teach(base, adapters, [taught["disc"]], steps=2, batch_size=1)
    assert all(torch.equal(weight, own[name]) for name, weight in base.denoiser.named_parameters())

    unet = own_pipe.unet.requires_grad_(True)
    adam = torch.optim.AdamW(unet.parameters(), lr=rate, weight_decay=1e-2)
    for step in range(2):
        texts, loss_of = plain_batch(taught["disc"], 3, step, 1)
        ids, _ = base.tokenize(texts)
        loss = loss_of(unet, base.encode(ids))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        adam.step()
        torch.testing.assert_close(losses[0, step], loss.detach(), rtol=1e-4, atol=1e-6)
    shipped = adapters.values(0)
    moved = 0
    for name, weight in unet.named_parameters():
        mine = dict(adapters.named_parameters())[name.replace(".", "__")][0]
        # Adam's first steps are as long as the rate whatever the gradient, so noise in tiny gradients shows up to there
        assert (mine - weight).abs().max() <= 4 * rate
        assert (mine - weight).abs().mean() <= rate / 20
        assert torch.equal(shipped[name], mine.detach().half())
        moved += int((mine != own[name]).sum())
    assert shipped.keys() == dict(unet.named_parameters()).keys()
    assert moved > 0.9 * adapters.trainable() and adapters.payload(0) == 2 * adapters.trainable()

    rows = base.rows(["a {0} on red"], [("rugo-bin",)], torch.tensor([[0]]))
    generator = torch.Generator().manual_seed(4)
    image = own_pipe("a rugo-bin on red", num_inference_steps=2, guidance_scale=4.0, generator=generator, output_type="np").images[0]
    drawn = draw(base, adapters, rows, [4], steps=2)[0]
    assert abs(drawn / 255 - image).max() < 2 / 255
    assert abs(draw(base, None, rows, [4], steps=2)[0] / 255.0 - image).max() > 4 / 255
