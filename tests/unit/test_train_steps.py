"""The parts of a training step: features equal the decoder's, losses equal autograd's, unrolled chains and blocks equal
those that a drafter would compute one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from foredraft.heads.dflash.module import DFlashModule
from foredraft.heads.dflash.train import DFlashStudent
from foredraft.heads.eagle.module import EagleModule
from foredraft.heads.eagle.train import EagleStudent
from foredraft.heads.mtp.module import MtpModule
from foredraft.heads.mtp.train import MtpStudent
from foredraft.models.catalog import open_checkpoint
from foredraft.train import losses
from foredraft.train.batches import Batch
from foredraft.train.evaluate import Walk
from foredraft.train.features import Features, FrozenTarget
from foredraft.train.kept_features import KeptFeatures
from foredraft.train.kinds import build_student, parse_kind
from foredraft.train.losses import soft_cross_entropy
from foredraft.train.optimizer import Optimizer, learning_rate, orthogonal
from foredraft.train.target_batch import TargetBatch, Teacher
from tests.tiny_models import all_logits, random_model, save_model
from tests.unit.head_configs import head_config

CPU = torch.device("cpu")
SIZES = {
    "target_hidden_size": 64,
    "hidden_size": 64,
    "target_vocab_size": 320,
    "target_num_layers": 3,
    "draft_vocab_size": 40,
}


@pytest.mark.parametrize(
    "name",
    [
        "llama-tied",
        "llama-biased",
        "llama-3.1",
        "mistral-sliding",
        "qwen3",
        "smollm3",
        "phi3-partial",
        "granite",
        "gemma3",
    ],
)
def test_features_are_those_of_the_decoder(name: str, tmp_path: Path) -> None:
    folder = save_model(random_model(name), tmp_path)
    prompt = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    target = FrozenTarget(open_checkpoint(folder), CPU, 128)
    padded = torch.tensor([prompt + [0] * 10, [3] * 80])  # neither padding nor neighbours are seen
    features = target.run(padded, frozenset({0, 1, 3}))
    expected = all_logits(folder, prompt, "torch")
    found = features.normed[0, : len(prompt)] @ target.head.T / target.config.logits_divisor
    assert torch.allclose(found, expected, atol=2e-4, rtol=1e-4)
    last = features.streams[3]
    if target.config.num_layers == 3:
        normed = functional.rms_norm(last, (64,), target.norm, target.config.rms_norm_eps)
        assert torch.equal(normed, features.normed)
    assert features.taps((1, 3)).shape == (2, 80, 128)


@pytest.mark.parametrize("num_rows", [0, 70, 1000])
def test_kept_features_are_those_of_the_run_before(
    num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = FrozenTarget(open_checkpoint(save_model(random_model("llama"), tmp_path)), CPU, 128)
    tokens = torch.randint(0, 320, (4, 64), generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([40, 64, 20, 30])
    tokens[torch.arange(64) >= lengths[:, None]] = 0
    batch = Batch(tokens, lengths, torch.tensor([6, 9, 3, 3]), (5, 2, 7, 9))
    taps = frozenset({3, 1})
    kept = KeptFeatures(target, taps, num_rows)
    kept.run(batch.chosen(torch.tensor([True, False, True, False])))  # 60 rows

    computed: list[int] = []
    run = target.run

    def counted(tokens: Tensor, taps: frozenset[int]) -> Features:
        computed.append(len(tokens))
        return run(tokens, taps)

    monkeypatch.setattr(target, "run", counted)
    found, again = kept.run(batch), kept.run(batch)
    assert computed == {0: [4, 4], 70: [2, 2], 1000: [2]}[num_rows], "what is kept is not run"
    expected = run(tokens, taps)
    for row, length in enumerate(lengths.tolist()):
        for features in (found, again):
            parts = zip((features.taps((1, 3)), features.normed), (expected.taps((1, 3)), expected.normed))
            assert all(torch.allclose(mine[row, :length], theirs[row, :length], atol=1e-5) for mine, theirs in parts)
            assert features.normed.isfinite().all(), "padding too"


def test_the_loss_and_its_gradients_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_PIECE_LOGITS", 3 * 11)  # several pieces, the last one shorter
    torch.manual_seed(0)
    rows, weight = torch.randn(10, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    labels = torch.softmax(torch.randn(7, 11), -1)
    index, scale = torch.randint(0, 7, (10,)), torch.rand(10)
    loss = soft_cross_entropy(rows, weight, labels, index, scale) * 2
    loss.backward()
    found = loss, rows.grad, weight.grad
    rows.grad = weight.grad = None
    log_q = torch.log_softmax(rows @ weight.T, -1)
    expected = 2 * (-(labels[index] * log_q).sum(-1) * scale).sum()
    expected.backward()
    for mine, theirs in zip(found, (expected, rows.grad, weight.grad)):
        assert mine is not None and theirs is not None
        assert torch.allclose(mine, theirs, atol=1e-5)
    kept = rows.grad
    rows.grad = weight.grad = None
    (soft_cross_entropy(rows, weight.detach(), labels, index, scale) * 2).backward()
    assert rows.grad is not None and kept is not None and torch.allclose(rows.grad, kept, atol=1e-5)
    assert weight.grad is None, "a weight that is not trained"


def test_labels_are_the_target_distribution_over_the_draft_vocabulary(tmp_path: Path) -> None:
    target, seen, token_ids = scene(tmp_path)
    place = 20
    logits = seen.features.normed[1, place] @ target.head.T / target.config.logits_divisor
    row = int(seen.label_rows[1, place])
    assert torch.allclose(seen.labels[row], torch.softmax(logits[token_ids], -1), atol=1e-6)
    # Rows are there for positions whose next token is in the answer.
    expected = [[6 <= t + 1 < 50 for t in range(64)], [9 <= t + 1 < 60 for t in range(64)]]
    assert (seen.label_rows >= 0).tolist() == expected
    assert seen.rows_ahead(3)[0, 10] == seen.label_rows[0, 13]
    assert int(seen.rows_ahead(3)[0, 62]) == -1


def scene(folder: Path) -> tuple[FrozenTarget, TargetBatch, Tensor]:
    target = FrozenTarget(open_checkpoint(save_model(random_model("llama"), folder)), CPU, 128)
    tokens = torch.randint(0, 320, (2, 64), generator=torch.Generator().manual_seed(2))
    batch = Batch(tokens, torch.tensor([50, 60]), torch.tensor([6, 9]), (0, 1))
    token_ids = torch.arange(40) * 7
    return target, Teacher(target, token_ids, frozenset({1, 2, 3}), kept_rows=0).show(batch), token_ids


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # said once on CPUs without bfloat16 products
@pytest.mark.parametrize(
    "kind",
    [
        "eagle",
        "eagle:own=200",
        "medusa",
        "mtp",
        "dflash",
        "dflash:correction=markov",
        "dflash:input=masked,correction=none",
        "draft",
    ],
)
def test_a_step_in_bfloat16_is_about_that_in_float32(kind: str, tmp_path: Path) -> None:
    """Half-precision rows over float32 masters, as on a GPU."""
    checkpoint = open_checkpoint(save_model(random_model("llama"), tmp_path))
    batch = Batch(torch.randint(0, 320, (2, 64)), torch.tensor([50, 60]), torch.tensor([6, 9]), (0, 1))
    found: dict[torch.dtype, tuple[float, float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        target = FrozenTarget(checkpoint, CPU, 128, dtype)
        drafter = build_student(
            parse_kind(kind), target, torch.arange(320), torch.arange(320), checkpoint.tokenizer(), "tiny", "d", seed=0
        )
        optimizer = Optimizer(drafter.module.named_parameters(), drafter.trunk())
        seen = Teacher(target, torch.arange(320), drafter.taps, kept_rows=0).show(batch)
        losses = []
        for _ in range(2):
            loss = drafter.loss(seen, torch.Generator().manual_seed(0))
            loss.backward()
            optimizer.step(1.0)
            losses.append(loss.item())
        assert all(each.dtype == torch.float32 for each in drafter.module.parameters())
        assert drafter.drafts(seen).shape == (drafter.depth, 2, 64)
        found[dtype] = losses[0], losses[1]
    assert found[torch.bfloat16] == pytest.approx(found[torch.float32], rel=0.03)
    assert found[torch.float32][1] < found[torch.float32][0]


def stir(module: torch.nn.Module) -> None:
    """Random weights where training starts with zeros or ones, so that every part counts."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def test_unrolled_chains_are_those_of_one_sequence_step_by_step(tmp_path: Path) -> None:
    target, seen, token_ids = scene(tmp_path)
    head = EagleModule(head_config("eagle", num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, **SIZES))
    drafter = EagleStudent("eagle", head, target, token_ids, depth=4)
    stir(head)
    drafts = drafter.drafts(seen)
    row, anchor = 1, 23  # the last committed token
    tokens = seen.batch.tokens[row]
    with torch.no_grad():
        h = head.fc(seen.features.taps(head.config.taps))[row : row + 1, :anchor]
        positions = torch.arange(anchor)[None]
        y, keys = head.midlayer(target.embed(tokens[None, 1 : anchor + 1]), h, positions, [], None)
        past, y = [keys], y[:, -1:]
        for depth in range(4):
            best = int(token_ids[head.lm_head(head.norm(y))[0, 0].argmax()])
            assert int(drafts[depth, row, anchor]) == best
            following = target.embed(tokens[None, anchor + 1 + depth : anchor + 2 + depth])
            mask = torch.ones(1, 1, 1, anchor + depth + 1, dtype=torch.bool)
            y, keys = head.midlayer(following, y, positions[:, -1:] + 1 + depth, past, mask)
            past.append(keys)


