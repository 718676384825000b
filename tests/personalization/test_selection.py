"""How a learning rate is chosen, and the LoRA that the final table compares with."""

import pytest

from benchmarks.personalization.methods import METHODS
from benchmarks.personalization.plan import RATE_FACTORS
from benchmarks.personalization.selection import best_lora, choose, selection_score


def record(method, subject, rate, fidelity, prompt, context="taught"):
    scores = {"effnet_best": fidelity + 0.1, "lpips_best": fidelity - 0.1, "identity": fidelity + 0.2, "identity_lpips": fidelity - 0.2}
    found = {"method": method, "subject": subject, "learning_rate": rate, "context": context} | scores
    return found if prompt is None else found | {"prompt": prompt}


def test_selection_is_half_fidelity_and_half_prompt():
    records = [
        record("m", "a", 1.0, 0.8, 0.5),
        record("m", "a", 1.0, 0.6, None, "bare"),
        record("m", "b", 1.0, 0.2, 1.0),
    ]
    # a: (0.7 + 0.5) / 2; b: (0.2 + 1.0) / 2; a subject counts once, however many records it has
    assert selection_score(records) == pytest.approx((0.6 + 0.6) / 2)


def test_the_best_rate_of_whole_sweeps():
    rates = RATE_FACTORS
    swept = [record("m", s, r, 0.5 + (0.1 if r == 3.2 else 0), 0.5) for s in "ab" for r in rates]
    swept += [record("lora-unet-r4", s, r, 0.5 + r / 100, 0.5) for s in "ab" for r in rates]
    found = choose(swept, ("a", "b"))
    assert found["m"]["rate"] == 3.2 and not found["m"]["at_edge"] and len(found["m"]["scores"]) == len(rates)
    assert found["lora-unet-r4"]["rate"] == 32.0 and found["lora-unet-r4"]["at_edge"]
    missing = [r for r in swept if (r["method"], r["subject"], r["learning_rate"]) != ("m", "b", 1.0)]
    assert set(choose(missing, ("a", "b"))) == {"lora-unet-r4"}


def test_the_best_lora_is_known_when_all_were_swept():
    loras = [method for method in METHODS if method.startswith("lora-")]
    chosen = {method: {"score": i / 10} for i, method in enumerate(loras)} | {"ours": {"score": 9.0}}
    assert len(loras) >= 4 and best_lora(chosen) == loras[-1]
    del chosen[loras[0]]
    assert best_lora(chosen) is None
