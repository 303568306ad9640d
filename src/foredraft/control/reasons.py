"""Why a proposer was queried or not, and what became of a draft: what users are told of each decision."""

DRAFTED = "drafted"
NOTHING_PROPOSED = "nothing proposed"
TOO_UNSURE = "would not pay"
LEDGER = "ledger"
MEASURING = "measuring"
RESTING = "resting"
PROBE = "probe"