def test_unrolled_chains_of_mtp_are_those_of_one_sequence_step_by_step(tmp_path: Path) -> None:
    """With the target's own output head, over all of its tokens."""
    target, seen, _ = scene(tmp_path)
    sizes = {**SIZES, "taps": (3,), "draft_vocab_size": 320}
    head = MtpModule(head_config("mtp", num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, **sizes))
    drafter = MtpStudent("mtp", head, target, torch.arange(320), depth=4)
    stir(head)
    drafts = drafter.drafts(seen)
    row, anchor = 1, 23
    tokens = seen.batch.tokens[row]
    with torch.no_grad():
        positions = torch.arange(anchor)[None]
        state = functional.rms_norm(seen.features.streams[3], (64,), target.norm, target.config.rms_norm_eps)
        embeddings = target.embed(tokens[None, 1 : anchor + 1])
        y, keys = head(embeddings, state[row : row + 1, :anchor], positions, [], None)
        past, y = [keys], y[:, -1:]
        for depth in range(4):
            assert int(drafts[depth, row, anchor]) == int((y @ target.head.T)[0, 0].argmax())
            following = target.embed(tokens[None, anchor + 1 + depth : anchor + 2 + depth])
            mask = torch.ones(1, 1, 1, anchor + depth + 1, dtype=torch.bool)
            y, keys = head(following, y, positions[:, -1:] + 1 + depth, past, mask)
            past.append(keys)


