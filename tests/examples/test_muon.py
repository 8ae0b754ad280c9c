"""Muon and AdamW as one optimizer."""

import copy

import torch

from examples.language_model import LanguageModel, Size, windows
from examples.muon import MuonAndAdamW, divide

SIZE = Size(layers=1, width=32, heads=2, context=8)
TEXT = torch.arange(400).remainder(97).to(torch.uint8).long()


def model_of(seed: int) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(SIZE)


def train(model: LanguageModel, steps: list[torch.optim.Optimizer], first: int, last: int) -> None:
    for step in range(first, last):
        for optimizer in steps:
            optimizer.zero_grad()
        model.loss(windows(TEXT, 4, SIZE.context, torch.Generator().manual_seed(step))).backward()  # type: ignore[no-untyped-call]
        for optimizer in steps:
            optimizer.step()


def same(ours: LanguageModel, theirs: LanguageModel) -> bool:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.equal(our, their) for our, their in pairs)


def test_it_is_muon_and_adamw() -> None:
    ours, theirs = model_of(1), model_of(1)
    matrices, rest = divide(theirs)
    muon = torch.optim.Muon(matrices, lr=0.01, momentum=0.9, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    train(ours, [MuonAndAdamW(ours, lr=0.01, momentum=0.9)], 0, 4)
    train(theirs, [muon, torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95))], 0, 4)
    assert same(ours, theirs)
    assert not same(ours, model_of(1))


def test_a_checkpoint_holds_both_states_and_a_scheduler_sets_both_rates() -> None:
    ours, theirs = model_of(2), model_of(3)
    first, second = MuonAndAdamW(ours, lr=0.01), MuonAndAdamW(theirs, lr=0.5)
    train(ours, [first], 0, 3)
    theirs.load_state_dict(ours.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for optimizer in (first, second):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    train(ours, [first], 3, 6)
    train(theirs, [second], 3, 6)
    assert same(ours, theirs)
    assert {len(state) for state in second.state.values()} == {1, 3}  # momentum; step and two moments
