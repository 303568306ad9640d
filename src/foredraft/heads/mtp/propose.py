"""Drafts with a layer for multi-token prediction: one that the target's own file has, or one that was trained for it.
Costs a run of that layer and of the target's output head per depth of the tree.
Shines where a model brings such a layer: there is nothing to train or to download."""

from __future__ import annotations

from foredraft.heads.eagle.propose import EagleRunner
from foredraft.heads.mtp.serve import MtpHead
from foredraft.heads.propose import HeadDrafter


class MtpRunner(EagleRunner):
    def _served(self) -> type[MtpHead]:
        return MtpHead


class Mtp(HeadDrafter):
    kind = "mtp"
    runner = MtpRunner
    drafts_on = True


PROPOSER = Mtp