def test_labels_over_all_tokens_are_those_of_some_positions(tmp_path: Path) -> None:
    target, seen, _ = scene(tmp_path)
    some = seen.over_all_tokens(20, torch.Generator().manual_seed(0))
    assert int((some.label_rows >= 0).sum()) == 20 and some.labels.shape == (20, 320)
    assert bool(((some.label_rows < 0) | (seen.label_rows >= 0)).all())
    for row, place in (some.label_rows >= 0).nonzero().tolist():
        expected = torch.softmax(seen.features.normed[row, place] @ target.head.T, -1)
        assert torch.allclose(some.labels[some.label_rows[row, place]], expected, atol=1e-6)
    every = seen.over_all_tokens(10**6, torch.Generator().manual_seed(0))
    assert torch.equal(every.label_rows, seen.label_rows)


@pytest.mark.parametrize("correction", ["none", "markov", "refiner"])
def test_blocks_beside_each_other_are_those_of_one_block_alone(correction: str, tmp_path: Path) -> None:
    target, seen, token_ids = scene(tmp_path)
    head = DFlashModule(
        head_config("dflash", correction, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, **SIZES)
    )
    drafter = DFlashStudent("dflash", head, target, token_ids, depth=4)
    stir(head)
    drafts = drafter.drafts(seen)
    row, anchor = 1, 23
    tokens = seen.batch.tokens[row]
    with torch.no_grad():
        features = head.features(seen.features.taps(head.config.taps))[row : row + 1, :anchor]
        context = head.context(features, torch.arange(anchor)[None])
        x = head.rows(target.embed(tokens[None, anchor : anchor + 1]), features[:, -1:])
        mask = torch.ones(1, 1, 4, anchor + 4, dtype=torch.bool)
        y = head.blocks(x, torch.arange(anchor, anchor + 4)[None], context, mask)
        rows, weight = head.output(y, tokens[None, anchor : anchor + 4])
        best = token_ids[(rows @ weight.T).argmax(-1)][0]
    assert drafts[:, row, anchor].tolist() == best.tolist()


def test_a_walk_counts_the_steps_of_a_chain() -> None:
    right = np.zeros((2, 9), np.bool_)
    right[:, 3] = True  # behind token 3: both right, then the target's own: tokens 4, 5, 6
    right[1, 6] = True  # behind token 6: the first is wrong
    right[0, 7] = True  # behind token 7: right, and the text ends
    walk = Walk(2)
    walk.add(right, prompt_len=3, length=9)
    found = walk.result()
    assert found.runs == 3 and found.tokens_per_run == 5 / 3
    assert found.acceptance == (2 / 3, 1.0)
    assert Walk(2).result().acceptance == ()  # no text was held out: that is no rate of 0


def test_matrices_become_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    for shape in ((2, 8, 20), (2, 20, 8)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_the_learning_rate_rises_and_falls() -> None:
    assert learning_rate(0, 0.0) == 0.01
    assert learning_rate(500, 0.0) == 1.0
    assert learning_rate(3, 0.05) > 0.99  # a short run warms up with its share
    assert abs(learning_rate(500, 0.5) - 0.5) < 1e-9
    assert learning_rate(500, 1.0) == 0.0
